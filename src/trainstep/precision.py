"""What a precision means to torch: which hardware it needs, what autocast casts to, how float32 is multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from trainstep.config import Precision
from trainstep.errors import UnsupportedError

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-pure": torch.bfloat16,
}
"""Precision → the dtype of what is multiplied."""

AUTOCAST_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise `UnsupportedError` where the device has no hardware for the precision."""
    if precision == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UnsupportedError(f"tf32 needs an NVIDIA GPU of compute capability 8.0 or later, not {device}")
    if precision in ("bf16", "bf16-pure") and device.type == "cuda":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                name = torch.cuda.get_device_name(device)
                raise UnsupportedError(f"{precision}: {name} has no bfloat16 units; use --precision fp16")


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """float32 matmuls on TF32 units for "tf32", in full float32 otherwise; the process's setting is put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to the precision's 16-bit type, or nothing where the precision has none."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers, such as rotary tables, keep the precision their authors chose."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
