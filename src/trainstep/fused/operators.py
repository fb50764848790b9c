"""Parts that the fused operators share: which tensors they take, and how a kernel becomes an operator of PyTorch's.

An operator is defined with its shapes for tracing, so that torch.compile, instruments and CUDA graphs see one call. Its
gradient is an autograd.Function of the operator's own file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainstep.base.errors import UnsupportedError
from trainstep.fused.triton import INTERPRETED

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def operator(name: str, computed: Callable[..., Any], traced: Callable[..., Any], mutates: Sequence[str] = ()) -> Any:
    """The operator `trainstep::name`: `computed` on a GPU, or on a CPU in Triton's interpreter; `traced` for shapes."""
    full = f"trainstep::{name}"
    schema = torch.library.infer_schema(computed, mutates_args=mutates)
    torch.library.define(full, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(full, "cpu" if INTERPRETED else "cuda", computed)
    torch.library.register_fake(full, traced)
    return getattr(torch.ops.trainstep, name).default


def require(what: str, **tensors: Tensor) -> None:
    """Raise unless the kernels take these tensors: floating point up to 32 bits, on one device that runs them.

    Raises:
        TypeError: a dtype other than float32, float16 and bfloat16.
        UnsupportedError: tensors on several devices, or on one that does not run the kernels.
    """
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        raise TypeError(f"{what} takes float32, float16 or bfloat16: got {described(**tensors)}")
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise UnsupportedError(f"{what} takes tensors of one device: got {described(**tensors)}")
    require_device(what, devices.pop())


def require_device(what: str, device: torch.device) -> None:
    """Raise `UnsupportedError` unless the kernels run on `device`."""
    if INTERPRETED and device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise UnsupportedError(
            f"{what} runs on NVIDIA GPUs, and this is {device}; move the tensors to one, or use trainstep.fused.eager "
            "(on a CPU, tiny sizes also run in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts)"
        )
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        raise UnsupportedError(f"{what} needs compute capability 8.0 (Ampere) or newer, {device} has {capability}")


def described(**tensors: Tensor) -> str:
    """Shape, dtype and device of each, for error messages."""
    return ", ".join(
        f"{name} {tuple(each.shape)} {str(each.dtype).removeprefix('torch.')} on {each.device}"
        for name, each in tensors.items()
    )
