"""FlashAttention-2's backward (Dao 2023, algorithm 2) in two kernels, each gradient with one owner.

The paper's single loop adds to dQ atomically; with one owner, two runs give the same bits. `dq_kernel` has one program
per query tile, which walks over the keys like the forward and sums dQ. `dkdv_kernel` has one per key tile, which walks
over the queries of every head of its group. Both recompute P from the saved log-sum-exp. The first also computes
delta = rowsum(dO ∘ O), which it needs first, and stores it for the second.

The second works on transposed scores, Sᵀ = K Qᵀ, so that P and dS leave the matrix unit in the layout in which dV and
dK need them. Tiles that the diagonal or the end of the queries cuts are masked, in a walk of their own; the others,
most of them, are not.
"""

import triton
import triton.language as tl

from trainstep.attention.triton import (
    SIZES,
    Launcher,
    keys_of_tile,
    load_tile,
    multiply,
    portable,
    queries_of_key,
    soft_capped,
    tile_and_head,
)


@triton.jit
def _walk_keys(
    dq, q, do, lse_log2, delta,
    k_ptr, v_ptr, stride_kn, stride_vn,
    first, last, gap, skip, row_first, row_limit, n_keys, scale_log2, cap,
    MASKED: tl.constexpr, BANDED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K over the keys first, first + BLOCK_K, … < last, as `forward._attend` walks over them."""
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_K)
    k_offsets = keys[None, :] * stride_kn + dims[:, None]
    v_offsets = keys[None, :] * stride_vn + dims[:, None]
    nothing = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
    for place in tl.range(first, last, BLOCK_K):
        start = place
        if MASKED and BANDED:
            start = tl.where(place < gap, place, place + skip)
        start_long = tl.cast(start, tl.int64)
        mask = (dims < HEAD_DIM)[:, None]
        if MASKED:
            mask = mask & (keys < n_keys - start)[None, :]
        PARTIAL: tl.constexpr = MASKED or HEAD_DIM != BLOCK_D
        k_t = load_tile(k_ptr + start_long * stride_kn + k_offsets, mask, PARTIAL)  # [BLOCK_D, BLOCK_K]
        v_t = load_tile(v_ptr + start_long * stride_vn + v_offsets, mask, PARTIAL)
        scores = multiply(q, k_t, nothing, PRECISION)  # [BLOCK_Q, BLOCK_K]
        if cap is not None:
            scores = soft_capped(scores, cap)
            slope = 1 - (scores / cap) * (scores / cap)
        if MASKED:
            scores = tl.where(keys[None, :] <= (row_limit - start)[:, None], scores, float("-inf"))
            if BANDED:
                scores = tl.where(keys[None, :] >= (row_first - start)[:, None], scores, float("-inf"))
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        dp = multiply(do, v_t, nothing, PRECISION)
        ds = p * (dp - delta[:, None])
        if cap is not None:
            ds = ds * slope
        dq = multiply(ds.to(k_t.dtype), tl.trans(k_t), dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, bounds_ptr,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    stride_dob, stride_doh, stride_don,
    stride_dqb, stride_dqh, stride_dqn,
    tiles_per_head, all_heads, heads, group, n_queries, n_keys, heads_per_section, window, scale, scale_log2, cap,
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

    row_first, row_limit, clear, whole, cut, cut_end = keys_of_tile(
        first_row, n_queries, n_keys, window, bounds_ptr, IS_CAUSAL, BLOCK_Q, BLOCK_K
    )
    BANDED: tl.constexpr = window is not None or bounds_ptr is not None

    lse_log2 = lse * 1.4426950408889634  # log2(e)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, stride_kn, stride_vn, clear, whole, 0, 0, row_first, row_limit,
        n_keys, scale_log2, cap, False, BANDED, HEAD_DIM, BLOCK_D, BLOCK_K, PRECISION,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, lse_log2, delta, k_ptr, v_ptr, stride_kn, stride_vn, cut, cut_end, clear, whole - clear, row_first,
        row_limit, n_keys, scale_log2, cap, True, BANDED, HEAD_DIM, BLOCK_D, BLOCK_K, PRECISION,
    )  # fmt: skip

    dq_ptr += batch * stride_dqb + head * stride_dqh + first_row_long * stride_dqn
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + rows[:, None] * stride_dqn + dims[None, :], dq, mask=tile_mask)


launch_dq = Launcher(dq_kernel, portable)
"""Tensors q, k, v, o, do, lse, delta, dq, and bounds if there are documents: fills dq and delta."""


@triton.jit
def _walk_queries(
    dk, dv, k, v,
    q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qn, stride_don,
    first, n_steps, gap, resume, first_query, end_query, n_queries, scale_log2, cap,
    MASKED: tl.constexpr, BANDED: tl.constexpr, IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q to dk and Pᵀ dO to dv over n_steps tiles of one head's queries.

    They start at first, first + BLOCK_Q, … < gap; if MASKED, one more may follow at `resume`, or where BANDED several.
    q_ptr … delta_ptr point at query 0 of the head. first_query, end_query [BLOCK_K]: the queries that see each key of
    this program begin at the one and end before the other, which is read only where BANDED.
    """
    rows = tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    q_offsets = rows[:, None] * stride_qn + dims[None, :]
    do_offsets = rows[:, None] * stride_don + dims[None, :]
    nothing = tl.zeros([k.shape[0], BLOCK_Q], tl.float32)
    for step in tl.range(0, n_steps):
        start = first + step * BLOCK_Q
        if MASKED:
            start = tl.where(start < gap, start, start - gap + resume if BANDED else resume)
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
        scores_t = multiply(k, tl.trans(q), nothing, PRECISION)  # [BLOCK_K, BLOCK_Q]
        if cap is not None:
            scores_t = soft_capped(scores_t, cap)
            slope = 1 - (scores_t / cap) * (scores_t / cap)
        if MASKED and (IS_CAUSAL or BANDED):
            scores_t = tl.where((first_query - start)[:, None] <= rows[None, :], scores_t, float("-inf"))
            if BANDED:
                scores_t = tl.where((end_query - start)[:, None] > rows[None, :], scores_t, float("-inf"))
        p_t = tl.exp2(scores_t * scale_log2 - (lse * 1.4426950408889634)[None, :])  # log2(e)
        dv = multiply(p_t.to(do.dtype), do, dv, PRECISION)
        dp_t = multiply(v, tl.trans(do), nothing, PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        if cap is not None:
            ds_t = ds_t * slope
        dk = multiply(ds_t.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, bounds_ptr,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_don,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dvb, stride_dvh, stride_dvn,
    tiles_per_head, all_kv_heads, kv_heads, group, n_queries, n_keys, heads_per_section, window, scale, scale_log2, cap,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile, summed over the `group` query heads that read it."""
    program = tl.program_id(0)
    tile, batch_head = tile_and_head(program, tiles_per_head, all_kv_heads, heads_per_section, LONGEST_LAST=False)
    batch = (batch_head // kv_heads).to(tl.int64)
    kv_head = (batch_head % kv_heads).to(tl.int64)
    BANDED: tl.constexpr = window is not None or bounds_ptr is not None
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
    # In a band queries from `whole` on do not see all of them, and from `end` on none. Keys past n_keys get gradients
    # too, from their zero rows, which are not stored.
    first = 0
    clear = 0
    whole = n_queries // BLOCK_Q * BLOCK_Q
    if IS_CAUSAL:
        first = tl.minimum(first_key // BLOCK_Q * BLOCK_Q, n_queries)
        clear = tl.minimum(tl.cdiv(first_key + BLOCK_K - 1, BLOCK_Q) * BLOCK_Q, n_queries)
        whole = tl.maximum(whole, clear)
    end = n_queries
    first_query = first_key + keys
    end_query = first_query
    if BANDED:
        last_key = tl.minimum(first_key + BLOCK_K, n_keys) - 1
        first, whole = queries_of_key(first_key, n_queries, window, bounds_ptr, IS_CAUSAL)
        clear, end = queries_of_key(last_key, n_queries, window, bounds_ptr, IS_CAUSAL)
        first = tl.minimum(first // BLOCK_Q * BLOCK_Q, n_queries)
        clear = tl.minimum(tl.cdiv(clear, BLOCK_Q) * BLOCK_Q, n_queries)
        whole = tl.maximum(tl.minimum(whole, n_queries) // BLOCK_Q * BLOCK_Q, clear)
        end = tl.maximum(tl.minimum(end, n_queries), whole)
        if bounds_ptr is not None:
            first_query = tl.minimum(first_query, last_key)  # what may be asked for
        first_query, end_query = queries_of_key(first_query, n_queries, window, bounds_ptr, IS_CAUSAL)
    n_cut = tl.cdiv(clear - first, BLOCK_Q) + tl.cdiv(end - whole, BLOCK_Q)
    n_whole = (whole - clear) // BLOCK_Q

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for member in tl.range(0, group, num_stages=1):
        head = kv_head * group + member
        head_q_ptr = q_ptr + batch * stride_qb + head * stride_qh
        head_do_ptr = do_ptr + batch * stride_dob + head * stride_doh
        row_offset = (batch * kv_heads * group + head) * n_queries
        dk, dv = _walk_queries(
            dk, dv, k, v, head_q_ptr, head_do_ptr, lse_ptr + row_offset, delta_ptr + row_offset,
            stride_qn, stride_don, first, n_cut, clear, whole, first_query, end_query, n_queries,
            scale_log2, cap, True, BANDED, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, PRECISION,
        )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k, v, head_q_ptr, head_do_ptr, lse_ptr + row_offset, delta_ptr + row_offset,
            stride_qn, stride_don, clear, n_whole, whole, whole, first_query, end_query, n_queries,
            scale_log2, cap, False, BANDED, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, PRECISION,
        )  # fmt: skip

    dk_ptr += batch * stride_dkb + kv_head * stride_dkh + first_key_long * stride_dkn
    dv_ptr += batch * stride_dvb + kv_head * stride_dvh + first_key_long * stride_dvn
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + keys[:, None] * stride_dkn + dims[None, :], dk, mask=tile_mask)
    tl.store(dv_ptr + keys[:, None] * stride_dvn + dims[None, :], dv.to(dv_ptr.dtype.element_ty), mask=tile_mask)


launch_dkdv = Launcher(dkdv_kernel, portable)
"""Tensors q, k, v, do, lse, delta, dk, dv, and bounds if there are documents: fills dk and dv; delta is what
`launch_dq` left."""
