"""`attention`: checks the inputs, then runs the implementation named. An explicit name never falls back."""

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from trainstep.attention import native
from trainstep.attention.choice import choose
from trainstep.attention.eager import attention_eager
from trainstep.attention.inputs import as_autocast, check_inputs, resolve_scale
from trainstep.errors import UsageError

Implementation = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]


def _flash_reference(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    from trainstep.attention.flash_reference import FlashAttentionReference

    return cast(Tensor, FlashAttentionReference.apply(q, k, v, is_causal, scale))  # type: ignore[no-untyped-call]


def _flash_triton(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    from trainstep.attention.triton.function import flash_attention

    return flash_attention(q, k, v, is_causal=is_causal, scale=scale)


_BY_NAME: dict[str, Implementation] = {
    "eager": attention_eager,
    "eager-compiled": native.attention_eager_compiled,
    "flash-reference": _flash_reference,
    "flash-triton": _flash_triton,
    "sdpa": native.attention_sdpa,
    **{name: partial(native.attention_sdpa_backend, impl=name) for name in native.BACKENDS},
    "flex": native.attention_flex,
}

IMPLEMENTATIONS: tuple[str, ...] = (*_BY_NAME, "auto")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """softmax(scale · QKᵀ + mask) V.

    q: (..., heads, n_queries, head_dim), (batch, n_queries, head_dim) or (n_queries, head_dim). k, v: the same with
    n_keys rows and, with four or more dimensions, possibly fewer heads (grouped-query attention). The result has q's
    shape.
    is_causal: query i sees the keys j ≤ i, counted from the start of both. scale: 1/√head_dim where None.
    impl: one of IMPLEMENTATIONS. "auto" runs what `choose` answers; any other name runs that or raises.

    Under autocast the inputs are cast as `F.scaled_dot_product_attention` casts them.
    Raises TypeError (not floating-point tensors of one dtype) or UsageError (shapes, devices, an implementation that is
    unknown or cannot run these inputs here) before any kernel starts.
    """
    if impl != "auto" and impl not in _BY_NAME:
        raise UsageError(f"unknown attention implementation {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    q, k, v = as_autocast(q, k, v)
    sizes = check_inputs(q, k, v)
    factor = resolve_scale(scale, sizes.head_dim)
    name = choose(q, k, v, is_causal) if impl == "auto" else impl
    return _BY_NAME[name](q, k, v, is_causal, factor)
