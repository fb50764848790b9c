"""The forward kernel: FlashAttention-2 (Dao 2023), algorithm 1, one program per query tile.

A program keeps its queries and the running maximum, sum and output on chip and walks over the keys: first tiles that
every query of the program sees in full, which need no mask, then the few that the diagonal or the end of the keys cuts.
Exponentials are base 2 with log2(e) folded into the scale, so that a score costs one fused multiply-add and one exp2.
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
    soft_capped,
    tile_and_head,
)


@triton.jit
def _attend(
    acc, row_max, row_sum,
    q, k_ptr, v_ptr, stride_kn, stride_vn,
    first, last, gap, skip, row_first, row_limit, n_keys, scale_log2, cap,
    MASKED: tl.constexpr, BANDED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over the keys first, first + BLOCK_K, … < last. k_ptr and v_ptr point at key 0.

    Only where MASKED are read row_limit [BLOCK_Q], the last key that each query sees, and only where BANDED too, with a
    window or documents, row_first, the first of them; then what lies at `gap` and beyond is for the keys `skip` on.
    """
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_K)
    k_offsets = keys[None, :] * stride_kn + dims[:, None]
    v_offsets = keys[:, None] * stride_vn + dims[None, :]
    nothing = tl.zeros([q.shape[0], BLOCK_K], tl.float32)
    for place in tl.range(first, last, BLOCK_K):
        start = place
        if MASKED and BANDED:
            start = tl.where(place < gap, place, place + skip)
        start_long = tl.cast(start, tl.int64)
        k_mask = (dims < HEAD_DIM)[:, None]
        v_mask = (dims < HEAD_DIM)[None, :]
        if MASKED:
            k_mask = k_mask & (keys < n_keys - start)[None, :]
            v_mask = v_mask & (keys < n_keys - start)[:, None]
        PARTIAL: tl.constexpr = MASKED or HEAD_DIM != BLOCK_D
        k_t = load_tile(k_ptr + start_long * stride_kn + k_offsets, k_mask, PARTIAL)  # [BLOCK_D, BLOCK_K]
        v = load_tile(v_ptr + start_long * stride_vn + v_offsets, v_mask, PARTIAL)  # [BLOCK_K, BLOCK_D]
        scores = multiply(q, k_t, nothing, PRECISION)  # [BLOCK_Q, BLOCK_K]
        if cap is not None:
            scores = soft_capped(scores, cap)
        if MASKED:
            scores = tl.where(keys[None, :] <= (row_limit - start)[:, None], scores, float("-inf"))
            if BANDED:
                scores = tl.where(keys[None, :] >= (row_first - start)[:, None], scores, float("-inf"))
        # Key 0 is visible to every query and lies in the first tile, so the maximum is finite from there on; in a
        # band it is finite from a query's own first tile on, and before that anything finite does in its place.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        finite_max = new_max
        if MASKED and BANDED:
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale_log2 - finite_max[:, None])
        shrink = tl.exp2(row_max - finite_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = multiply(p.to(v.dtype), v, acc, PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bounds_ptr,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    tiles_per_head, all_heads, heads, group, n_queries, n_keys, heads_per_section, window, scale_log2, cap,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q, o (batch, heads, n_queries, HEAD_DIM); k, v (batch, heads // group, n_keys, HEAD_DIM); lse float32.

    all_heads = batch · heads; tiles_per_head · all_heads programs. scale_log2 = scale · log2(e), not negative. window:
    None, or how many keys a query sees, its own the last. bounds: None, or the documents', as of `documents.bounds`.
    cap: None, or the largest that a score may be before it is scaled.
    """
    program = tl.program_id(0)
    tile, batch_head = tile_and_head(program, tiles_per_head, all_heads, heads_per_section, LONGEST_LAST=IS_CAUSAL)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    kv_head = head // group
    first_row = tile * BLOCK_Q

    rows = tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, BLOCK_D)
    row_mask = first_row + rows < n_queries
    tile_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptr += batch * stride_qb + head * stride_qh + first_row.to(tl.int64) * stride_qn
    q = tl.load(q_ptr + rows[:, None] * stride_qn + dims[None, :], mask=tile_mask, other=0.0)  # [BLOCK_Q, BLOCK_D]
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh

    row_first, row_limit, clear, whole, cut, cut_end = keys_of_tile(
        first_row, n_queries, n_keys, window, bounds_ptr, IS_CAUSAL, BLOCK_Q, BLOCK_K
    )
    BANDED: tl.constexpr = window is not None or bounds_ptr is not None

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, stride_kn, stride_vn, clear, whole, 0, 0, row_first, row_limit,
        n_keys, scale_log2, cap, False, BANDED, HEAD_DIM, BLOCK_D, BLOCK_K, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, stride_kn, stride_vn, cut, cut_end, clear, whole - clear,
        row_first, row_limit, n_keys, scale_log2, cap, True, BANDED, HEAD_DIM, BLOCK_D, BLOCK_K, PRECISION,
    )  # fmt: skip

    o_ptr += batch * stride_ob + head * stride_oh + first_row.to(tl.int64) * stride_on
    o = (acc / row_sum[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + rows[:, None] * stride_on + dims[None, :], o, mask=tile_mask)
    lse_ptr += batch_head.to(tl.int64) * n_queries + first_row
    tl.store(lse_ptr + rows, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=row_mask)  # ln 2: to base e


launch_forward = Launcher(forward_kernel, portable)
"""Tensors q, k, v, o, lse, and bounds if there are documents: fills o and lse, the log-sum-exp of the scores."""
