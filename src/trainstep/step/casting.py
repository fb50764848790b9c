"""Meaning of a precision to torch: which hardware it needs, what autocast casts to, how float32 is multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError
from trainstep.base.precision import PRECISIONS, PrecisionName

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, each.computed) for name, each in PRECISIONS.items()}
"""Precision → the dtype of what is multiplied."""


def check_precision(precision: PrecisionName, device: torch.device) -> None:
    """Raise `UnsupportedError` where the device has no hardware for the precision."""
    entry, on_gpu = PRECISIONS[precision], device.type == "cuda"
    if entry.uses_tf32 and (not on_gpu or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UnsupportedError(f"{precision} needs an NVIDIA GPU of compute capability 8.0 or later, not {device}")
    if entry.computed == "bfloat16" and on_gpu:
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                name = torch.cuda.get_device_name(device)
                raise UnsupportedError(f"{precision}: {name} has no bfloat16 units; use --precision fp16")


@contextmanager
def matmul_precision(precision: PrecisionName) -> Iterator[None]:
    """float32 matmuls on TF32 units for "tf32", in full float32 otherwise; the process's setting is put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if PRECISIONS[precision].uses_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast_dtype(precision: PrecisionName) -> torch.dtype | None:
    """The 16-bit type that autocast converts to; None where the precision needs no autocast."""
    return DTYPES[precision] if PRECISIONS[precision].is_autocast else None


def autocast(precision: PrecisionName, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast to the precision's 16-bit type, or nothing where the precision has none.

    Tensors without data may be on a CUDA device without a GPU, where `torch.autocast` turns itself off.
    """
    dtype = autocast_dtype(precision)
    if dtype is not None and device.type == "cuda" and not torch.cuda.is_available():
        return _autocast_without_a_gpu(dtype)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def _autocast_without_a_gpu(dtype: torch.dtype) -> Iterator[None]:
    """CUDA's autocast as `torch.autocast` enters and leaves it. The dispatcher has its kernels in every build."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def stored_dtype(precision: PrecisionName) -> torch.dtype | None:
    """The 16-bit type that weights and inputs are cast to; None where they stay as they are."""
    entry = PRECISIONS[precision]
    return getattr(torch, entry.stored) if entry.is_stored_half else None


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers, such as rotary tables, keep the precision their authors chose."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def widen(module: nn.Module) -> None:
    """Make weights and buffers in bf16 a float32 copy of themselves; the parameters stay the same objects."""
    module._apply(lambda tensor: widened(tensor))  # as Module.to does, which would also narrow float64


def widened(tensor: Tensor) -> Tensor:
    """A bf16 tensor in float32, any other as it is."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def in_tf32(tensor: Tensor) -> Tensor:
    """Float32 numbers rounded to the nearest of 11 bits, ties to even, as products in TF32 take them (seen of cuBLAS on
    an H200). Beyond 2¹¹⁴ there is no number."""
    widened = tensor * (2**13 + 1)  # Veltkamp's splitting: what is above the 13 bits that go
    return widened - (widened - tensor)
