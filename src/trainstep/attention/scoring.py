"""`Scoring`: what becomes of QKᵀ on its way to the softmax, checked and resolved once, before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainstep.attention.documents import check_documents
from trainstep.attention.inputs import prepare
from trainstep.base.errors import UsageError

SMALLEST, LARGEST = 2.0**-100, 2.0**126
"""Scales that float32 holds with room to spare: kernels multiply them by log2(e), and divide log-sum-exps by them."""


@dataclass(frozen=True, eq=False)  # a comparison would ask for one truth of a tensor
class Scoring:
    """The score of query i and key j is scale · qᵢ·kⱼ, then capped, then hidden where the mask says so.

    What the fields mean: `api.attention`. Here scale is resolved, and None stands for what changes nothing.
    """

    is_causal: bool
    scale: float
    window: int | None = None  # keys, with is_causal only
    cu_seqlens: Tensor | None = None  # (documents + 1,), on q's device
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """True if every implementation has it: the scale, and a causal mask or none."""
        return self.window is None and self.cu_seqlens is None and self.softcap is None


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    window: int | None,
    cu_seqlens: Tensor | None,
    softcap: float | None,
    as_autocast: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Scoring]:
    """`attention`'s inputs, as autocast casts them if `as_autocast`, and the Scoring that its other arguments ask for.

    Raises TypeError or UsageError for what does not fit together, as `attention` says.
    """
    q, k, v = prepare(q, k, v, as_autocast=as_autocast)
    factor = _factor(q, scale)
    window, cu_seqlens = _window(q, k, is_causal, window), check_documents(q, k, cu_seqlens)
    return q, k, v, Scoring(is_causal, factor, window, cu_seqlens, _softcap(softcap))


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q' and scale' of the same scores, scale' · q'·k = scale · q·k, with scale' above 0; linear in q.

    Kernels multiply by the scale behind the mask, whose -inf a negative one turns into inf, and 0 into NaN. Hopper's
    divide by it, so one that is tiny is multiplied into q too. An ordinary scale leaves q as it is.

    Raises:
        UsageError: the scale is not finite.
    """
    scale = _finite(scale)
    if abs(scale) < SMALLEST:
        return q * scale, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def _factor(q: Tensor, scale: float | Tensor | None) -> float:
    """The factor on QKᵀ: the caller's, or 1/√head_dim.

    Raises UsageError for a scale that is not finite, or a tensor whose gradient would be lost.
    """
    if scale is None:
        return 1.0 / math.sqrt(q.shape[-1])
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise UsageError(
            "scale is a tensor that requires a gradient; expected a number, which has none. Multiply a learned scale "
            "into the queries: attention(q * scale, k, v, scale=1)"
        )
    return _finite(scale)


def _finite(scale: Any) -> float:
    if not abs(scale) < LARGEST:
        raise UsageError(f"scale is {scale}; expected a finite number, below 2**126 for float32's sake")
    return float(scale)


def _window(q: Tensor, k: Tensor, is_causal: bool, window: int | None) -> int | None:
    """The window, or None where it hides nothing: where there is none, or it holds every key up to a query's own.

    Raises UsageError for what is no positive number of keys, without is_causal, or where a query would see no key.
    """
    if window is None:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise UsageError(f"window is {window!r}; expected how many keys a query sees, its own among them, at least 1")
    if not is_causal:
        raise UsageError(
            f"window={window} counts the keys up to a query's own, and is_causal is False; pass is_causal=True"
        )
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if n_queries >= n_keys + window:
        raise UsageError(
            f"query {n_queries - 1} sees none of {n_keys} keys through window={window}, which ends at a query's own "
            f"position; pass as many keys as queries, or a window of at least {n_queries - n_keys + 1}"
        )
    return None if window >= n_queries else window


def _softcap(softcap: float | None) -> float | None:
    """The softcap as a float, or None. Raises UsageError for what is no finite number above 0."""
    if softcap is None:
        return None
    if not isinstance(softcap, (int, float)) or not 0 < softcap < math.inf:
        raise UsageError(f"softcap is {softcap!r}; expected a finite number above 0, or None for scores as they are")
    return float(softcap)
