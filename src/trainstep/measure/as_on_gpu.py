"""Operators that torch chooses on a GPU, called on tensors without data where there is none: they keep other tensors.

A CPU keeps scaled dot-product attention's scores where it has dropout, dropout's mask in the input's dtype, and norms
and softmax under autocast in 16 bits. `AsOnGpu` calls what torch chooses on CUDA, as its registrations say
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, `native/Dropout.cpp`, `autocast_mode.h`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

_FLASH_HEAD_DIM = 256
_IN_FLOAT32 = {
    *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, torch.layer_norm, torch.group_norm),
    *(torch.softmax, torch.log_softmax, torch.pow, torch.rsqrt, torch.exp, torch.log, torch.sum, torch.cumsum),
    *(Tensor.softmax, Tensor.log_softmax, Tensor.pow, Tensor.rsqrt, Tensor.exp, Tensor.log, Tensor.sum, Tensor.cumsum),
}
"""Functions that autocast computes in float32 on CUDA, and not on a CPU; rarer ones are left out."""


class AsOnGpu(TorchFunctionMode):
    """Function mode that calls the operators of CUDA on fake tensors, which need no kernels.

    A mode does not see what torch's functions in Python call, as `multi_head_attention_forward`; they look names up.
    """

    def __enter__(self) -> AsOnGpu:
        for func, own in _OWN.items():
            setattr(F, func.__name__, own)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *ended: object) -> None:
        for func in _OWN:
            setattr(F, func.__name__, func)
        super().__exit__(*ended)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_in_float32, (args, kwargs))
        return _OWN.get(func, func)(*args, **kwargs)


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


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
        how |= {"attn_mask": attn_mask, "enable_gqa": enable_gqa}
        return _ATTENTION(query, key, value, **how)
    if attn_mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= _FLASH_HEAD_DIM:
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
    if inplace or not training or not 0 < p < 1:
        return _DROPOUT(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout
_OWN: dict[Any, Callable[..., Tensor]] = {_ATTENTION: _attention, _DROPOUT: _dropout}
