"""FlashAttention-2 tile by tile in plain PyTorch: the algorithm to read beside the Triton kernels.

T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023. The forward is its
algorithm 1, the backward its algorithm 2 (with dQ summed by one owner instead of atomically). Memory is linear in the
lengths; time is that of a Python loop over tiles, so this is an oracle, not a fast path. float16 and bfloat16 inputs
are multiplied as they are and accumulated in float32, as matrix units do.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trainstep.attention.documents import spans
from trainstep.attention.scoring import Scoring, checked
from trainstep.base.errors import refuse_create_graph

TILE_QUERIES = 64  # B_r in the paper
TILE_KEYS = 64  # B_c


class FlashAttentionReference(torch.autograd.Function):
    """`FlashAttentionReference.apply(q, k, v, is_causal=False, scale=None, window=None, cu_seqlens=None,
    softcap=None)`: arguments as `trainstep.attention.attention`.

    Saves q, k, v, o and the log-sum-exp (shape q.shape[:-1]) for backward, nothing quadratic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        q, k, v, scoring = checked(
            q, k, v, is_causal=is_causal, scale=scale, window=window, cu_seqlens=cu_seqlens, softcap=softcap,
            as_autocast=False,
        )  # fmt: skip
        offsets = scoring.cu_seqlens
        ctx.documents = [slice(None)] if offsets is None else spans(offsets)  # one after the other, each as if alone
        alone = ctx.alone = dataclasses.replace(scoring, cu_seqlens=None)
        q5, k5, v5 = _grouped(q, k, v)
        parts = [flash_forward(q5[..., i, :], k5[..., i, :], v5[..., i, :], alone) for i in ctx.documents]
        o, lse = _joined([part[0] for part in parts], -2), _joined([part[1] for part in parts], -1)
        o, lse = o.reshape(q.shape), lse.reshape(q.shape[:-1])
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("the tile-by-tile FlashAttention", "impl='eager'")
        q, k, v, o, lse = ctx.saved_tensors
        q5, k5, v5 = _grouped(q, k, v)
        o, lse, do = o.reshape(q5.shape), lse.reshape(q5.shape[:-1]), grads[0].reshape(q5.shape)
        parts = [
            flash_backward(
                q5[..., i, :], k5[..., i, :], v5[..., i, :], o[..., i, :], lse[..., i], do[..., i, :], ctx.alone
            )
            for i in ctx.documents
        ]
        dq, dk, dv = (_joined(part, -2) for part in zip(*parts, strict=True))
        # The heads of a group read one key head: its gradient is the sum over them.
        dk, dv = (d.sum(2).to(k.dtype).reshape(k.shape) for d in (dk, dv))
        return dq.reshape(q.shape), dk, dv, None, None, None, None, None


def attention_reference(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """`FlashAttentionReference` of what `checked` returns."""
    settings = scoring.is_causal, scoring.scale, scoring.window, scoring.cu_seqlens, scoring.softcap
    return cast(Tensor, FlashAttentionReference.apply(q, k, v, *settings))  # type: ignore[no-untyped-call]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Algorithm 1: q (..., n_queries, head_dim), k and v (..., n_keys, head_dim) broadcastable to it → o, lse.

    All of one document: the scoring has no cu_seqlens. m is the running row maximum, l the running sum; the output is
    divided by l once, at the end. Tiles of keys that no query of a tile sees are left out. In a window a query may see
    none of the first ones: m is then -inf, from which no difference may be taken.
    """
    accumulate, window = _accumulator(q.dtype), scoring.window
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=accumulate)
    for i in range(0, n_queries, TILE_QUERIES):
        q_i = q[..., i : i + TILE_QUERIES, :]  # (..., B_r, head_dim)
        o_i = torch.zeros_like(q_i, dtype=accumulate)
        m_i = q_i.new_full(q_i.shape[:-1], float("-inf"), dtype=accumulate)  # (..., B_r)
        l_i = torch.zeros_like(m_i)
        visible = min(n_keys, i + TILE_QUERIES, n_queries) if scoring.is_causal else n_keys
        first = 0 if window is None else max(0, i - window + 1) // TILE_KEYS * TILE_KEYS
        for j in range(first, visible, TILE_KEYS):
            s_ij = _scores(q_i, k[..., j : j + TILE_KEYS, :], i, j, scoring)  # (..., B_r, B_c)
            m_new = torch.maximum(m_i, s_ij.amax(-1))
            finite = m_new if window is None else m_new.masked_fill(m_new.isneginf(), 0.0)
            p_ij = (s_ij - finite[..., None]).exp()
            shrink = (m_i - finite).exp()  # what was summed so far was relative to the old maximum
            l_i = shrink * l_i + p_ij.sum(-1)
            o_i = shrink[..., None] * o_i + _matmul(p_ij.to(v.dtype), v[..., j : j + TILE_KEYS, :])
            m_i = m_new
        o[..., i : i + TILE_QUERIES, :] = (o_i / l_i[..., None]).to(o.dtype)
        lse[..., i : i + TILE_QUERIES] = m_i + l_i.log()
    return o, lse


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: dq in q's dtype; dk and dv per query head, in the accumulator's dtype, for the caller to sum.

    P is recomputed from the saved log-sum-exp, one tile at a time; delta = rowsum(dO ∘ O) replaces the softmax's sum.
    """
    accumulate, window, softcap = _accumulator(q.dtype), scoring.window, scoring.softcap
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    dq = torch.zeros_like(q, dtype=accumulate)
    dk = torch.zeros((*q.shape[:-2], n_keys, q.shape[-1]), dtype=accumulate, device=q.device)
    dv = torch.zeros_like(dk)
    delta = (do.to(accumulate) * o.to(accumulate)).sum(-1)  # (..., n_queries)
    for j in range(0, n_keys, TILE_KEYS):
        keys = slice(j, j + TILE_KEYS)
        k_j, v_j = k[..., keys, :], v[..., keys, :]
        first = j // TILE_QUERIES * TILE_QUERIES if scoring.is_causal else 0  # earlier queries see none of these keys
        last = n_queries if window is None else min(n_queries, j + TILE_KEYS - 1 + window)  # nor do those from here on
        for i in range(first, last, TILE_QUERIES):
            rows = slice(i, i + TILE_QUERIES)
            q_i, do_i = q[..., rows, :], do[..., rows, :]
            s_ij = _scores(q_i, k_j, i, j, scoring)  # (..., B_r, B_c)
            p_ij = (s_ij - lse[..., rows, None]).exp()
            dv[..., keys, :] += _matmul(p_ij.to(do.dtype).mT, do_i)
            dp_ij = _matmul(do_i, v_j.mT)
            ds_ij = p_ij * (dp_ij - delta[..., rows, None])
            if softcap is not None:  # the slope of the tangent hyperbolic, finite where a score is hidden
                ds_ij = ds_ij * (1 - (s_ij.clamp(min=-softcap) / softcap).square())
            ds_ij = ds_ij.to(q.dtype)
            dq[..., rows, :] += scoring.scale * _matmul(ds_ij, k_j)
            dk[..., keys, :] += scoring.scale * _matmul(ds_ij.mT, q_i)
    return dq.to(q.dtype), dk, dv


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(tuple(parts), dim) if len(parts) > 1 else parts[0]


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View q as (batch, kv_heads, group, n_queries, head_dim), k and v as (batch, kv_heads, 1, n_keys, head_dim)."""
    heads, kv_heads = (q.shape[-3], k.shape[-3]) if q.ndim >= 4 else (1, 1)
    per_group = (-1, kv_heads, 1, *k.shape[-2:])
    return q.reshape(-1, kv_heads, heads // kv_heads, *q.shape[-2:]), k.reshape(per_group), v.reshape(per_group)


def _scores(q_i: Tensor, k_j: Tensor, i: int, j: int, scoring: Scoring) -> Tensor:
    """scale · Q_i K_jᵀ, capped if there is a softcap, with -inf above the diagonal and before the window."""
    s, window = _matmul(q_i, k_j.mT) * scoring.scale, scoring.window
    if scoring.softcap is not None:
        s = scoring.softcap * (s / scoring.softcap).tanh()
    if scoring.is_causal and (window is not None or j + k_j.shape[-2] - 1 > i):  # the tile reaches above the diagonal
        queries = torch.arange(i, i + q_i.shape[-2], device=s.device)[:, None]
        keys = torch.arange(j, j + k_j.shape[-2], device=s.device)
        s = s.masked_fill(keys > queries, float("-inf"))
        if window is not None:
            s = s.masked_fill(keys <= queries - window, float("-inf"))
    return s


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b summed in the accumulator's dtype (a 16-bit product is exact in float32)."""
    accumulate = _accumulator(a.dtype)
    return a.to(accumulate) @ b.to(accumulate)
