"""dQ: the query-owned half of FlashAttention-2's backward (Dao 2023, algorithm 2), one program per query tile.

The paper's single loop adds to dQ atomically. Here every gradient has one owner, so two runs give the same bits: this
kernel walks over the keys like the forward and sums dQ; `dkdv` walks over the queries. Both recompute P from the
saved log-sum-exp. The kernel also computes delta = rowsum(dO ∘ O), which it needs first, and stores it for the other.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton.chunks import (
    load_chunks,
    multiply_each,
    multiply_over_features,
    scale_chunks,
    store_chunks,
    transpose_chunks,
    zero_chunks,
)
from trainstep.attention.triton.launch import Arguments, Launcher
from trainstep.attention.triton.schedule import SIZES, section_heads, tile_and_head
from trainstep.attention.triton.tuning import Tile, chunk_of, multiply_precision


@triton.jit
def _walk_keys(
    dq, q, do, lse_log2, delta,
    k_ptr, v_ptr, stride_kn, stride_vn,
    first, last, row_limit, n_keys, scale_log2,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K over the keys first, first + BLOCK_K, … < last; k_ptr and v_ptr point at key 0."""
    dims = tl.arange(0, CHUNK)
    keys = tl.arange(0, BLOCK_K)
    k_offsets = keys[None, :] * stride_kn + dims[:, None]
    v_offsets = keys[None, :] * stride_vn + dims[:, None]
    nothing = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        start_long = tl.cast(start, tl.int64)
        present = (keys < n_keys - start)[None, :]
        k_start, v_start = k_ptr + start_long * stride_kn, v_ptr + start_long * stride_vn
        k_t = load_chunks(k_start, k_offsets, dims[:, None], present, MASKED, HEAD_DIM, CHUNK)  # [CHUNK, BLOCK_K] each
        v_t = load_chunks(v_start, v_offsets, dims[:, None], present, MASKED, HEAD_DIM, CHUNK)
        scores = multiply_over_features(q, k_t, nothing, PRECISION)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            scores = tl.where(keys[None, :] <= (row_limit - start)[:, None], scores, float("-inf"))
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        dp = multiply_over_features(do, v_t, nothing, PRECISION)
        ds = p * (dp - delta[:, None])
        dq = multiply_each(ds.to(k_t[0].dtype), transpose_chunks(k_t), dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    stride_dob, stride_doh, stride_don,
    stride_dqb, stride_dqh, stride_dqn,
    tiles_per_head, all_heads, heads, group, n_queries, n_keys, heads_per_section, scale, scale_log2,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and delta (float32, contiguous like lse) of one query tile. Shapes and grid as in `forward_kernel`."""
    program = tl.program_id(0)
    tile, batch_head = tile_and_head(program, tiles_per_head, all_heads, heads_per_section, LONGEST_LAST=IS_CAUSAL)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    kv_head = head // group
    first_row = tile * BLOCK_Q
    first_row_long = first_row.to(tl.int64)

    rows = tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, CHUNK)
    row_mask = first_row + rows < n_queries
    q_ptr += batch * stride_qb + head * stride_qh + first_row_long * stride_qn
    o_ptr += batch * stride_ob + head * stride_oh + first_row_long * stride_on
    do_ptr += batch * stride_dob + head * stride_doh + first_row_long * stride_don
    column, row_there = dims[None, :], row_mask[:, None]
    o_offsets, do_offsets = rows[:, None] * stride_on + column, rows[:, None] * stride_don + column
    o = load_chunks(o_ptr, o_offsets, column, row_there, True, HEAD_DIM, CHUNK)  # [BLOCK_Q, CHUNK] each
    do = load_chunks(do_ptr, do_offsets, column, row_there, True, HEAD_DIM, CHUNK)
    delta = tl.zeros([BLOCK_Q], tl.float32)
    for i in tl.static_range(len(o)):
        delta += tl.sum(o[i].to(tl.float32) * do[i].to(tl.float32), 1)
    row_offset = batch_head.to(tl.int64) * n_queries + first_row
    tl.store(delta_ptr + row_offset + rows, delta, mask=row_mask)
    lse = tl.load(lse_ptr + row_offset + rows, mask=row_mask, other=0.0)
    q = load_chunks(q_ptr, rows[:, None] * stride_qn + column, column, row_there, True, HEAD_DIM, CHUNK)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh

    row_limit = tl.full([BLOCK_Q], n_keys - 1, tl.int32)
    whole = n_keys  # keys below it, in whole tiles, are visible to every query of this tile
    visible = n_keys  # keys from here on are visible to none
    if IS_CAUSAL:
        row_limit = tl.minimum(row_limit, first_row + rows)
        whole = tl.minimum(whole, first_row + 1)
        visible = tl.minimum(visible, first_row + BLOCK_Q)
    whole = whole // BLOCK_K * BLOCK_K

    lse_log2 = lse * 1.4426950408889634  # log2(e)
    dq = zero_chunks(BLOCK_Q, HEAD_DIM, CHUNK)
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, stride_kn, stride_vn, 0, whole, row_limit, n_keys, scale_log2,
        False, HEAD_DIM, CHUNK, BLOCK_Q, BLOCK_K, PRECISION,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, stride_kn, stride_vn, whole, visible, row_limit, n_keys, scale_log2,
        True, HEAD_DIM, CHUNK, BLOCK_Q, BLOCK_K, PRECISION,
    )  # fmt: skip

    dq_ptr += batch * stride_dqb + head * stride_dqh + first_row_long * stride_dqn
    dq_offsets = rows[:, None] * stride_dqn + column
    store_chunks(dq_ptr, dq_offsets, scale_chunks(dq, scale), column, row_there, HEAD_DIM, CHUNK)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
    is_causal: bool, scale: float, tile: Tile, precision: str,
) -> Arguments:  # fmt: skip
    batch, heads, n_queries, head_dim = q.shape
    kv_heads, n_keys = k.shape[1:3]
    tiles_per_head = triton.cdiv(n_queries, tile.queries)
    return Arguments(
        tiles_per_head * batch * heads,
        q, k, v, o, do, lse, delta, dq,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
        tiles_per_head, batch * heads, heads, heads // kv_heads, n_queries, n_keys,
        section_heads(q.device, batch * heads, 2 * n_keys * head_dim * q.element_size()),
        scale, scale * math.log2(math.e),
        IS_CAUSAL=is_causal, HEAD_DIM=head_dim, CHUNK=chunk_of(head_dim, q.dtype, precision),
        BLOCK_Q=tile.queries, BLOCK_K=tile.keys,
        PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


launcher = Launcher(dq_kernel, _arguments)


def launch_dq(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dq: Tensor, is_causal: bool, scale: float,
    tile: Tile,
) -> Tensor:  # fmt: skip
    """Fill dq (like q) from four-dimensional tensors and what the forward left; return delta (like lse)."""
    delta = torch.empty_like(lse)
    launcher((q, k, v, o, do, lse, delta, dq), is_causal, scale, tile, multiply_precision(q.dtype))
    return delta
