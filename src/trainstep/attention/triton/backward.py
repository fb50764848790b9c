"""The backward kernels: FlashAttention-2 (Dao 2023), algorithm 2, as two kernels that recompute the scores.

The paper's single loop adds to dQ atomically. Here every output has one owner, so two runs give the same bits:

`dq_kernel`    one program per query tile, walking over the keys like the forward. It also computes
               delta = rowsum(dO ∘ O), which it alone needs first, and stores it for the second kernel.
`dkdv_kernel`  one program per key tile, walking over the queries of every head of its group. It works on transposed
               scores, Sᵀ = K Qᵀ, so that P and dS leave the matrix unit in the layout in which dV and dK need them.

Both split the walk into tiles that need a mask and tiles that do not, as the forward does.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton.schedule import four_dims, load_tile, section_heads, tile_and_head
from trainstep.attention.triton.tuning import Tile, block_of, multiply_precision, tile_for


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
    for start in tl.range(first, last, BLOCK_K):
        start_long = tl.cast(start, tl.int64)
        mask = (dims < HEAD_DIM)[:, None]
        if MASKED:
            mask = mask & (keys < n_keys - start)[None, :]
        PARTIAL: tl.constexpr = MASKED or HEAD_DIM != BLOCK_D
        k_t = load_tile(k_ptr + start_long * stride_kn + k_offsets, mask, PARTIAL)  # [BLOCK_D, BLOCK_K]
        v_t = load_tile(v_ptr + start_long * stride_vn + v_offsets, mask, PARTIAL)
        scores = tl.dot(q, k_t, input_precision=PRECISION)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            scores = tl.where(keys[None, :] <= (row_limit - start)[:, None], scores, float("-inf"))
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        dp = tl.dot(do, v_t, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_t.dtype), tl.trans(k_t), dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["n_queries", "n_keys", "heads_per_section"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    stride_dob, stride_doh, stride_don,
    stride_dqb, stride_dqh, stride_dqn,
    n_tiles, all_heads, heads, group, n_queries, n_keys, heads_per_section, scale, scale_log2,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and delta (float32, contiguous like lse) of one query tile. Shapes and grid as in `forward_kernel`."""
    tile, batch_head = tile_and_head(n_tiles, all_heads, heads_per_section, LONGEST_LAST=IS_CAUSAL)
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


@triton.jit
def _walk_queries(
    dk, dv, k, v,
    q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qn, stride_don,
    first, last, keys, n_queries, scale_log2,
    MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q to dk and Pᵀ dO to dv over the queries first, first + BLOCK_Q, … < last of one head.

    q_ptr … delta_ptr point at query 0 of the head; keys [BLOCK_K] are the key indices of this program.
    """
    rows = tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    q_offsets = rows[:, None] * stride_qn + dims[None, :]
    do_offsets = rows[:, None] * stride_don + dims[None, :]
    for start in tl.range(first, last, BLOCK_Q):
        start_long = tl.cast(start, tl.int64)
        row_mask = rows < n_queries - start
        mask = (dims < HEAD_DIM)[None, :]
        if MASKED:
            mask = mask & row_mask[:, None]
        PARTIAL: tl.constexpr = MASKED or HEAD_DIM != BLOCK_D
        q = load_tile(q_ptr + start_long * stride_qn + q_offsets, mask, PARTIAL)  # [BLOCK_Q, BLOCK_D]
        do = load_tile(do_ptr + start_long * stride_don + do_offsets, mask, PARTIAL)  # [BLOCK_Q, BLOCK_D]
        if MASKED:  # exp2(0 - inf) = 0: rows past the end add nothing
            lse = tl.load(lse_ptr + start + rows, mask=row_mask, other=float("inf"))
        else:
            lse = tl.load(lse_ptr + start + rows)
        delta = load_tile(delta_ptr + start + rows, row_mask, MASKED)
        scores_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_K, BLOCK_Q]
        if MASKED and IS_CAUSAL:
            scores_t = tl.where((keys - start)[:, None] <= rows[None, :], scores_t, float("-inf"))
        p_t = tl.exp2(scores_t * scale_log2 - (lse * 1.4426950408889634)[None, :])  # log2(e)
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision=PRECISION)
        dp_t = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["n_queries", "n_keys", "heads_per_section"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_don,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dvb, stride_dvh, stride_dvn,
    n_tiles, all_kv_heads, kv_heads, group, n_queries, n_keys, heads_per_section, scale, scale_log2,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile, summed over the `group` query heads that read it."""
    tile, batch_head = tile_and_head(n_tiles, all_kv_heads, heads_per_section, LONGEST_LAST=False)
    batch = (batch_head // kv_heads).to(tl.int64)
    kv_head = (batch_head % kv_heads).to(tl.int64)
    first_key = tile * BLOCK_K
    first_key_long = first_key.to(tl.int64)

    keys = tl.arange(0, BLOCK_K)
    dims = tl.arange(0, BLOCK_D)
    tile_mask = (first_key + keys < n_keys)[:, None] & (dims < HEAD_DIM)[None, :]
    k_ptr += batch * stride_kb + kv_head * stride_kh + first_key_long * stride_kn
    v_ptr += batch * stride_vb + kv_head * stride_vh + first_key_long * stride_vn
    k = tl.load(k_ptr + keys[:, None] * stride_kn + dims[None, :], mask=tile_mask, other=0.0)  # [BLOCK_K, BLOCK_D]
    v = tl.load(v_ptr + keys[:, None] * stride_vn + dims[None, :], mask=tile_mask, other=0.0)

    # Queries below `first` see none of these keys; from `clear` on they see all of them; the last tile may be partial.
    # Keys past n_keys get gradients too, from their zero rows, which are not stored.
    first = 0
    clear = 0
    whole = n_queries // BLOCK_Q * BLOCK_Q
    if IS_CAUSAL:
        first = tl.minimum(first_key // BLOCK_Q * BLOCK_Q, n_queries)
        clear = tl.minimum(tl.cdiv(first_key + BLOCK_K - 1, BLOCK_Q) * BLOCK_Q, n_queries)
        whole = tl.maximum(whole, clear)

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for member in tl.range(0, group, num_stages=1):
        head = kv_head * group + member
        head_q_ptr = q_ptr + batch * stride_qb + head * stride_qh
        head_do_ptr = do_ptr + batch * stride_dob + head * stride_doh
        row_offset = (batch * kv_heads * group + head) * n_queries
        if IS_CAUSAL:
            dk, dv = _walk_queries(
                dk, dv, k, v, head_q_ptr, head_do_ptr, lse_ptr + row_offset, delta_ptr + row_offset,
                stride_qn, stride_don, first, clear, first_key + keys, n_queries, scale_log2,
                True, True, HEAD_DIM, BLOCK_D, BLOCK_Q, PRECISION,
            )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k, v, head_q_ptr, head_do_ptr, lse_ptr + row_offset, delta_ptr + row_offset,
            stride_qn, stride_don, clear, whole, first_key + keys, n_queries, scale_log2,
            False, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, PRECISION,
        )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k, v, head_q_ptr, head_do_ptr, lse_ptr + row_offset, delta_ptr + row_offset,
            stride_qn, stride_don, whole, n_queries, first_key + keys, n_queries, scale_log2,
            True, False, HEAD_DIM, BLOCK_D, BLOCK_Q, PRECISION,
        )  # fmt: skip

    dk_ptr += batch * stride_dkb + kv_head * stride_dkh + first_key_long * stride_dkn
    dv_ptr += batch * stride_dvb + kv_head * stride_dvh + first_key_long * stride_dvn
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + keys[:, None] * stride_dkn + dims[None, :], dk, mask=tile_mask)
    tl.store(dv_ptr + keys[:, None] * stride_dvn + dims[None, :], dv.to(dv_ptr.dtype.element_ty), mask=tile_mask)


def launch_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool, scale: float,
    dq_tile: Tile | None = None, dkdv_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `launch_forward` took and returned, and do (q's shape) → dq, dk, dv in the inputs' shapes and dtype."""
    q_shape, k_shape = q.shape, k.shape
    q, k, v, o, do = (four_dims(t) for t in (q, k, v, o, do))
    batch, heads, n_queries, head_dim = q.shape
    kv_heads, n_keys = k.shape[1:3]
    group = heads // kv_heads
    row_bytes = 2 * head_dim * q.element_size()
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scale_log2 = scale * math.log2(math.e)
    block_d, precision = block_of(head_dim), multiply_precision(q.dtype)

    tile = dq_tile or tile_for("dq", q.device, q.dtype, head_dim, is_causal)
    n_tiles = triton.cdiv(n_queries, tile.queries)
    dq_kernel[(n_tiles * batch * heads,)](
        q, k, v, o, do, lse, delta, dq,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
        n_tiles, batch * heads, heads, group, n_queries, n_keys,
        section_heads(q.device, batch * heads, n_keys * row_bytes), scale, scale_log2,
        IS_CAUSAL=is_causal, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=tile.queries, BLOCK_K=tile.keys,
        PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip

    tile = dkdv_tile or tile_for("dkdv", q.device, q.dtype, head_dim, is_causal)
    n_tiles = triton.cdiv(n_keys, tile.keys)
    dkdv_kernel[(n_tiles * batch * kv_heads,)](
        q, k, v, do, lse, delta, dk, dv,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        n_tiles, batch * kv_heads, kv_heads, group, n_queries, n_keys,
        section_heads(q.device, batch * kv_heads, n_queries * group * row_bytes), scale, scale_log2,
        IS_CAUSAL=is_causal, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=tile.queries, BLOCK_K=tile.keys,
        PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(k_shape)
