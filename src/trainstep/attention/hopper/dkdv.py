"""dK and dV on Hopper with explicit warp roles: the key-owned half of FlashAttention-2's algorithm 2.

A consumer warpgroup owns 64 keys and works on transposed scores, Sᵀ = K Qᵀ, so that P and dS go from registers
straight into the products that make dV and dK; queries and output gradients stream past it. Above head_dim 128 the
two gradients do not fit one warpgroup's registers: one consumer then makes dK of 64 keys and the other their dV.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from trainstep.attention.hopper import (
    copy_pair,
    make_barriers,
    on_hopper,
    own_tile,
    program_id_again,
    refill_pair,
    release,
    store_rows,
    tile_of,
    wait_filled,
)
from trainstep.attention.triton import SIZES, Launcher, tile_and_head

ROWS = gl.constexpr(64)  # keys of one consumer: the rows of one warpgroup's matrix instruction


@gluon.jit
def _load(copies, KEY_TILES: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: the program's keys and values once, then queries and output gradients, head after head."""
    (q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty,
     batch, kv_head, group, first_key, first_tile, n_tiles) = copies  # fmt: skip
    for index in gl.static_range(KEY_TILES):
        row = first_key + index * ROWS
        k_tile, v_tile = k_tiles.index(index), v_tiles.index(index)
        copy_pair(k_desc, v_desc, batch, kv_head, row, k_tile, v_tile, own_full.index(index))
    per_head = n_tiles - first_tile
    for step in range(group * per_head):
        head = kv_head * group + step // per_head
        row = (first_tile + step % per_head) * BLOCK_Q
        refill_pair(q_desc, do_desc, batch, head, row, q_tiles, do_tiles, full, empty, step, STAGES)


@gluon.jit
def _walk(
    dk, dv, k, v, k_tiles, v_tiles, lse_ptr, delta_ptr, q_tiles, do_tiles, full, empty,
    first_step, n_steps, first_row, keys, scale_log2,
    MASKED: gl.constexpr, WANT_DK: gl.constexpr, WANT_DV: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, DK_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q and Pᵀ dO over n_steps tiles of queries from first_row on. dk and dv come and go in flight."""
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    columns = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, S_LAYOUT))
    for offset in range(n_steps):
        step = first_step + offset
        start = first_row + offset * BLOCK_Q
        # Products that start from -lse / scale and -delta need neither subtracted afterwards, nor held in registers.
        nothing = gl.zeros([ROWS, BLOCK_Q], gl.float32, S_LAYOUT)
        scores_t = nothing + gl.load(lse_ptr + start + columns)[None, :]
        if WANT_DK:
            dp_t = nothing + gl.load(delta_ptr + start + columns)[None, :]
        wait_filled(full, step, step + 1, STAGES)
        q = tile_of(q_tiles, step, STAGES, BLOCK_Q, BLOCK_D)
        do = tile_of(do_tiles, step, STAGES, BLOCK_Q, BLOCK_D)
        if WANT_DK:  # nothing is in flight: this only keeps the compiler from setting dp_t up after the first product
            scores_t, dp_t = warpgroup_mma_wait(0, [scores_t, dp_t])
        if BLOCK_D > 128:
            k = own_tile(k_tiles, ROWS, BLOCK_D)
            v = own_tile(v_tiles, ROWS, BLOCK_D)
        scores_t = warpgroup_mma(k, q.permute([1, 0]), scores_t, is_async=True)
        if WANT_DK:
            dp_t = warpgroup_mma(v, do.permute([1, 0]), dp_t, is_async=True)
            scores_t = warpgroup_mma_wait(1, [scores_t])
        else:
            scores_t = warpgroup_mma_wait(0, [scores_t])
        if MASKED:
            scores_t = gl.where((keys - start)[:, None] <= columns[None, :], scores_t, float("-inf"))
        p_t = gl.exp2(scores_t * scale_log2)
        if WANT_DV:
            dv = warpgroup_mma(gl.convert_layout(p_t.to(do.dtype), A_LAYOUT), do, dv, is_async=True)
        if WANT_DK:
            dp_t = warpgroup_mma_wait(1 if WANT_DV else 0, [dp_t])
            ds_t = (p_t * dp_t).to(q.dtype)
            dk = warpgroup_mma(gl.convert_layout(ds_t, A_LAYOUT), q, dk, is_async=True)
        if WANT_DK:
            dk = warpgroup_mma_wait(0, [dk])
        if WANT_DV:
            dv = warpgroup_mma_wait(0, [dv])
        release(empty, step, STAGES)
    return dk, dv


@gluon.jit
def _consume(
    index, tensors, sizes, WANT_DK: gl.constexpr, WANT_DV: gl.constexpr, IS_CAUSAL: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    OWN_REGS: gl.constexpr,
):  # fmt: skip
    """Keys first_key + 64 · index … of this program. lse_ptr and delta_ptr are at query 0 of the group's first head."""
    results, lse_ptr, delta_ptr, q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty, finished = tensors
    first_key, group, first_tile, clear_tile, n_tiles, stat_rows, n_keys, scale, scale_log2 = sizes
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    my_key = first_key + index * ROWS
    keys = my_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    mbarrier.wait(own_full.index(index), 0)
    k_tile = k_tiles.index(index).reshape([ROWS, BLOCK_D])
    v_tile = v_tiles.index(index).reshape([ROWS, BLOCK_D])
    if OWN_REGS:
        k = k_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        v = v_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        k = k_tile
        v = v_tile
    dk = first_key  # a gradient that is the other consumer's is carried along as some number, unused
    dv = first_key
    if WANT_DK:
        dk = gl.zeros([ROWS, BLOCK_D], gl.float32, DK_LAYOUT)
    if WANT_DV:
        dv = gl.zeros([ROWS, BLOCK_D], gl.float32, DK_LAYOUT)
    per_head = n_tiles - first_tile
    for member in range(group):
        if IS_CAUSAL:
            dk, dv = _walk(
                dk, dv, k, v, k_tiles, v_tiles, lse_ptr, delta_ptr, q_tiles, do_tiles, full, empty,
                member * per_head, clear_tile - first_tile, first_tile * BLOCK_Q, keys, scale_log2,
                True, WANT_DK, WANT_DV, BLOCK_Q, BLOCK_D, STAGES, S_LAYOUT, DK_LAYOUT,
            )  # fmt: skip
        dk, dv = _walk(
            dk, dv, k, v, k_tiles, v_tiles, lse_ptr, delta_ptr, q_tiles, do_tiles, full, empty,
            member * per_head + clear_tile - first_tile, n_tiles - clear_tile, clear_tile * BLOCK_Q, keys, scale_log2,
            False, WANT_DK, WANT_DV, BLOCK_Q, BLOCK_D, STAGES, S_LAYOUT, DK_LAYOUT,
        )  # fmt: skip
        lse_ptr += stat_rows
        delta_ptr += stat_rows
    if not (WANT_DK and WANT_DV):  # both consumers read the tiles that the results are about to pass through
        mbarrier.arrive(finished.index(0), count=1)
        mbarrier.wait(finished.index(0), 0)
    # Where the results go is worked out only now: known from the start, it would take registers that the walks need.
    (dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
     kv_heads, tiles_per_head, all_kv_heads, heads_per_section) = results  # fmt: skip
    program = program_id_again()
    tile, batch_head = tile_and_head(program, tiles_per_head, all_kv_heads, heads_per_section, LONGEST_LAST=False)
    batch = (batch_head // kv_heads).to(gl.int64)
    kv_head = (batch_head % kv_heads).to(gl.int64)
    dk_ptr += batch * stride_dkb + kv_head * stride_dkh
    dv_ptr += batch * stride_dvb + kv_head * stride_dvh
    my_key = tile * (k_tiles.shape[0] * ROWS) + index * ROWS
    if WANT_DV:
        store_rows(dv_ptr, stride_dvn, v_tile, dv, my_key, n_keys, HEAD_DIM, BLOCK_D)
    if WANT_DK:
        store_rows(dk_ptr, stride_dkn, k_tile, dk * scale, my_key, n_keys, HEAD_DIM, BLOCK_D)


@gluon.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, stat_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    tiles_per_head, all_kv_heads, kv_heads, group, n_queries, n_keys, stat_rows, heads_per_section, scale, scale_log2,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, OWN_REGS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile, summed over the `group` query heads that read it."""
    SPLIT: gl.constexpr = BLOCK_D > 128  # one consumer makes dV, the other dK
    KEY_TILES: gl.constexpr = 1 if SPLIT else CONSUMERS
    program = gl.program_id(0)
    tile, batch_head = tile_and_head(program, tiles_per_head, all_kv_heads, heads_per_section, LONGEST_LAST=False)
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    first_key = tile * (KEY_TILES * ROWS)
    # Query tiles below first_tile see none of these keys; from clear_tile on they see all of them.
    n_tiles = gl.cdiv(n_queries, BLOCK_Q)
    first_tile = 0
    clear_tile = 0
    if IS_CAUSAL:
        first_tile = gl.minimum(first_key // BLOCK_Q, n_tiles)
        clear_tile = gl.minimum(gl.cdiv(first_key + KEY_TILES * ROWS - 1, BLOCK_Q), n_tiles)
    lse_ptr = stat_ptr + batch_head.to(gl.int64) * group * stat_rows
    delta_ptr = lse_ptr + all_kv_heads.to(gl.int64) * group * stat_rows

    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [KEY_TILES, 1, 1, ROWS, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [KEY_TILES, 1, 1, ROWS, BLOCK_D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_Q, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_Q, BLOCK_D], q_desc.layout)
    own_full = make_barriers(KEY_TILES, 1)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, CONSUMERS)
    # Made only where it is waited for: the compiler gives the memory of an unused barrier to values that it hands to
    # the other warps, and what initialises the barrier can arrive there after them (lab log, 2026-11-21).
    finished = own_full
    if SPLIT:
        finished = make_barriers(1, CONSUMERS)

    copies = (
        q_desc, do_desc, k_desc, v_desc, q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty,
        batch, kv_head, group, first_key, first_tile, n_tiles,
    )  # fmt: skip
    results = (
        dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
        kv_heads, tiles_per_head, all_kv_heads, heads_per_section,
    )  # fmt: skip
    tensors = (
        results, lse_ptr, delta_ptr, q_tiles, do_tiles, k_tiles, v_tiles, own_full, full, empty, finished,
    )  # fmt: skip
    sizes = (first_key, group, first_tile, clear_tile, n_tiles, stat_rows, n_keys, scale, scale_log2)
    if SPLIT:
        gl.static_assert(CONSUMERS == 2)
        gl.warp_specialize(
            [
                (_consume, (0, tensors, sizes, True, False, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, STAGES, OWN_REGS)),
                (_consume, (0, tensors, sizes, False, True, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, STAGES, OWN_REGS)),
                (_load, (copies, KEY_TILES, BLOCK_Q, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, tensors, sizes, True, True, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, STAGES, OWN_REGS)),
                (_consume, (1, tensors, sizes, True, True, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, STAGES, OWN_REGS)),
                (_load, (copies, KEY_TILES, BLOCK_Q, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consume, (0, tensors, sizes, True, True, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, STAGES, OWN_REGS)),
                (_consume, (1, tensors, sizes, True, True, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, STAGES, OWN_REGS)),
                (_consume, (2, tensors, sizes, True, True, IS_CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_Q, STAGES, OWN_REGS)),
                (_load, (copies, KEY_TILES, BLOCK_Q, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


launch_dkdv = Launcher(dkdv_kernel, on_hopper)
"""Tensors q, k, v, do, stat, dk, dv: fills dk and dv; stat is what `launch_dq` left."""
