"""dQ on Hopper with explicit warp roles: the query-owned half of FlashAttention-2's algorithm 2.

A consumer warpgroup owns 64 queries; keys and values stream past it. While the matrix units work on dP of one tile
and dS K of the tile before it, the warpgroup computes exponentials; dS goes from registers straight into the next
product, so consumers write no shared memory until the end. The kernel also computes what the other half needs about
each query row.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trainstep.attention.hopper import (
    copy_pair,
    make_barriers,
    on_hopper,
    refill_pair,
    release,
    store_rows,
    tile_of,
    wait_filled,
)
from trainstep.attention.triton import SIZES, Launcher, tile_and_head
from trainstep.attention.tuned import HopperTile

ROWS = gl.constexpr(64)  # queries of one consumer: the rows of one warpgroup's matrix instruction
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load(copies, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: every consumer's queries and output gradients once, then the keys and values of every step."""
    (q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty,
     batch, head, kv_head, first_row, n_tiles) = copies  # fmt: skip
    for index in gl.static_range(CONSUMERS):
        row = first_row + index * ROWS
        copy_pair(q_desc, do_desc, batch, head, row, q_tiles.index(index), do_tiles.index(index), own_full.index(index))
    for step in range(n_tiles):
        refill_pair(k_desc, v_desc, batch, kv_head, step * BLOCK_K, k_tiles, v_tiles, full, empty, step, STAGES)


@gluon.jit
def _ds_of(
    scores, dp, lse_log2, delta, full, step, n_tiles, row_limit, scale_log2,
    MASKED: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """dS of a step, float32, from its scores and dP in flight; LATER products were issued after those two.

    Returns with the next step's tiles there.
    """
    scores = warpgroup_mma_wait(1 + LATER, [scores])
    if MASKED:
        keys = step * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(keys[None, :] <= row_limit[:, None], scores, float("-inf"))
    p = gl.exp2(scores * scale_log2 - lse_log2[:, None])
    wait_filled(full, step + 1, n_tiles, STAGES)
    dp = warpgroup_mma_wait(LATER, [dp])
    return p * (dp - delta[:, None])


@gluon.jit
def _walk(
    dq, ds, q, do, lse_log2, delta, k_tiles, v_tiles, full, empty,
    first_step, last_step, n_tiles, row_limit, scale_log2,
    MASKED: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps first_step … last_step - 1, each: scores and dP of its tile, dS K of the tile before it, dS of its own."""
    for step in range(first_step, last_step):
        nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT)
        k = tile_of(k_tiles, step, STAGES, BLOCK_K, BLOCK_D)
        v = tile_of(v_tiles, step, STAGES, BLOCK_K, BLOCK_D)
        scores = warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
        dp = warpgroup_mma(do, v.permute([1, 0]), nothing, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds, tile_of(k_tiles, step - 1, STAGES, BLOCK_K, BLOCK_D), dq, is_async=True)
        ds_next = _ds_of(
            scores, dp, lse_log2, delta, full, step, n_tiles, row_limit, scale_log2, MASKED, BLOCK_K, STAGES, 1
        )
        dq = warpgroup_mma_wait(0, [dq])
        release(empty, step - 1, STAGES)
        ds = gl.convert_layout(ds_next.to(k.dtype), gl.DotOperandLayout(0, DQ_LAYOUT, 2))
    return dq, ds


@gluon.jit
def _consume(
    index, tensors, sizes, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, OWN_REGS: gl.constexpr,
):  # fmt: skip
    """Queries first_row + 64 · index … of this program. The pointers are at query 0 of the head."""
    (o_ptr, do_ptr, lse_ptr, stat_ptr, delta_offset, dq_ptr, stride_on, stride_don, stride_dqn,
     q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty) = tensors  # fmt: skip
    first_row, n_tiles, n_whole, n_queries, n_keys, scale, scale_log2 = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])  # 16 bytes a thread
    my_row = first_row + index * ROWS

    wide_rows = my_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, WIDE))
    wide_mask = (wide_rows < n_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    long_rows = wide_rows.to(gl.int64)[:, None]
    o = gl.load(o_ptr + long_rows * stride_on + dims[None, :], mask=wide_mask, other=0.0)
    do_wide = gl.load(do_ptr + long_rows * stride_don + dims[None, :], mask=wide_mask, other=0.0)
    delta_wide = gl.sum(o.to(gl.float32) * do_wide.to(gl.float32), 1)
    gl.store(stat_ptr + delta_offset + wide_rows, -delta_wide)
    delta = gl.convert_layout(delta_wide, gl.SliceLayout(1, S_LAYOUT))

    rows = my_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    row_limit = gl.full([ROWS], n_keys - 1, gl.int32, gl.SliceLayout(1, S_LAYOUT))
    if IS_CAUSAL:
        row_limit = gl.minimum(row_limit, rows)
    # exp2(-inf) = 0: rows past the end, which the copy engine fills with zeros, add nothing anywhere.
    lse = gl.load(lse_ptr + rows, mask=rows < n_queries, other=float("inf"))
    gl.store(stat_ptr + rows, -lse / scale)
    lse_log2 = lse * LOG2_E
    mbarrier.wait(own_full.index(index), 0)
    q_tile = q_tiles.index(index).reshape([ROWS, BLOCK_D])
    do_tile = do_tiles.index(index).reshape([ROWS, BLOCK_D])
    if OWN_REGS:
        q = q_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        do = do_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        q = q_tile
        do = do_tile
    dq = gl.zeros([ROWS, BLOCK_D], gl.float32, DQ_LAYOUT)
    nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT)
    wait_filled(full, 0, n_tiles, STAGES)
    k = tile_of(k_tiles, 0, STAGES, BLOCK_K, BLOCK_D)
    v = tile_of(v_tiles, 0, STAGES, BLOCK_K, BLOCK_D)
    scores = warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v.permute([1, 0]), nothing, use_acc=False, is_async=True)
    ds_first = _ds_of(scores, dp, lse_log2, delta, full, 0, n_tiles, row_limit, scale_log2, True, BLOCK_K, STAGES, 0)
    ds = gl.convert_layout(ds_first.to(k.dtype), gl.DotOperandLayout(0, DQ_LAYOUT, 2))
    dq, ds = _walk(
        dq, ds, q, do, lse_log2, delta, k_tiles, v_tiles, full, empty, 1, n_whole, n_tiles, row_limit, scale_log2,
        False, BLOCK_K, BLOCK_D, STAGES, S_LAYOUT, DQ_LAYOUT,
    )  # fmt: skip
    dq, ds = _walk(
        dq, ds, q, do, lse_log2, delta, k_tiles, v_tiles, full, empty,
        gl.maximum(n_whole, 1), n_tiles, n_tiles, row_limit, scale_log2,
        True, BLOCK_K, BLOCK_D, STAGES, S_LAYOUT, DQ_LAYOUT,
    )  # fmt: skip
    dq = warpgroup_mma(ds, tile_of(k_tiles, n_tiles - 1, STAGES, BLOCK_K, BLOCK_D), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    store_rows(dq_ptr, stride_dqn, q_tile, dq * scale, my_row, n_queries, HEAD_DIM, BLOCK_D)


@gluon.jit(do_not_specialize=SIZES)
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, o_ptr, do_ptr, lse_ptr, stat_ptr, dq_ptr,
    stride_ob, stride_oh, stride_on, stride_dob, stride_doh, stride_don, stride_dqb, stride_dqh, stride_dqn,
    tiles_per_head, all_heads, heads, group, n_queries, n_keys, stat_rows, heads_per_section, scale, scale_log2,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, OWN_REGS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq and delta = rowsum(dO ∘ O). Arguments as in the portable kernel; *_desc are 4-D descriptors of tiles."""
    program = gl.program_id(0)
    tile, batch_head = tile_and_head(program, tiles_per_head, all_heads, heads_per_section, LONGEST_LAST=IS_CAUSAL)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group
    first_row = tile * (CONSUMERS * ROWS)
    visible = n_keys
    n_whole = n_keys // BLOCK_K  # tiles that every query of the program sees in full
    if IS_CAUSAL:
        visible = gl.minimum(n_keys, first_row + CONSUMERS * ROWS)
        n_whole = gl.minimum(n_whole, (first_row + 1) // BLOCK_K)
    n_tiles = gl.cdiv(visible, BLOCK_K)
    batch_long = batch.to(gl.int64)
    head_long = head.to(gl.int64)
    o_ptr += batch_long * stride_ob + head_long * stride_oh
    do_ptr += batch_long * stride_dob + head_long * stride_doh
    dq_ptr += batch_long * stride_dqb + head_long * stride_dqh
    lse_ptr += batch_head.to(gl.int64) * n_queries
    stat_ptr += batch_head.to(gl.int64) * stat_rows

    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], v_desc.layout)
    own_full = make_barriers(CONSUMERS, 1)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, CONSUMERS)

    copies = (
        q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty,
        batch, head, kv_head, first_row, n_tiles,
    )  # fmt: skip
    tensors = (
        o_ptr, do_ptr, lse_ptr, stat_ptr, all_heads.to(gl.int64) * stat_rows, dq_ptr, stride_on, stride_don, stride_dqn,
        q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty,
    )  # fmt: skip
    sizes = (first_row, n_tiles, n_whole, n_queries, n_keys, scale, scale_log2)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, tensors, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, STAGES, OWN_REGS)),
                (_consume, (1, tensors, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, STAGES, OWN_REGS)),
                (_load, (copies, CONSUMERS, BLOCK_K, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consume, (0, tensors, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, STAGES, OWN_REGS)),
                (_consume, (1, tensors, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, STAGES, OWN_REGS)),
                (_consume, (2, tensors, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, STAGES, OWN_REGS)),
                (_load, (copies, CONSUMERS, BLOCK_K, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


launch_dq = Launcher(dq_kernel, on_hopper)
"""Tensors q, k, v, do, o, lse, stat, dq: fills dq and stat."""


def empty_statistics(q: Tensor, tile: HopperTile) -> Tensor:
    """Memory for what the second kernel needs of each row: float32 (2, batch · heads, padded rows).

    `launch_dq` writes -lse / scale and -delta = -rowsum(dO ∘ O), from which the products S and dP start. Rows past
    n_queries hold -infinity and 0: they add nothing, and the second kernel reads whole tiles without a mask.
    """
    batch, heads, n_queries, _ = q.shape
    own_rows = tile.consumers * ROWS.value
    padded_rows = triton.cdiv(n_queries, own_rows) * own_rows
    return torch.empty((2, batch * heads, padded_rows), dtype=torch.float32, device=q.device)
