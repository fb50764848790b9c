"""A consumer of the one-kernel backward takes a tile of queries through its part of five products.

A tile has 128 queries up to head_dim 64 (`step_of_128`) and 64 above (`step_of_64`), where the gradients of 64 keys
leave registers for no more. What 64 features wait for most is shared memory: a product of 64 rows and 64 columns reads
as much of it as it can, one with 128 columns three quarters of that. So scores have 128 columns there, and what belongs
to each query is no vector to be loaded, but three summands of 8 bits that a product with ones adds up.

A step takes and returns dk and dv [64, BLOCK_D] of the consumer's keys, float32. Besides:
    place: where in dQ's sum the half of the tile before goes, whose dQ it makes; -1 for none.
    shared: see `backward_kernel`, which makes it.
    tile: how many the program has walked before.
    start: the tile's first query.
    own: the numbers of the consumer's keys, how many there are in all, and the window.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trainstep.attention.hopper import own_tile, release, tile_of, wait_filled
from trainstep.attention.hopper.dq_sum import in_fragment_order

ROWS = gl.constexpr(64)  # keys of one consumer, and columns of a product
KEYS = gl.constexpr(128)  # keys of one program
TILE_SIZE = gl.constexpr(128 * 64)  # queries of a step times features
STAGES = gl.constexpr(2)  # tiles of queries in shared memory
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
TWO_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@builtin
def _tma_add(desc, coord, src, _semantic=None):
    """Start adding a tile of shared memory to global memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def start_dq(shared, stage, INDEX: gl.constexpr, BLOCK_D: gl.constexpr):
    """dS K in flight of this consumer's half of a tile: of two times 64 queries one, or half of the columns."""
    ds_tiles, _dq_tiles, _acc_desc, _ds_full, k_tiles = shared[:5]
    nothing = gl.zeros([ROWS, 64], gl.float32, SCORES)
    k_tile = own_tile(k_tiles, KEYS, BLOCK_D)
    if BLOCK_D == 64:
        ds_tile = ds_tiles.index(stage * 2 + INDEX)
        k_part = k_tile
    else:
        ds_tile = ds_tiles.index(stage)
        k_part = k_tile.slice(INDEX * 64, 64, 1)
    return warpgroup_mma(ds_tile.permute([1, 0]), k_part, nothing, use_acc=False, is_async=True)


@gluon.jit
def start_dq_before(shared, tile, INDEX: gl.constexpr, BLOCK_D: gl.constexpr):
    """`start_dq` of the tile before this one, when both consumers have stored their dS of it."""
    ds_full = shared[3]
    mbarrier.wait(ds_full.index((tile + 1) % 2), ((tile - 1) // 2) & 1, pred=tile > 0)
    return start_dq(shared, (tile + 1) % 2, INDEX, BLOCK_D)


@gluon.jit
def store_dq(shared, dq, INDEX: gl.constexpr):
    """Put dq where the copy engine finds it, with all that was stored before."""
    dq_tiles = shared[1]
    tma.store_wait(0)
    dq_tiles.index(INDEX).store(in_fragment_order(dq))
    fence_async_shared()


@gluon.jit
def add_dq(shared, place, INDEX: gl.constexpr):
    """Start adding what `store_dq` stored to the sum, in the rows from `place` on; negative: nowhere."""
    dq_tiles, acc_desc = shared[1:3]
    if place >= 0:
        _tma_add(acc_desc, [place, 0], dq_tiles.index(INDEX))


@gluon.jit
def _masked(scores_t, start, own, TAIL: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """-inf for what the queries from start on do not see. TAIL: past the diagonal, where only a window cuts."""
    keys, n_keys, window = own
    queries = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    if not TAIL:
        if IS_CAUSAL:
            seen = (keys - start)[:, None] <= queries[None, :]
        else:
            seen = (keys < n_keys)[:, None]
        if window is not None:
            seen = seen & ((keys + (window - start))[:, None] > queries[None, :])
    else:
        seen = (keys + (window - start))[:, None] > queries[None, :]
    return gl.where(seen, scores_t, float("-inf"))


@gluon.jit
def _halves(t):
    """[64, 128] as its first and its last 64 columns, of which each thread has its own."""
    a, b = gl.split(t.reshape([ROWS, 2, ROWS]).permute([0, 2, 1]))
    return gl.convert_layout(a, SCORES, assert_trivial=True), gl.convert_layout(b, SCORES, assert_trivial=True)


@gluon.jit
def step_of_64(
    dk, dv, place, shared, tile, start, own, scale_log2,
    MASKED: gl.constexpr, TAIL: gl.constexpr, IS_CAUSAL: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Add what 64 queries give, of more than 64 features."""
    (ds_tiles, _dq_tiles, _acc_desc, ds_full, k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, _ones,
     full, empty) = shared  # fmt: skip
    BLOCK_D: gl.constexpr = 128
    FROM_REGISTERS: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = tile % STAGES
    wait_filled(full, tile, tile + 1, STAGES)
    window = own[2]
    if window is not None:  # later, its address would take registers that masks need
        v = own_tile(v_tiles, KEYS, BLOCK_D).slice(INDEX * ROWS, ROWS, 0)
    # Products that start from -lse / scale and -delta need neither subtracted afterwards.
    nothing = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    scores_t = gl.broadcast(lse_tiles.index(slot).load(gl.SliceLayout(0, SCORES))[None, :], nothing)[0]
    dp_t = gl.broadcast(delta_tiles.index(slot).load(gl.SliceLayout(0, SCORES))[None, :], nothing)[0]
    # Nothing is in flight: this only keeps the compiler from setting dp_t up after the first product.
    scores_t, dp_t = warpgroup_mma_wait(0, [scores_t, dp_t])
    q = tile_of(q_tiles, tile, STAGES, ROWS, BLOCK_D)
    do = tile_of(do_tiles, tile, STAGES, ROWS, BLOCK_D)
    k = own_tile(k_tiles, KEYS, BLOCK_D).slice(INDEX * ROWS, ROWS, 0)
    if window is None:
        v = own_tile(v_tiles, KEYS, BLOCK_D).slice(INDEX * ROWS, ROWS, 0)
    scores_t = warpgroup_mma(k, q.permute([1, 0]), scores_t, is_async=True)
    dp_t = warpgroup_mma(v, do.permute([1, 0]), dp_t, is_async=True)
    scores_t = warpgroup_mma_wait(1, [scores_t])
    if MASKED:
        scores_t = _masked(scores_t, start, own, TAIL, IS_CAUSAL)
    p_t = gl.exp2(scores_t * scale_log2)
    dv = warpgroup_mma(gl.convert_layout(p_t.to(do.dtype), FROM_REGISTERS), do, dv, is_async=True)
    dp_t = warpgroup_mma_wait(1, [dp_t])
    ds_t = (p_t * dp_t).to(q.dtype)
    ds_a = gl.convert_layout(ds_t, FROM_REGISTERS)
    dq = start_dq_before(shared, tile, INDEX, BLOCK_D)
    dk = warpgroup_mma(ds_a, q, dk, is_async=True)
    # What comes into ds_tiles was in use until both consumers had made the dQ before this one.
    dv, dq = warpgroup_mma_wait(1, [dv, dq])
    ds_tiles.index(tile % 2).slice(INDEX * ROWS, ROWS, 0).store(ds_t)
    store_dq(shared, dq, INDEX)
    mbarrier.arrive(ds_full.index(tile % 2), count=1)
    add_dq(shared, place, INDEX)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    release(empty, tile, STAGES)
    return dk, dv


@gluon.jit
def _start_dp(ones, delta, v, do):
    """V dOᵀ - delta in flight, of 64 queries."""
    dp_t = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    dp_t = warpgroup_mma(ones, delta.permute([1, 0]), dp_t, use_acc=False, is_async=True)
    return warpgroup_mma(v, do.permute([1, 0]), dp_t, is_async=True)


@gluon.jit
def step_of_128(
    dk, dv, place, shared, tile, start, own, scale_log2,
    MASKED: gl.constexpr, TAIL: gl.constexpr, IS_CAUSAL: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Add what 128 queries give, of 64 features at most, by halves: products wait while exponentials are made."""
    (ds_tiles, _dq_tiles, _acc_desc, ds_full, k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, ones,
     full, empty) = shared  # fmt: skip
    BLOCK_D: gl.constexpr = 64
    FROM_REGISTERS: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = tile % STAGES
    wait_filled(full, tile, tile + 1, STAGES)
    q = tile_of(q_tiles, tile, STAGES, 2 * ROWS, BLOCK_D)
    do = tile_of(do_tiles, tile, STAGES, 2 * ROWS, BLOCK_D)
    q_a = q.slice(0, ROWS, 0)
    q_b = q.slice(ROWS, ROWS, 0)
    do_a = do.slice(0, ROWS, 0)
    do_b = do.slice(ROWS, ROWS, 0)
    delta = delta_tiles.index(slot)
    k = own_tile(k_tiles, KEYS, BLOCK_D).slice(INDEX * ROWS, ROWS, 0)
    v = own_tile(v_tiles, KEYS, BLOCK_D).slice(INDEX * ROWS, ROWS, 0)
    scores_t = gl.zeros([ROWS, 2 * ROWS], gl.float32, TWO_SCORES)
    scores_t = warpgroup_mma(ones, lse_tiles.index(slot).permute([1, 0]), scores_t, use_acc=False, is_async=True)
    scores_t = warpgroup_mma(k, q.permute([1, 0]), scores_t, is_async=True)
    if not MASKED:
        dp_a = _start_dp(ones, delta.slice(0, ROWS, 0), v, do_a)
        scores_t = warpgroup_mma_wait(2, [scores_t])
    else:
        scores_t = warpgroup_mma_wait(0, [scores_t])
    s_a, s_b = _halves(scores_t)
    if MASKED:
        s_a = _masked(s_a, start, own, TAIL, IS_CAUSAL)
        s_b = _masked(s_b, start + ROWS, own, TAIL, IS_CAUSAL)
    p_a = gl.exp2(s_a * scale_log2)
    dv = warpgroup_mma(gl.convert_layout(p_a.to(q.dtype), FROM_REGISTERS), do_a, dv, is_async=True)
    if MASKED:  # not before: masks take the registers
        dp_a = _start_dp(ones, delta.slice(0, ROWS, 0), v, do_a)
        dp_a = warpgroup_mma_wait(0, [dp_a])
    else:
        dp_a = warpgroup_mma_wait(1, [dp_a])
    ds_a = (p_a * dp_a).to(q.dtype)
    dp_b = _start_dp(ones, delta.slice(ROWS, ROWS, 0), v, do_b)
    dq = start_dq_before(shared, tile, INDEX, BLOCK_D)
    dk = warpgroup_mma(gl.convert_layout(ds_a, FROM_REGISTERS), q_a, dk, is_async=True)
    # Both consumers have made the dQ before the one that is in flight, so its dS may be overwritten.
    ds_tiles.index(tile % 2 * 2).slice(INDEX * ROWS, ROWS, 0).store(ds_a)
    p_b = gl.exp2(s_b * scale_log2)
    dv = warpgroup_mma(gl.convert_layout(p_b.to(q.dtype), FROM_REGISTERS), do_b, dv, is_async=True)
    dp_b = warpgroup_mma_wait(3, [dp_b])
    ds_b = (p_b * dp_b).to(q.dtype)
    dk = warpgroup_mma(gl.convert_layout(ds_b, FROM_REGISTERS), q_b, dk, is_async=True)
    ds_tiles.index(tile % 2 * 2 + 1).slice(INDEX * ROWS, ROWS, 0).store(ds_b)
    dq = warpgroup_mma_wait(3, [dq])
    store_dq(shared, dq, INDEX)
    mbarrier.arrive(ds_full.index(tile % 2), count=1)
    add_dq(shared, place, INDEX)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    release(empty, tile, STAGES)
    return dk, dv
