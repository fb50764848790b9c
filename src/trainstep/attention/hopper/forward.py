"""The forward on Hopper with explicit warp roles: FlashAttention-2's algorithm 1, scheduled as FlashAttention-3 does.

Shah et al., "FlashAttention-3", 2024. A program owns CONSUMERS · 64 queries. One warp loads keys and values; each
consumer warpgroup owns 64 queries and, while its softmax of tile n runs, keeps the matrix units busy with P V of tile
n - 1. Keys are walked from the last tile to the first, so that the tiles that need a mask come first; with a window,
those at its far end come last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trainstep.attention.hopper import (
    copy_rows,
    make_barriers,
    on_hopper,
    program_id_again,
    refill,
    release,
    store_rows,
    tile_of,
    wait_filled,
)
from trainstep.attention.triton import SIZES, Launcher, tile_and_head

ROWS = gl.constexpr(64)  # queries of one consumer: the rows of one warpgroup's matrix instruction


@gluon.jit
def _load(copies, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: every consumer's queries once, then the keys and values of every step."""
    (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
     batch, head, kv_head, first_row, n_tiles, skipped) = copies  # fmt: skip
    for index in gl.static_range(CONSUMERS):
        copy_rows(q_desc, batch, head, first_row + index * ROWS, q_tiles.index(index), q_full.index(index))
    for step in range(n_tiles):
        key = (skipped + n_tiles - 1 - step) * BLOCK_K
        refill(k_desc, batch, kv_head, key, k_tiles, k_full, k_empty, step, STAGES)
        refill(v_desc, batch, kv_head, key, v_tiles, v_full, v_empty, step, STAGES)


@gluon.jit
def _mask(scores, row_limit, first_key, window, BLOCK_K: gl.constexpr):
    """-inf where a key lies beyond its row's limit, or is not among the `window` keys up to it."""
    keys = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, scores.type.layout)) + first_key
    seen = keys[None, :] <= row_limit[:, None]
    if window is not None:
        seen = seen & (keys[None, :] > (row_limit - window)[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _softmax_step(scores, row_max, row_sum, scale_log2, MASKED: gl.constexpr):
    """P relative to the new row maximum, that maximum, the factor for what was summed before it, and the new sum."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    base = new_max
    if MASKED:  # a row that has seen no key yet: exp2(-inf - 0) = 0 where exp2(-inf + inf) would not be a number
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - base[:, None])
    shrink = gl.exp2(row_max - base)
    return p, new_max, shrink, row_sum * shrink + gl.sum(p, 1)


@gluon.jit
def _walk(
    acc, p, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    first_step, last_step, n_tiles, skipped, row_limit, window, scale_log2,
    MASKED: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Steps first_step … last_step - 1, each: scores of its tile, P V of the tile before it, softmax of its own."""
    for step in range(first_step, last_step):
        k = tile_of(k_tiles, step, STAGES, BLOCK_K, BLOCK_D)
        wait_filled(k_full, step, n_tiles, STAGES)
        scores = warpgroup_mma(
            q, k.permute([1, 0]), gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT), use_acc=False, is_async=True
        )
        v = tile_of(v_tiles, step - 1, STAGES, BLOCK_K, BLOCK_D)
        wait_filled(v_full, step - 1, n_tiles, STAGES)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        release(k_empty, step, STAGES)
        if MASKED:
            scores = _mask(scores, row_limit, (skipped + n_tiles - 1 - step) * BLOCK_K, window, BLOCK_K)
            # Masks first, exponentials after a wait: mixed by the assembler they want more registers than there are.
            wait_filled(k_full, step + 1, n_tiles, STAGES)
        p_next, row_max, shrink, row_sum = _softmax_step(scores, row_max, row_sum, scale_log2, MASKED)
        acc = warpgroup_mma_wait(0, [acc])
        release(v_empty, step - 1, STAGES)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(p_next.to(v.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return acc, p, row_max, row_sum


@gluon.jit
def _consume(
    index, tensors, sizes, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, OWN_REGS: gl.constexpr,
):  # fmt: skip
    """Queries first_row + 64 · index … of this program."""
    results, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty = tensors
    first_row, n_tiles, n_masked, tail, skipped, window, n_queries, n_keys, scale_log2 = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    rows = first_row + index * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    row_limit = gl.full([ROWS], n_keys - 1, gl.int32, gl.SliceLayout(1, S_LAYOUT))
    if IS_CAUSAL:
        row_limit = gl.minimum(row_limit, rows)

    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    mbarrier.wait(q_full.index(index), 0)
    q_tile = q_tiles.index(index).reshape([ROWS, BLOCK_D])
    if OWN_REGS:
        q = q_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        q = q_tile
    k = tile_of(k_tiles, 0, STAGES, BLOCK_K, BLOCK_D)
    wait_filled(k_full, 0, n_tiles, STAGES)
    scores = warpgroup_mma(
        q, k.permute([1, 0]), gl.zeros([ROWS, BLOCK_K], gl.float32, S_LAYOUT), use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, [scores])
    release(k_empty, 0, STAGES)
    scores = _mask(scores, row_limit, (skipped + n_tiles - 1) * BLOCK_K, window, BLOCK_K)
    wait_filled(k_full, 1, n_tiles, STAGES)
    p_first, row_max, _, row_sum = _softmax_step(scores, row_max, row_sum, scale_log2, True)
    p = gl.convert_layout(p_first.to(k.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    acc, p, row_max, row_sum = _walk(
        acc, p, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        1, n_masked, n_tiles, skipped, row_limit, window, scale_log2, True, BLOCK_K, BLOCK_D, STAGES,
        S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    acc, p, row_max, row_sum = _walk(
        acc, p, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        n_masked, tail, n_tiles, skipped, row_limit, window, scale_log2, False, BLOCK_K, BLOCK_D, STAGES,
        S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    if window is not None:
        acc, p, row_max, row_sum = _walk(
            acc, p, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            tail, n_tiles, n_tiles, skipped, row_limit, window, scale_log2, True, BLOCK_K, BLOCK_D, STAGES,
            S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    v = tile_of(v_tiles, n_tiles - 1, STAGES, BLOCK_K, BLOCK_D)
    wait_filled(v_full, n_tiles - 1, n_tiles, STAGES)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])

    # Where the results go is worked out only now: known from the start, it would take registers that the walks need.
    o_ptr, lse_ptr, stride_ob, stride_oh, stride_on, heads, tiles_per_head, all_heads, heads_per_section = results
    program = program_id_again()
    tile, batch_head = tile_and_head(program, tiles_per_head, all_heads, heads_per_section, LONGEST_LAST=IS_CAUSAL)
    o_ptr += (batch_head // heads).to(gl.int64) * stride_ob + (batch_head % heads).to(gl.int64) * stride_oh
    lse_ptr += batch_head.to(gl.int64) * n_queries
    my_row = tile * (q_tiles.shape[0] * ROWS) + index * ROWS
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line_rows = my_row + gl.arange(0, ROWS, layout=LINE)
    lse = (row_max + gl.log2(row_sum)) * 0.6931471805599453  # ln 2: to base e
    gl.store(lse_ptr + line_rows, gl.convert_layout(lse, LINE), mask=line_rows < n_queries)
    o = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, O_LAYOUT))[:, None]
    store_rows(o_ptr, stride_on, q_tile, o, my_row, n_queries, HEAD_DIM, BLOCK_D)


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, stride_ob, stride_oh, stride_on,
    tiles_per_head, all_heads, heads, group, n_queries, n_keys, heads_per_section, scale_log2, window,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, OWN_REGS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as in the portable kernel, with q, k and v as 4-D descriptors of tiles [1, 1, rows, BLOCK_D].

    A window is causal, and there are as many keys as queries.
    """
    program = gl.program_id(0)
    tile, batch_head = tile_and_head(program, tiles_per_head, all_heads, heads_per_section, LONGEST_LAST=IS_CAUSAL)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group
    first_row = tile * (CONSUMERS * ROWS)
    visible = n_keys
    whole = n_keys // BLOCK_K  # tiles that every query of the program sees in full
    if IS_CAUSAL:
        visible = gl.minimum(n_keys, first_row + CONSUMERS * ROWS)
        whole = gl.minimum(whole, (first_row + 1) // BLOCK_K)
    n_tiles = gl.cdiv(visible, BLOCK_K)
    n_masked = gl.maximum(n_tiles - whole, 1)  # the first step always masks
    skipped = gl.constexpr(0)  # tiles before the window of the first query
    tail = n_tiles  # the step from which on some query does not see all of a tile
    if window is not None:
        skipped = gl.maximum(first_row - window + 1, 0) // BLOCK_K
        clear = gl.cdiv(gl.maximum(first_row + CONSUMERS * ROWS - window, 0), BLOCK_K)
        tail = gl.maximum(n_tiles - clear, n_masked)
        n_tiles -= skipped
        n_masked = gl.minimum(n_masked, n_tiles)
        tail = gl.minimum(tail, n_tiles)

    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_K, BLOCK_D], v_desc.layout)
    q_full = make_barriers(CONSUMERS, 1)
    k_full = make_barriers(STAGES, 1)
    v_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, CONSUMERS)
    v_empty = make_barriers(STAGES, CONSUMERS)

    copies = (
        q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
        batch, head, kv_head, first_row, n_tiles, skipped,
    )  # fmt: skip
    results = (o_ptr, lse_ptr, stride_ob, stride_oh, stride_on, heads, tiles_per_head, all_heads, heads_per_section)
    tensors = (results, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty)
    sizes = (first_row, n_tiles, n_masked, tail, skipped, window, n_queries, n_keys, scale_log2)
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


launch_forward = Launcher(forward_kernel, on_hopper)
"""Tensors q, k, v, o, lse: fills o and lse."""
