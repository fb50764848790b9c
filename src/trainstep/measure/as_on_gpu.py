"""Operators that torch chooses on a GPU, called on tensors without data where there is none: they keep other tensors.

A CPU keeps scaled dot-product attention's scores where it has dropout, dropout's mask in the input's dtype, and norms
and softmax under autocast in 16 bits. `as_on_gpu` calls what torch chooses on CUDA, as its registrations say
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `native/Dropout.cpp`, `autocast_mode.h`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

_IN_FLOAT32 = "layer_norm group_norm softmax log_softmax cross_entropy pow rsqrt exp log sum cumsum"
"""Functions that autocast computes in float32 on CUDA, and not on a CPU; rarer ones are left out."""


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, the operators of CUDA are called on fake tensors, which need no kernels.

    Functions are replaced where they are looked up, and a mode finds those that code holds. No mode is on where a
    checkpointed block runs again in backward, nor in torch's own functions, as `multi_head_attention_forward`.
    """
    with ExitStack() as stack:
        for owner, name, own in _OWN:
            stack.enter_context(mock.patch.object(owner, name, own))
        stack.enter_context(_AsOnGpu())
        yield


class _AsOnGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _BY_FUNCTION.get(func, func)(*args, **kwargs or {})


def _in_float32(func: Callable[..., Any]) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(cast, (args, kwargs))
        return func(*args, **kwargs)

    return run


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call flash attention for 16 bits without a mask, else memory-efficient, and for 64 bits what the CPU has."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    how: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if query.dim() != 4 or query.dtype == torch.float64:
        return _ATTENTION(query, key, value, attn_mask, enable_gqa=enable_gqa, **how)
    if attn_mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= 256:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **how)[0]
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    if attn_mask is not None:
        with nullcontext() if isinstance(attn_mask, FakeTensor) else _disable_current_modes():  # FLOPs look at it
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, torch.is_grad_enabled(), **how)[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    is_fused = training and not inplace and 0 < p < 1
    return torch.native_dropout(input, p, True)[0] if is_fused else _DROPOUT(input, p, training, inplace)


_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout
_OWN: list[tuple[Any, str, Any]] = [(F, "scaled_dot_product_attention", _attention), (F, "dropout", _dropout)]
for _owner in (F, torch, Tensor):
    _known = [name for name in _IN_FLOAT32.split() if hasattr(_owner, name)]
    _OWN += [(_owner, name, _in_float32(getattr(_owner, name))) for name in _known]
_BY_FUNCTION = {getattr(owner, name): own for owner, name, own in _OWN}
