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

from trainstep.attention.triton.launch import (
    SIZES,
    Arguments,
    Launcher,
    load_tile,
    multiply,
    section_heads,
    tile_and_head,
)
from trainstep.attention.tuned import Tile, block_of, multiply_precision


@triton.jit
def _walk_keys(
    dq, q, do, lse_log2, delta,
    k_ptr, v_ptr, stride_kn, stride_vn,
    first, last, row_limit, n_keys, scale_log2,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K over the keys first, first + BLOCK_K, … < last; k_ptr and v_ptr point at key 0."""
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_K)
    k_offsets = keys[None, :] * stride_kn + dims[:, None]
    v_offsets = keys[None, :] * stride_vn + dims[:, None]
    nothing = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
    for start in tl.range(first, last, BLOCK_K):
        start_long = tl.cast(start, tl.int64)
        mask = (dims < HEAD_DIM)[:, None]
        if MASKED:
            mask = mask & (keys < n_keys - start)[None, :]
        PARTIAL: tl.constexpr = MASKED or HEAD_DIM != BLOCK_D
        k_t = load_tile(k_ptr + start_long * stride_kn + k_offsets, mask, PARTIAL)  # [BLOCK_D, BLOCK_K]
        v_t = load_tile(v_ptr + start_long * stride_vn + v_offsets, mask, PARTIAL)
        scores = multiply(q, k_t, nothing, PRECISION)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            scores = tl.where(keys[None, :] <= (row_limit - start)[:, None], scores, float("-inf"))
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        dp = multiply(do, v_t, nothing, PRECISION)
        ds = p * (dp - delta[:, None])
        dq = multiply(ds.to(k_t.dtype), tl.trans(k_t), dq, PRECISION)
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
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
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
    dims = tl.arange(0, BLOCK_D)
    row_mask = first_row + rows < n_queries
    tile_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptr += batch * stride_qb + head * stride_qh + first_row_long * stride_qn
    o_ptr += batch * stride_ob + head * stride_oh + first_row_long * stride_on
    do_ptr += batch * stride_dob + head * stride_doh + first_row_long * stride_don
    o = tl.load(o_ptr + rows[:, None] * stride_on + dims[None, :], mask=tile_mask, other=0.0)  # [BLOCK_Q, BLOCK_D]
    do = tl.load(do_ptr + rows[:, None] * stride_don + dims[None, :], mask=tile_mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_Q]
    row_offset = batch_head.to(tl.int64) * n_queries + first_row
    tl.store(delta_ptr + row_offset + rows, delta, mask=row_mask)
    lse = tl.load(lse_ptr + row_offset + rows, mask=row_mask, other=0.0)
    q = tl.load(q_ptr + rows[:, None] * stride_qn + dims[None, :], mask=tile_mask, other=0.0)
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
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, stride_kn, stride_vn, 0, whole, row_limit, n_keys, scale_log2,
        False, HEAD_DIM, BLOCK_D, BLOCK_K, PRECISION,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, stride_kn, stride_vn, whole, visible, row_limit, n_keys, scale_log2,
        True, HEAD_DIM, BLOCK_D, BLOCK_K, PRECISION,
    )  # fmt: skip

    dq_ptr += batch * stride_dqb + head * stride_dqh + first_row_long * stride_dqn
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + rows[:, None] * stride_dqn + dims[None, :], dq, mask=tile_mask)


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
        IS_CAUSAL=is_causal, HEAD_DIM=head_dim, BLOCK_D=block_of(head_dim), BLOCK_Q=tile.queries, BLOCK_K=tile.keys,
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
