"""The oracle: attention as its formula says, in whatever floating-point dtype comes, float64 included.

O = softmax(scale · QKᵀ + mask) V. Every score is materialised, so memory grows with n_queries · n_keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from trainstep.attention.documents import document_of
from trainstep.attention.scoring import Scoring

PIECES = {"scores": "attention_scores", "softmax": "attention_weights", "weighted sum": "weighted_sum"}
"""Name of each piece of eager attention → the function of this module that computes it."""


def attention_scores(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """scale · QKᵀ, or softcap · tanh(scale · QKᵀ / softcap), with -inf where key j is hidden from query i.

    Causal masking hides j > i, a window j ≤ i - window too, and documents the keys of another.

    q (..., heads, n_queries, head_dim), k (..., kv_heads, n_keys, head_dim) → (..., heads, n_queries, n_keys)
    """
    scores = q @ _per_query_head(k, q).mT * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    if scoring.is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if scoring.window is not None:
            visible = visible.triu(1 - scoring.window)
        scores = scores.masked_fill(~visible, float("-inf"))
    if scoring.cu_seqlens is not None:
        document = document_of(scoring.cu_seqlens, scores.shape[-1])
        scores = scores.masked_fill(document[:, None] != document, float("-inf"))
    return scores


def attention_weights(scores: Tensor) -> Tensor:
    """Softmax of the scores over the keys, shape (..., heads, n_queries, n_keys)."""
    return scores.softmax(dim=-1)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """weights · V, shape (..., heads, n_queries, head_dim)."""
    return weights @ _per_query_head(v, weights)


def attention_eager(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """softmax(scores) V, shape (..., heads, n_queries, head_dim)."""
    return weighted_sum(attention_weights(attention_scores(q, k, scoring)), v)


def _per_query_head(t: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of k or v until each query head has its own (grouped-query attention)."""
    if q.ndim < 4 or t.shape[-3] == q.shape[-3]:
        return t
    return t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3)


@contextmanager
def pieces_announced(announce: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """While entered, each piece of `attention_eager` runs inside `announce(name)`.

    The module's functions are replaced, so outside of this there is no overhead. Not for code under torch.compile,
    which would be compiled anew, and not for use from several threads.
    """

    def announced(function: Callable[..., Any], piece: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside_range(*args: Any) -> Any:
            with announce(piece):
                return function(*args)

        return inside_range

    originals = {function: globals()[function] for function in PIECES.values()}
    globals().update({function: announced(originals[function], piece) for piece, function in PIECES.items()})
    try:
        yield
    finally:
        globals().update(originals)
