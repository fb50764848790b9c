"""Demands on a module that is to be wrapped, and its parts."""

from __future__ import annotations

import torch
from torch import nn

from trainstep.base.errors import UsageError


def contents_of(module: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parameters and modules that it has itself."""
    return tuple(map(id, module._parameters.values())), tuple(map(id, module._modules.values()))


def check_arguments(
    module: nn.Module, bucket_mb: float | None, reduce_dtype: torch.dtype | None, wrapper: type[nn.Module]
) -> None:
    """Raise `UsageError` for a module that has `wrapper` already, or that has nothing to average, or an option that is
    out of range."""
    if any(isinstance(part, wrapper) for part in module.modules()):
        raise UsageError("the module is, or contains, a DistributedDataParallel already; wrap the plain module once")
    if bucket_mb is not None and not bucket_mb >= 0:
        raise UsageError(f"bucket_mb is {bucket_mb}; expected 0 (one call per parameter) up to inf (one call)")
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise UsageError(f"reduce_dtype is {reduce_dtype}; expected a floating-point type")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError("the module has no parameter that requires a gradient; there is nothing to average")
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if on_meta := [name for name, tensor in tensors if tensor.is_meta]:
        raise UsageError(f"{on_meta[0]} is on the meta device; move the module to a real device before wrapping it")
