"""What PyTorch ships: the backends of scaled_dot_product_attention, FlexAttention, and the oracle compiled.

Each function takes checked inputs and runs the one kernel it is named after, or raises UsageError: a backend that
cannot run these inputs on this device is never replaced by another.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainstep.attention.eager import attention_eager
from trainstep.attention.inputs import describe
from trainstep.errors import UnsupportedError

BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}

# One compiled version per shape: a benchmark walks through more shapes than torch.compile's default of 8, beyond which
# it would run the uncompiled function under the compiled one's name (fullgraph turns even that into an error).
_SHAPES = 4096


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    """scaled_dot_product_attention with the backend PyTorch picks."""
    q4, k4, v4, grouped = _four_dims(q, k, v)
    out = F.scaled_dot_product_attention(q4, k4, v4, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return out.reshape(q.shape)


def attention_sdpa_backend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, *, impl: str) -> Tensor:
    """scaled_dot_product_attention with the one backend that `impl` (a key of BACKENDS) names."""
    try:
        with sdpa_kernel(BACKENDS[impl]):
            return attention_sdpa(q, k, v, is_causal, scale)
    except RuntimeError as error:
        # Raised by PyTorch's own choice of backend, before anything is launched.
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            why = "PyTorch's warnings say why" if q.is_cuda else "PyTorch has no such kernel for them"
            raise UnsupportedError(
                f"impl={impl!r} cannot run these inputs here: {describe(q, k, v)}, is_causal={is_causal}. "
                f"{why}; impl='sdpa' lets PyTorch pick a backend that can"
            ) from error
        raise


def attention_flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    """FlexAttention, compiled for this shape. On CPU tensors that need gradients, which it cannot give: UsageError."""
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise UnsupportedError(
            f"impl='flex' has no backward on the CPU: {describe(q, k, v)}; use impl='eager' or 'sdpa' there"
        )
    from torch.nn.attention.flex_attention import flex_attention

    mask = _causal_block_mask(q.shape[-2], k.shape[-2], str(q.device)) if is_causal else None
    q4, k4, v4, grouped = _four_dims(q, k, v)
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        out = _compiled(flex_attention)(q4, k4, v4, block_mask=mask, scale=scale, enable_gqa=grouped)
    return cast(Tensor, out).reshape(q.shape)


def attention_eager_compiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    """The oracle through torch.compile, compiled for this shape."""
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        return cast(Tensor, _compiled(attention_eager)(q, k, v, is_causal, scale))


def _four_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """All as (batch, heads, length, head_dim), with 1 for what is missing, and whether key heads are shared."""
    q, k, v = (t.flatten(0, -4) if t.ndim > 4 else t[(None,) * (4 - t.ndim)] for t in (q, k, v))
    return q, k, v, q.shape[1] != k.shape[1]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


@lru_cache(maxsize=64)
def _causal_block_mask(n_queries: int, n_keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    return create_block_mask(causal, B=None, H=None, Q_LEN=n_queries, KV_LEN=n_keys, device=device)
