"""The forward on Hopper with explicit warp roles: FlashAttention-2's algorithm 1, scheduled as FlashAttention-3 does.

Shah et al., "FlashAttention-3", 2024. A program works on one tile of CONSUMERS · 64 queries after another. One warp
loads queries, keys and values, also those of the next tile while this one's results are stored; each consumer
warpgroup owns 64 queries and, while its softmax of tile n runs, keeps the matrix units busy with P V of tile n - 1.
Keys are walked from the last tile to the first, so that the tiles that need a mask come first; with a window, those at
its far end come last.

At head_dim 64 a tile's exponentials take as long as its products. There, and in short rows at 128, the consumers take
turns with the matrix units, so that the products of one run under the exponentials of another.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trainstep.attention.hopper import (
    copy_rows,
    make_barriers,
    on_hopper,
    refill,
    release,
    store_rows,
    tile_of,
    wait_filled,
)
from trainstep.attention.hopper.schedule import item_of, steps_of, tile_of_item
from trainstep.attention.triton import SIZES, Launch, Launcher
from trainstep.attention.tuned import HopperTile, hopper_block_of

ROWS = gl.constexpr(64)  # queries of one consumer: the rows of one warpgroup's matrix instruction


@gluon.jit
def _load(
    copies, work, sizes, IS_CAUSAL: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp: of every tile of queries every consumer's, then the keys and values of every step."""
    (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
     group) = copies  # fmt: skip
    tiles_per_head, all_heads, heads, _per_section = work
    _queries, n_keys, window, _scale = sizes
    n_items = tiles_per_head * all_heads
    items = 0
    steps = 0
    for turn in range(gl.cdiv(n_items, gl.num_programs(0))):
        item = item_of(turn, IS_CAUSAL)
        if item < n_items:
            tile, batch_head = tile_of_item(item, work, IS_CAUSAL)
            batch = batch_head // heads
            head = batch_head % heads
            first_row = tile * (CONSUMERS * ROWS)
            n_tiles, _masked, _tail, skipped = steps_of(
                first_row, n_keys, window, IS_CAUSAL, CONSUMERS * ROWS, BLOCK_K, BLOCK_D
            )
            for index in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(index), (items & 1) ^ 1)
                copy_rows(q_desc, batch, head, first_row + index * ROWS, q_tiles.index(index), q_full.index(index))
            for step in range(n_tiles):
                key = (skipped + n_tiles - 1 - step) * BLOCK_K
                refill(k_desc, batch, head // group, key, k_tiles, k_full, k_empty, steps + step, STAGES)
                refill(v_desc, batch, head // group, key, v_tiles, v_full, v_empty, steps + step, STAGES)
            items += 1
            steps += n_tiles


FIRST_TURN = gl.constexpr(8)  # the consumers' turns are named barriers 8, 9 and 10, which nothing else uses


@gluon.jit
def _await_turn(INDEX: gl.constexpr):
    """Consumer INDEX: wait until the one before it has started its products."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(FIRST_TURN + INDEX)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _give_turn(INDEX: gl.constexpr):
    """Let consumer INDEX start its products."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(FIRST_TURN + INDEX)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """P rounded to 16 bits, neighbours in one register: carried from step to step as it is, it would be taken apart
    and put together again in each."""
    even, odd = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - Triton compiles one of two branches, so the second return must be in one
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def _operand(packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The result of `_packed`, as the left operand of a product."""
    both = gl.join(packed.to(gl.int16), (packed >> 16).to(gl.int16))
    return gl.convert_layout(both.reshape([packed.shape[0], packed.shape[1] * 2]).to(dtype, bitcast=True), LAYOUT)


@gluon.jit
def _mask(scores, row_limit, first_key, window, BLOCK_K: gl.constexpr):
    """-inf where a key lies beyond its row's limit, or is not among the `window` keys up to it.

    A thread's columns are 2 · (lane mod 4) and constants. What depends on the lane goes to the limit, of which a thread
    has two; the constants are then part of the comparisons.
    """
    keys = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, scores.type.layout))
    limit = (row_limit - first_key)[:, None] - (keys & 6)[None, :]
    columns = (keys & ~6)[None, :]
    scores = gl.where(columns <= limit, scores, float("-inf"))
    if window is not None:
        scores = gl.where(columns > limit - window, scores, float("-inf"))
    return scores


@gluon.jit
def _sums(p):
    """Each row of P summed over the columns of each thread: [ROWS, 4]. Threads are summed over once, at the end."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax_step(scores, row_max, row_sums, scale_log2, MASKED: gl.constexpr):
    """P relative to the new row maximum, that maximum, the factor for what was summed before it, and the new sums."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    base = new_max
    if MASKED:  # a row that has seen no key yet: exp2(-inf - 0) = 0 where exp2(-inf + inf) would not be a number
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - base[:, None])
    shrink = gl.exp2(row_max - base)
    added = _sums(p)
    row_sums = row_sums * gl.convert_layout(shrink, gl.SliceLayout(1, added.type.layout))[:, None] + added
    return p, new_max, shrink, row_sums


@gluon.jit
def _walk(
    acc, p, row_max, row_sums, q, ring, steps, first_step, last_step, n_tiles, skipped, row_limit, window, scale_log2,
    INDEX: gl.constexpr, CONSUMERS: gl.constexpr, MASKED: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps first_step … last_step - 1, each: scores of its tile, P V of the tile before it, softmax of its own.

    steps: how many there were before this walk's tile of queries.
    """
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    for step in range(first_step, last_step):
        now = steps + step
        k = tile_of(k_tiles, now, STAGES, BLOCK_K, BLOCK_D)
        v = tile_of(v_tiles, now - 1, STAGES, BLOCK_K, BLOCK_D)
        wait_filled(v_full, now - 1, now, STAGES)
        wait_filled(k_full, now, now + 1, STAGES)
        # Unpacked before anything is in flight: the assembler would wait for each product otherwise.
        weights = _operand(p, v.dtype, gl.DotOperandLayout(0, O_LAYOUT, 2))
        if TURNS:
            _await_turn(INDEX)
        scores = warpgroup_mma(
            q, k.permute([1, 0]), gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT), use_acc=False, is_async=True
        )
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        if TURNS:
            _give_turn((INDEX + 1) % CONSUMERS)
        scores = warpgroup_mma_wait(1, [scores])
        release(k_empty, now, STAGES)
        if MASKED:
            scores = _mask(scores, row_limit, (skipped + n_tiles - 1 - step) * BLOCK_K, window, BLOCK_K)
        p_next, row_max, shrink, row_sums = _softmax_step(scores, row_max, row_sums, scale_log2, MASKED)
        acc = warpgroup_mma_wait(0, [acc])
        release(v_empty, now - 1, STAGES)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = _packed(p_next, v.dtype)
    return acc, p, row_max, row_sums


@gluon.jit
def _consume(
    INDEX: gl.constexpr, tensors, work, sizes, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    OWN_REGS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Queries 64 · INDEX … of every tile of this program."""
    results, ring, q_tiles, o_tiles, q_full, q_empty = tensors
    tiles_per_head, all_heads, heads, _per_section = work
    n_queries, n_keys, window, scale_log2 = sizes
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    n_items = tiles_per_head * all_heads
    if TURNS and INDEX == CONSUMERS - 1:
        _give_turn(0)
    items = 0
    steps = 0
    for turn in range(gl.cdiv(n_items, gl.num_programs(0))):
        item = item_of(turn, IS_CAUSAL)
        if item < n_items:
            tile, batch_head = tile_of_item(item, work, IS_CAUSAL)
            first_row = tile * (CONSUMERS * ROWS)
            n_tiles, n_masked, tail, skipped = steps_of(
                first_row, n_keys, window, IS_CAUSAL, CONSUMERS * ROWS, BLOCK_K, BLOCK_D
            )
            row_limit = gl.full([ROWS], n_keys - 1, gl.int32, gl.SliceLayout(1, S_LAYOUT))
            if IS_CAUSAL:
                rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
                row_limit = gl.minimum(row_limit, first_row + INDEX * ROWS + rows)

            mbarrier.wait(q_full.index(INDEX), items & 1)
            q_tile = q_tiles.index(INDEX).reshape([ROWS, BLOCK_D])
            if OWN_REGS:
                q = q_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            else:
                q = q_tile
            k = tile_of(k_tiles, steps, STAGES, BLOCK_K, BLOCK_D)
            wait_filled(k_full, steps, steps + 1, STAGES)
            scores = warpgroup_mma(
                q, k.permute([1, 0]), gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT), use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, [scores])
            release(k_empty, steps, STAGES)
            scores = _mask(scores, row_limit, (skipped + n_tiles - 1) * BLOCK_K, window, BLOCK_K)
            row_max = gl.max(scores, 1) * scale_log2
            p_first = gl.exp2(scores * scale_log2 - gl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
            row_sums = _sums(p_first)
            p = _packed(p_first, k.dtype)
            acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
            acc, p, row_max, row_sums = _walk(
                acc, p, row_max, row_sums, q, ring, steps, 1, n_masked, n_tiles, skipped, row_limit, window, scale_log2,
                INDEX, CONSUMERS, True, BLOCK_K, BLOCK_D, STAGES, TURNS, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
            if window is None or BLOCK_D == 64:
                acc, p, row_max, row_sums = _walk(
                    acc, p, row_max, row_sums, q, ring, steps, n_masked, tail, n_tiles, skipped, row_limit, window,
                    scale_log2, INDEX, CONSUMERS, False, BLOCK_K, BLOCK_D, STAGES, TURNS, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
            if window is not None:
                acc, p, row_max, row_sums = _walk(
                    acc, p, row_max, row_sums, q, ring, steps, tail, n_tiles, n_tiles, skipped, row_limit, window,
                    scale_log2, INDEX, CONSUMERS, True, BLOCK_K, BLOCK_D, STAGES, TURNS, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
            if BLOCK_D <= 128:
                mbarrier.arrive(q_empty.index(INDEX), count=1)
            last = steps + n_tiles - 1
            v = tile_of(v_tiles, last, STAGES, BLOCK_K, BLOCK_D)
            wait_filled(v_full, last, last + 1, STAGES)
            acc = warpgroup_mma(_operand(p, v.dtype, P_LAYOUT), v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            release(v_empty, last, STAGES)
            items += 1
            steps += n_tiles

            o_ptr, lse_ptr, stride_ob, stride_oh, stride_on = results
            o_at = o_ptr + (batch_head // heads).to(gl.int64) * stride_ob
            o_at += (batch_head % heads).to(gl.int64) * stride_oh
            my_row = first_row + INDEX * ROWS
            LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            line_rows = my_row + gl.arange(0, ROWS, layout=LINE)
            row_sum = gl.convert_layout(gl.sum(row_sums, 1), gl.SliceLayout(1, S_LAYOUT))
            lse = (row_max + gl.log2(row_sum)) * 0.6931471805599453  # ln 2: to base e
            lse_at = lse_ptr + batch_head.to(gl.int64) * n_queries + line_rows
            gl.store(lse_at, gl.convert_layout(lse, LINE), mask=line_rows < n_queries)
            o = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
            if BLOCK_D <= 128:
                o_tile = o_tiles.index(INDEX).reshape([ROWS, BLOCK_D])
                store_rows(o_at, stride_on, o_tile, o, my_row, n_queries, HEAD_DIM, BLOCK_D)
            else:  # there is no room for tiles of their own: the queries' take the results
                store_rows(o_at, stride_on, q_tile, o, my_row, n_queries, HEAD_DIM, BLOCK_D)
                fence_async_shared()
                mbarrier.arrive(q_empty.index(INDEX), count=1)


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, stride_ob, stride_oh, stride_on,
    tiles_per_head, all_heads, heads, group, n_queries, n_keys, heads_per_section, scale_log2, window,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, OWN_REGS: gl.constexpr, REGISTERS: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Arguments as in the portable kernel, with q, k and v as 4-D descriptors of tiles [1, 1, rows, BLOCK_D], and any
    number of programs.

    A window is causal, and there are as many keys as queries.
    """
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], v_desc.layout)
    o_tiles = q_tiles
    if BLOCK_D <= 128:
        o_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    q_full = make_barriers(CONSUMERS, 1)
    q_empty = make_barriers(CONSUMERS, 1)
    k_full = make_barriers(STAGES, 1)
    v_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, CONSUMERS)
    v_empty = make_barriers(STAGES, CONSUMERS)

    copies = (
        q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, group,
    )  # fmt: skip
    results = (o_ptr, lse_ptr, stride_ob, stride_oh, stride_on)
    ring = (k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)
    tensors = (results, ring, q_tiles, o_tiles, q_full, q_empty)
    work = (tiles_per_head, all_heads, heads, heads_per_section)
    sizes = (n_queries, n_keys, window, scale_log2)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (0, tensors, work, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, 2, STAGES, OWN_REGS, TURNS),
                ),
                (
                    _consume,
                    (1, tensors, work, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, 2, STAGES, OWN_REGS, TURNS),
                ),
                (_load, (copies, work, sizes, IS_CAUSAL, BLOCK_D, BLOCK_K, 2, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (
                    _consume,
                    (0, tensors, work, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, 3, STAGES, OWN_REGS, TURNS),
                ),
                (
                    _consume,
                    (1, tensors, work, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, 3, STAGES, OWN_REGS, TURNS),
                ),
                (
                    _consume,
                    (2, tensors, work, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_K, 3, STAGES, OWN_REGS, TURNS),
                ),
                (_load, (copies, work, sizes, IS_CAUSAL, BLOCK_D, BLOCK_K, 3, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


SHORT = 1024
"""Queries of a head up to which, with a causal mask, two consumers beat three, as a tile has less above the diagonal,
and turns pay at head_dim 128."""

ROOM = 226 * 1024
"""Bytes of shared memory for tiles, of 227 KiB that a program may have."""


def for_rows(
    tile: HopperTile, block_d: int, is_causal: bool, n_queries: int, window: int | None
) -> tuple[HopperTile, bool]:
    """The tile for rows of so many queries, and whether its consumers take turns.

    Through a window there are two consumers as well, and no ring has more slots than fit beside queries and results.
    """
    is_short = is_causal and n_queries <= SHORT
    consumers = 2 if is_short or window is not None else tile.consumers
    own_rows = 64 * consumers * (2 if block_d <= 128 else 1)
    slots = (ROOM // (2 * block_d) - own_rows) // (2 * tile.block)
    tile = dataclasses.replace(tile, consumers=consumers, stages=min(tile.stages, slots))
    return tile, block_d == 64 or (is_short and block_d == 128)


def _arguments(
    kernel: Any, tensors: dict[str, Tensor], is_causal: bool, scale: float, tile: HopperTile, window: int | None = None
) -> Launch:
    """A launch as `on_hopper`, with as many programs as there are multiprocessors.

    At head_dim 256 a program cannot load queries ahead, so that there each tile has its own.
    """
    *_, n_queries, head_dim = tensors["q"].shape
    block_d = hopper_block_of(head_dim)
    tile, takes_turns = for_rows(tile, block_d, is_causal, n_queries, window)
    (programs,), named = on_hopper(kernel, tensors, is_causal, scale, tile, window)
    if block_d <= 128:
        programs = min(programs, torch.cuda.get_device_properties(tensors["q"].device).multi_processor_count)
    return (programs,), named | {"TURNS": takes_turns}


launch_forward = Launcher(forward_kernel, _arguments)
"""Tensors q, k, v, o, lse: fills o and lse."""
