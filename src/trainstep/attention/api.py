"""`attention`: checks the inputs, then runs the implementation named. An explicit name never falls back.

An implementation is a function of checked inputs (q, k, v, scoring → o in q's shape; UsageError for what it cannot
run here) and its entry in `base.operators.ATTENTION`, from which flags are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from trainstep.attention import tuned
from trainstep.attention.scoring import Scoring, checked, with_positive_scale
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.operators import ATTENTION, function_at


def attention_triton(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Our kernels, imported once they are called, since Triton may not be there."""
    from trainstep.attention.flash import attention_flash

    return attention_flash(q, k, v, scoring)


# Looked up here and not at a call, through which torch.compile could not trace.
_BY_NAME: dict[str, Callable[..., Tensor]] = {
    name: function_at(f"attention.{each.home}") for name, each in ATTENTION.items()
}
_ONLY_PLAIN = frozenset(name for name, each in ATTENTION.items() if each.only_plain)

IMPLEMENTATIONS: tuple[str, ...] = (*_BY_NAME, "auto")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """softmax(scale · QKᵀ + mask) V.

    q: (..., heads, n_queries, head_dim), (batch, n_queries, head_dim) or (n_queries, head_dim). k, v: the same with
    n_keys rows and, with four or more dimensions, possibly fewer heads, a divisor of q's (grouped-query attention:
    query head h reads key head h // (heads // kv_heads)). The result has q's shape.
    is_causal: query i sees the keys j ≤ i, counted from the start of both.
    scale: a finite number of any sign; 1/√head_dim where None. A tensor that requires a gradient is refused. Multiply
    a learned scale into q: attention(q * scale, k, v, scale=1).
    window: with is_causal, query i sees the `window` keys (1 or more) j up to and with its own, i - window < j ≤ i, as
    transformers counts its `sliding_window`; flash-attn's window_size, which leaves out the own key, is
    (window - 1, 0). None: all keys j ≤ i. A window of n_queries keys or more hides none and is taken for None.
    cu_seqlens: offsets (documents + 1,), int32 or int64, of documents packed end to end along the length, as
    flash-attn's varlen functions take them: token i is in document d where cu_seqlens[d] ≤ i < cu_seqlens[d + 1], and
    sees keys of that document alone, as is_causal and window say. A document may be empty. They hold for all batch rows
    and heads. On a CPU they are checked; on a GPU asserted, as asking would make the host wait.
    softcap: before the mask, a score s becomes softcap · tanh(s / softcap), with softcap above 0, as flash-attn's
    softcap and transformers' attn_logit_softcapping.
    impl: one of IMPLEMENTATIONS. "auto" runs what `choose` answers; any other name runs that or raises. SDPA has
    windows and documents only as a mask of n_queries · n_keys numbers, under which its flash kernels do not run, and
    no softcap: all but "sdpa-flash", which reaches the former by another way, raise.

    Under autocast the inputs are cast as `F.scaled_dot_product_attention` casts them (float64 stays).
    Raises TypeError (not floating-point tensors of one dtype) or UsageError (shapes, devices, an implementation that is
    unknown or cannot run these inputs here) before any kernel starts.
    """
    if impl != "auto" and impl not in _BY_NAME:
        raise UsageError(f"unknown attention implementation {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    q, k, v, scoring = checked(
        q, k, v, is_causal=is_causal, scale=scale, window=window, cu_seqlens=cu_seqlens, softcap=softcap
    )
    name = choose(q, k, v, is_causal, is_plain=scoring.is_plain) if impl == "auto" else impl
    if not scoring.is_plain and name in _ONLY_PLAIN:
        asked = next(each for each in ("window", "cu_seqlens", "softcap") if getattr(scoring, each) is not None)
        raise UnsupportedError(
            f"impl={name!r} takes no {asked}: PyTorch's scaled_dot_product_attention has no softcap, and windows "
            "and documents as a mask of all queries by all keys alone, which its flash kernels do not take; use one of "
            f"{', '.join(sorted(_BY_NAME.keys() - _ONLY_PLAIN))}"
        )
    q, scale = with_positive_scale(q, scoring.scale)
    return _BY_NAME[name](q, k, v, replace(scoring, scale=scale))


def choose(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *, is_plain: bool = True) -> str:
    """Name the implementation that `attention(q, k, v, impl="auto")` runs for these inputs: the fastest measured.

    Whatever the table (`choice.json`) does not hold (the CPU, a GPU, dtype or head_dim not measured, grouped heads, two
    lengths) is left to PyTorch: "sdpa". With a window, documents or a softcap (not is_plain), of which no choice
    is measured, our kernels run where they can, whose memory is linear in the length, and "eager" elsewhere.
    """
    if not is_plain:
        if q.device.type != "cuda":
            return "eager"
        from trainstep.attention.flash import unsupported

        return "eager" if unsupported(q, k, v) else "flash-triton"
    if q.device.type != "cuda" or torch.version.hip is not None or q.shape != k.shape or k.shape != v.shape:
        return "sdpa"
    gpu = tuned.gpu_name(torch.cuda.get_device_capability(q.device))
    case = (gpu, str(q.dtype).removeprefix("torch."), q.shape[-1], is_causal)
    fastest = "sdpa"
    for from_length, impl in tuned.FASTEST.get(case, ()):
        fastest = impl if q.shape[-2] >= from_length else fastest
    return fastest


@dataclass
class Replaced:
    calls: int = 0  # that the replacement has received


@contextmanager
def sdpa_replaced(impl: str) -> Iterator[Replaced]:
    """While entered, `torch.nn.functional.scaled_dot_product_attention` runs `attention(..., impl=impl)`.

    A module that took the function itself (`from torch.nn.functional import scaled_dot_product_attention`) is not
    reached: `calls` stays 0. Not for use from several threads. A call with a mask or dropout, which our implementations
    do not take, raises UnsupportedError.
    """
    seen = Replaced()
    original = F.scaled_dot_product_attention

    def replacement(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None or dropout_p:
            raise UnsupportedError(
                f"the model calls scaled_dot_product_attention with {'a mask' if dropout_p == 0 else 'dropout'}, which "
                f"impl={impl!r} does not take; causal attention without dropout it does (is_causal=True)"
            )
        seen.calls += 1
        return attention(query, key, value, is_causal=is_causal, scale=scale, impl=impl)

    F.scaled_dot_product_attention = replacement
    try:
        yield seen
    finally:
        F.scaled_dot_product_attention = original
