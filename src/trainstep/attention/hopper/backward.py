"""The whole backward in one kernel on Hopper: five products for each pair of tiles, where dq.py and dkdv.py need seven.

A program owns 128 keys, each of its two consumer warpgroups 64 of them; queries and output gradients stream past. As
in dkdv.py scores are transposed, so that P and dS go from registers straight into dV and dK. dS also passes through
shared memory, where the two warpgroups' halves meet: of each tile's dQ, summed over all 128 keys, each makes one half,
and the copy engine adds it to an accumulator in global memory. Programs add in whatever order they come, so dQ's last
bits differ from run to run.

dQ is made one tile late. So the warpgroups may drift apart by most of a tile, and the matrix units work for one while
the other computes exponentials.

What it adds to, and the kernels before and after, are in dq_sum.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.attention.hopper import copy_pair, make_barriers, program_id_again, store_rows, tiles_of
from trainstep.attention.hopper.backward_steps import (
    KEYS,
    ROWS,
    SCORES,
    STAGES,
    TILE_SIZE,
    add_dq,
    start_dq,
    step_of_64,
    step_of_128,
    store_dq,
)
from trainstep.attention.hopper.dq_sum import (
    SUM_ROWS,
    SUMMANDS,
    empty_statistic,
    launch_finish,
    launch_prepare,
    padded_rows,
    statistic_tiles,
)
from trainstep.attention.triton import SIZES, Launch, Launcher, kernel_arguments, tile_and_head
from trainstep.attention.tuned import hopper_block_of


@gluon.jit
def _load(copies, BLOCK_D: gl.constexpr):
    """The producer warp: the program's keys and values once, then each step's queries with all that belongs to them."""
    (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, shared, own_full,
     batch, kv_head, batch_kv_head, group, first_key, first_tile, n_tiles, stat_rows) = copies  # fmt: skip
    k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, _ones, full, empty = shared[4:]
    copy_pair(k_desc, v_desc, batch, kv_head, first_key, k_tiles.index(0), v_tiles.index(0), own_full.index(0))
    TILE_ROWS: gl.constexpr = TILE_SIZE // BLOCK_D
    per_head = n_tiles - first_tile
    for step in range(group * per_head):
        member = step // per_head
        head = kv_head * group + member
        row = (first_tile + step % per_head) * TILE_ROWS
        slot = step % STAGES
        stat = (batch_kv_head * group + member) * stat_rows + row
        ready = full.index(slot)
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, 2 * q_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], ready, q_tiles.index(slot))
        _copy_statistic(lse_desc, stat, lse_tiles.index(slot), ready, BLOCK_D)
        tma.async_copy_global_to_shared(do_desc, [batch, head, row, 0], ready, do_tiles.index(slot))
        _copy_statistic(delta_desc, stat, delta_tiles.index(slot), ready, BLOCK_D)


@gluon.jit
def _copy_statistic(desc, row, tile, full, BLOCK_D: gl.constexpr):
    """Start copying what `prepare_dq_kernel` says of a step's queries; `full` awaits its bytes."""
    if BLOCK_D == 64:
        tma.async_copy_global_to_shared(desc, [row, 0], full, tile)
    else:
        tma.async_copy_global_to_shared(desc, [row], full, tile)


@gluon.jit
def _walk(
    dk, dv, place, shared, shift, from_tile, to_tile, head_place, own, scale_log2,
    MASKED: gl.constexpr, TAIL: gl.constexpr, IS_CAUSAL: gl.constexpr, INDEX: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q, Pᵀ dO and dS K over one head's tiles of queries from_tile, …, to_tile - 1.

    Before the tile `index` the program has walked index + shift of them, over all heads. head_place: where in the sum
    this consumer's first half of this head's dQ goes. place: where the half goes that is one tile late, -1 for none; so
    it is returned.
    """
    TILE_ROWS: gl.constexpr = TILE_SIZE // BLOCK_D
    for index in range(from_tile, to_tile):
        tile = index + shift
        start = index * TILE_ROWS
        if BLOCK_D == 64:
            dk, dv = step_of_128(dk, dv, place, shared, tile, start, own, scale_log2, MASKED, TAIL, IS_CAUSAL, INDEX)
        else:
            dk, dv = step_of_64(dk, dv, place, shared, tile, start, own, scale_log2, MASKED, TAIL, IS_CAUSAL, INDEX)
        place = head_place + index * (2 * SUM_ROWS)
    return dk, dv, place


@gluon.jit
def _keys_from(first_key, n_keys, IS_CAUSAL: gl.constexpr):
    """The numbers of 64 keys; causal: those past the end are seen by no query, so that one comparison says all."""
    keys = first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    if IS_CAUSAL:
        keys = gl.where(keys < n_keys, keys, 1 << 30)
    return keys


@gluon.jit
def _tile_again(results):
    """The program's (tile of keys, head), worked out where it stands: known from the start, they and what follows from
    them would take registers that the walks need."""
    tiles_per_head, all_kv_heads, heads_per_section = results[9:]
    return tile_and_head(program_id_again(), tiles_per_head, all_kv_heads, heads_per_section, LONGEST_LAST=False)


@gluon.jit
def _consume(
    INDEX: gl.constexpr, results, shared, own_full, sizes, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Keys first_key + 64 · INDEX … of this program, whose group's first query head is query_head of all."""
    (first_key, query_head, group, first_tile, clear_tile, tail_tile, n_tiles, stat_rows, n_keys, window, scale,
     scale_log2) = sizes  # fmt: skip
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    own = (_keys_from(first_key + INDEX * ROWS, n_keys, IS_CAUSAL), n_keys, window)
    mbarrier.wait(own_full.index(0), 0)
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, DK_LAYOUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, DK_LAYOUT)
    per_head = n_tiles - first_tile
    BLOCKS: gl.constexpr = BLOCK_D // 64  # blocks of the accumulator for 64 queries
    head_place = (query_head * stat_rows // ROWS * BLOCKS + INDEX) * SUM_ROWS
    place = gl.to_tensor(-1)
    for member in range(group):
        shift = member * per_head - first_tile
        dk, dv, place = _walk(
            dk, dv, place, shared, shift, first_tile, clear_tile, head_place, own, scale_log2,
            True, False, IS_CAUSAL, INDEX, BLOCK_D,
        )  # fmt: skip
        if window is None or BLOCK_D == 64:
            dk, dv, place = _walk(
                dk, dv, place, shared, shift, clear_tile, tail_tile, head_place, own, scale_log2,
                False, False, IS_CAUSAL, INDEX, BLOCK_D,
            )  # fmt: skip
        if window is not None:
            tile, _head = _tile_again(results)
            own = (_keys_from(tile * KEYS + INDEX * ROWS, n_keys, IS_CAUSAL), n_keys, window)
            dk, dv, place = _walk(
                dk, dv, place, shared, shift, tail_tile, n_tiles, head_place, own, scale_log2,
                True, True, IS_CAUSAL, INDEX, BLOCK_D,
            )  # fmt: skip
        head_place += stat_rows // ROWS * BLOCKS * SUM_ROWS
    if place >= 0:
        last = group * per_head - 1
        ds_full = shared[3]
        mbarrier.wait(ds_full.index(last % 2), (last // 2) & 1)
        store_dq(shared, warpgroup_mma_wait(0, [start_dq(shared, last % 2, INDEX, BLOCK_D)]), INDEX)
        add_dq(shared, place, INDEX)
    dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, kv_heads = results[:9]
    tile, batch_head = _tile_again(results)
    batch = (batch_head // kv_heads).to(gl.int64)
    kv_head = (batch_head % kv_heads).to(gl.int64)
    dk_ptr += batch * stride_dkb + kv_head * stride_dkh
    dv_ptr += batch * stride_dvb + kv_head * stride_dvh
    my_key = tile * KEYS + INDEX * ROWS
    # Both by way of the values' tile: keys may still be in the other consumer's last product.
    own_v = shared[5].index(0).reshape([KEYS, BLOCK_D]).slice(INDEX * ROWS, ROWS, 0)
    store_rows(dv_ptr, stride_dvn, own_v, dv, my_key, n_keys, HEAD_DIM, BLOCK_D)
    store_rows(dk_ptr, stride_dkn, own_v, dk * scale, my_key, n_keys, HEAD_DIM, BLOCK_D)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, acc_desc, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    tiles_per_head, all_kv_heads, kv_heads, group, n_queries, n_keys, stat_rows, heads_per_section, scale, scale_log2,
    window, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile, summed over the `group` query heads that read it, and its share of their dq.

    A window is causal, and there are as many keys as queries.
    """
    TILE_ROWS: gl.constexpr = TILE_SIZE // BLOCK_D
    program = gl.program_id(0)
    tile, batch_head = tile_and_head(program, tiles_per_head, all_kv_heads, heads_per_section, LONGEST_LAST=False)
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    first_key = tile * KEYS
    # Query tiles below first_tile see none of these keys; from clear_tile to tail_tile they see all of them.
    n_tiles = gl.cdiv(n_queries, TILE_ROWS)
    first_tile = gl.to_tensor(0)
    clear_tile = gl.to_tensor(0)
    if IS_CAUSAL:
        first_tile = gl.minimum(first_key // TILE_ROWS, n_tiles)
        clear_tile = gl.minimum(gl.cdiv(first_key + KEYS - 1, TILE_ROWS), n_tiles)
    if window is not None:
        n_tiles = gl.minimum(n_tiles, gl.cdiv(first_key + KEYS - 1 + window, TILE_ROWS))
        clear_tile = gl.minimum(clear_tile, n_tiles)
    if first_key + KEYS > n_keys:  # keys past the end have scores of 0, whose exponential may overflow
        clear_tile = n_tiles
    tail_tile = n_tiles  # from here on the window of some query begins after some of these keys
    if window is not None:
        if BLOCK_D == 64:
            tail_tile = gl.minimum(gl.maximum((first_key + window) // TILE_ROWS, clear_tile), n_tiles)
        else:  # all of the others: a third walk would take registers that there are not
            tail_tile = clear_tile

    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [1, 1, 1, KEYS, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, KEYS, BLOCK_D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, TILE_ROWS, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, TILE_ROWS, BLOCK_D], q_desc.layout)
    STATISTICS: gl.constexpr = [STAGES] + lse_desc.block_type.shape  # noqa: RUF005 - Triton knows no stars
    lse_tiles = gl.allocate_shared_memory(lse_desc.dtype, STATISTICS, lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(lse_desc.dtype, STATISTICS, lse_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [2 * TILE_ROWS // ROWS, KEYS, ROWS], DS_LAYOUT)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, SUM_ROWS, 256], acc_desc.layout)
    ones = lse_tiles  # above head_dim 64 nothing reads it
    if BLOCK_D == 64:
        ones = gl.allocate_shared_memory(gl.bfloat16, [ROWS, SUMMANDS], lse_desc.layout)
        ones.store(gl.full([ROWS, SUMMANDS], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])))
        fence_async_shared()
    own_full = make_barriers(1, 1)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    ds_full = make_barriers(2, 2)

    shared = (  # in this order: some take the first of them alone
        ds_tiles, dq_tiles, acc_desc, ds_full, k_tiles, v_tiles, q_tiles, do_tiles, lse_tiles, delta_tiles, ones,
        full, empty,
    )  # fmt: skip
    copies = (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, shared, own_full,
        batch, kv_head, batch_head, group, first_key, first_tile, n_tiles, stat_rows,
    )  # fmt: skip
    results = (
        dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
        kv_heads, tiles_per_head, all_kv_heads, heads_per_section,
    )  # fmt: skip
    sizes = (
        first_key, batch_head * group, group, first_tile, clear_tile, tail_tile, n_tiles, stat_rows, n_keys, window,
        scale, scale_log2,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (0, results, shared, own_full, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D)),
            (_consume, (1, results, shared, own_full, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D)),
            (_load, (copies, BLOCK_D)),
        ],
        [4, 1],
        [240, 24],
    )


def _products(kernel: Any, tensors: dict[str, Tensor], is_causal: bool, scale: float, window: int | None) -> Launch:
    block_d = hopper_block_of(tensors["q"].shape[-1])
    tile_rows = TILE_SIZE.value // block_d
    options: dict[str, Any] = {}
    for name, rows in {"q": tile_rows, "k": KEYS.value, "v": KEYS.value, "do": tile_rows}.items():
        options[f"{name}_desc"] = tiles_of(tensors[name], rows, block_d)
    for name in ("lse", "delta"):
        options[f"{name}_desc"] = statistic_tiles(tensors[name], tile_rows)
    acc, box = tensors["acc"], [SUM_ROWS.value, 256]
    options["acc_desc"] = TensorDescriptor(acc, acc.shape, acc.stride(), box, gl.NVMMASharedLayout(0, 32, 2))
    return kernel_arguments(
        kernel, tensors, KEYS.value, is_causal, scale, sum_bytes=4 * block_d, **options, BLOCK_D=block_d,
        stat_rows=padded_rows(tensors["q"].shape[2]), num_warps=4, window=window,
    )  # fmt: skip


launch_products = Launcher(backward_kernel, _products)
"""Tensors q, k, v, do, lse_out, delta, acc, dk, dv: adds to acc, fills dk and dv."""


def launch_backward(tensors: Sequence[Tensor], is_causal: bool, scale: float, window: int | None = None) -> None:
    """Fill the last three of the tensors q, k, v, o, do, lse, dq, dk, dv, head_dim up to 128.

    Takes 4 · BLOCK_D bytes for each query of each head meanwhile, their number rounded up to 128, and for its
    statistics 64 more up to head_dim 64, and 8 above.
    """
    q, k, v, o, do, lse, dq, dk, dv = tensors
    rows = q.shape[0] * q.shape[1] * padded_rows(q.shape[2])
    block_d = hopper_block_of(q.shape[-1])
    lse_out, delta = (empty_statistic(rows, block_d, dq.device) for _ in range(2))
    acc = torch.empty((rows * block_d // 256, 256), dtype=torch.float32, device=dq.device)
    launch_prepare((o, do, lse, lse_out, delta, acc), scale)
    launch_products((q, k, v, do, lse_out, delta, acc, dk, dv), is_causal, scale, window)
    launch_finish((dq, acc), scale)
