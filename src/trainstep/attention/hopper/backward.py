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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.attention.hopper import (
    copy_pair,
    make_barriers,
    own_tile,
    program_id_again,
    release,
    store_rows,
    tile_of,
    tiles_of,
    wait_filled,
)
from trainstep.attention.hopper.dq_sum import SUM_ROWS, in_fragment_order, launch_finish, launch_prepare, padded_rows
from trainstep.attention.triton import SIZES, Launch, Launcher, kernel_arguments, tile_and_head
from trainstep.attention.tuned import hopper_block_of

ROWS = gl.constexpr(64)  # keys of one consumer, and queries of a slot of the ring
KEYS = gl.constexpr(128)  # keys of one program


@gluon.jit
def _load(copies, TILE_ROWS: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: the program's keys and values once, then each step's queries with all that belongs to them."""
    (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
     q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, own_full, full, empty,
     batch, kv_head, batch_kv_head, group, first_key, first_tile, n_tiles, stat_rows) = copies  # fmt: skip
    copy_pair(k_desc, v_desc, batch, kv_head, first_key, k_tiles.index(0), v_tiles.index(0), own_full.index(0))
    per_head = (n_tiles - first_tile) * (TILE_ROWS // ROWS)
    for step in range(group * per_head):
        member = step // per_head
        head = kv_head * group + member
        row = first_tile * TILE_ROWS + step % per_head * ROWS
        slot = step % STAGES
        stat = (batch_kv_head * group + member) * stat_rows + row
        ready = full.index(slot)
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, 2 * q_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], ready, q_tiles.index(slot))
        tma.async_copy_global_to_shared(lse_desc, [stat], ready, lse_tiles.index(slot))
        tma.async_copy_global_to_shared(do_desc, [batch, head, row, 0], ready, do_tiles.index(slot))
        tma.async_copy_global_to_shared(delta_desc, [stat], ready, delta_tiles.index(slot))


@builtin
def _tma_add(desc, coord, src, _semantic=None):
    """Start adding a tile of shared memory to global memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def _start_dq(k_tiles, ds_tiles, stage, INDEX: gl.constexpr, SUBS: gl.constexpr, BLOCK_D: gl.constexpr):
    """dS K in flight of this consumer's half of a tile: of two times 64 queries one, or half of the columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([ROWS, 64], gl.float32, LAYOUT)
    k_tile = own_tile(k_tiles, KEYS, BLOCK_D)
    if SUBS == 2:
        ds_tile = ds_tiles.index(stage * 2 + INDEX)
        k_part = k_tile
    else:
        ds_tile = ds_tiles.index(stage)
        k_part = k_tile.slice(INDEX * 64, 64, 1)
    return warpgroup_mma(ds_tile.permute([1, 0]), k_part, nothing, use_acc=False, is_async=True)


@gluon.jit
def _walk(
    dk, dv, place, k, v, k_tiles, v_tiles, acc_desc, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
    ds_full, full, empty, first_tile, n_tiles, first_row, first_place, keys, n_keys, window, scale_log2,
    MASKED: gl.constexpr, TAIL: gl.constexpr, IS_CAUSAL: gl.constexpr, INDEX: gl.constexpr, SUBS: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, DK_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q, Pᵀ dO and dS K over n_tiles tiles of SUBS · 64 queries from first_row on.

    place: where in the accumulator the half of dQ goes that is one tile late, -1 for none; so it is returned.
    """
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(0, S_LAYOUT))
    for offset in range(n_tiles):
        tile = first_tile + offset
        for sub in gl.static_range(SUBS):
            step = tile * SUBS + sub
            start = first_row + (offset * SUBS + sub) * ROWS
            slot = step % STAGES
            wait_filled(full, step, step + 1, STAGES)
            # Products that start from -lse / scale and -delta need neither subtracted afterwards.
            nothing = gl.zeros([ROWS, ROWS], gl.float32, S_LAYOUT)
            scores_t = nothing + lse_tiles.index(slot).load(gl.SliceLayout(0, S_LAYOUT))[None, :]
            dp_t = nothing + delta_tiles.index(slot).load(gl.SliceLayout(0, S_LAYOUT))[None, :]
            # Nothing is in flight: this only keeps the compiler from setting dp_t up after the first product.
            scores_t, dp_t = warpgroup_mma_wait(0, [scores_t, dp_t])
            q = tile_of(q_tiles, step, STAGES, ROWS, BLOCK_D)
            do = tile_of(do_tiles, step, STAGES, ROWS, BLOCK_D)
            if BLOCK_D == 128:  # known from the start, their addresses would take registers that the walks need
                k = own_tile(k_tiles, KEYS, BLOCK_D).slice(INDEX * ROWS, ROWS, 0)
                v = own_tile(v_tiles, KEYS, BLOCK_D).slice(INDEX * ROWS, ROWS, 0)
            scores_t = warpgroup_mma(k, q.permute([1, 0]), scores_t, is_async=True)
            dp_t = warpgroup_mma(v, do.permute([1, 0]), dp_t, is_async=True)
            scores_t = warpgroup_mma_wait(1, [scores_t])
            if MASKED:
                if not TAIL:
                    if IS_CAUSAL:
                        seen = (keys - start)[:, None] <= columns[None, :]
                    else:
                        seen = (keys < n_keys)[:, None]
                    scores_t = gl.where(seen, scores_t, float("-inf"))
                if window is not None:
                    in_window = (keys + (window - start))[:, None] > columns[None, :]
                    scores_t = gl.where(in_window, scores_t, float("-inf"))
            p_t = gl.exp2(scores_t * scale_log2)
            dv = warpgroup_mma(gl.convert_layout(p_t.to(do.dtype), A_LAYOUT), do, dv, is_async=True)
            dp_t = warpgroup_mma_wait(1, [dp_t])
            ds_t = (p_t * dp_t).to(q.dtype)
            ds_a = gl.convert_layout(ds_t, A_LAYOUT)
            ds_own = ds_tiles.index(tile % 2 * SUBS + sub).slice(INDEX * ROWS, ROWS, 0)
            if sub == 0:
                mbarrier.wait(ds_full.index((tile + 1) % 2), ((tile - 1) // 2) & 1, pred=tile > 0)
                dq = _start_dq(k_tiles, ds_tiles, (tile + 1) % 2, INDEX, SUBS, BLOCK_D)
                dk = warpgroup_mma(ds_a, q, dk, is_async=True)
                # What comes into ds_own's slot was in use until both consumers had made the dQ before this one.
                dv, dq = warpgroup_mma_wait(1, [dv, dq])
                ds_own.store(ds_t)
                tma.store_wait(0)
                dq_tiles.index(INDEX).store(in_fragment_order(dq))
                fence_async_shared()
                if SUBS == 1:
                    mbarrier.arrive(ds_full.index(tile % 2), count=1)
                if place >= 0:
                    _tma_add(acc_desc, [place, 0], dq_tiles.index(INDEX))
            else:
                dk = warpgroup_mma(ds_a, q, dk, is_async=True)
                ds_own.store(ds_t)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(tile % 2), count=1)
            dk, dv = warpgroup_mma_wait(0, [dk, dv])
            release(empty, step, STAGES)
        place = first_place + offset * (2 * SUM_ROWS)
    return dk, dv, place


@gluon.jit
def _consume(
    INDEX: gl.constexpr, tensors, sizes, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    SUBS: gl.constexpr, STAGES: gl.constexpr, OWN_REGS: gl.constexpr,
):  # fmt: skip
    """Keys first_key + 64 · INDEX … of this program, whose group's first query head is query_head of all."""
    (results, acc_desc, q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
     ds_full, own_full, full, empty) = tensors  # fmt: skip
    (first_key, query_head, group, first_tile, clear_tile, tail_tile, n_tiles, stat_rows, n_keys, window, scale,
     scale_log2) = sizes  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    keys = first_key + INDEX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    if IS_CAUSAL:  # keys past the end are seen by no query, so that one comparison says all
        keys = gl.where(keys < n_keys, keys, 1 << 30)
    mbarrier.wait(own_full.index(0), 0)
    k_tile = k_tiles.index(0).reshape([KEYS, BLOCK_D])
    own_k = k_tile.slice(INDEX * ROWS, ROWS, 0)
    own_v = v_tiles.index(0).reshape([KEYS, BLOCK_D]).slice(INDEX * ROWS, ROWS, 0)
    if OWN_REGS:
        k = own_k.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        v = own_v.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        k = own_k
        v = own_v
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, DK_LAYOUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, DK_LAYOUT)
    per_head = n_tiles - first_tile
    BLOCKS: gl.constexpr = BLOCK_D // 64  # blocks of the accumulator for 64 queries
    first_place = (query_head * stat_rows // ROWS * BLOCKS + INDEX) * SUM_ROWS
    place = gl.to_tensor(-1)
    for member in range(group):
        dk, dv, place = _walk(
            dk, dv, place, k, v, k_tiles, v_tiles, acc_desc, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles,
            dq_tiles, ds_full, full, empty, member * per_head, clear_tile - first_tile, first_tile * SUBS * ROWS,
            first_place + first_tile * (2 * SUM_ROWS), keys, n_keys, window, scale_log2,
            True, False, IS_CAUSAL, INDEX, SUBS, BLOCK_D, STAGES, S_LAYOUT, DK_LAYOUT,
        )  # fmt: skip
        if window is None or BLOCK_D == 64:
            dk, dv, place = _walk(
                dk, dv, place, k, v, k_tiles, v_tiles, acc_desc, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles,
                dq_tiles, ds_full, full, empty, member * per_head + clear_tile - first_tile, tail_tile - clear_tile,
                clear_tile * SUBS * ROWS, first_place + clear_tile * (2 * SUM_ROWS), keys, n_keys, window, scale_log2,
                False, False, IS_CAUSAL, INDEX, SUBS, BLOCK_D, STAGES, S_LAYOUT, DK_LAYOUT,
            )  # fmt: skip
        if window is not None:
            dk, dv, place = _walk(
                dk, dv, place, k, v, k_tiles, v_tiles, acc_desc, q_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles,
                dq_tiles, ds_full, full, empty, member * per_head + tail_tile - first_tile, n_tiles - tail_tile,
                tail_tile * SUBS * ROWS, first_place + tail_tile * (2 * SUM_ROWS), keys, n_keys, window, scale_log2,
                True, True, IS_CAUSAL, INDEX, SUBS, BLOCK_D, STAGES, S_LAYOUT, DK_LAYOUT,
            )  # fmt: skip
        first_place += stat_rows // ROWS * BLOCKS * SUM_ROWS
    if place >= 0:
        last = group * per_head - 1
        mbarrier.wait(ds_full.index(last % 2), (last // 2) & 1)
        dq = warpgroup_mma_wait(0, [_start_dq(k_tiles, ds_tiles, last % 2, INDEX, SUBS, BLOCK_D)])
        tma.store_wait(0)
        dq_tiles.index(INDEX).store(in_fragment_order(dq))
        fence_async_shared()
        _tma_add(acc_desc, [place, 0], dq_tiles.index(INDEX))
    # Where the results go is worked out only now: known from the start, it would take registers that the walks need.
    (dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
     kv_heads, tiles_per_head, all_kv_heads, heads_per_section) = results  # fmt: skip
    program = program_id_again()
    tile, batch_head = tile_and_head(program, tiles_per_head, all_kv_heads, heads_per_section, LONGEST_LAST=False)
    batch = (batch_head // kv_heads).to(gl.int64)
    kv_head = (batch_head % kv_heads).to(gl.int64)
    dk_ptr += batch * stride_dkb + kv_head * stride_dkh
    dv_ptr += batch * stride_dvb + kv_head * stride_dvh
    my_key = tile * KEYS + INDEX * ROWS
    # Both by way of own_v: own_k may still be in the other consumer's last product.
    store_rows(dv_ptr, stride_dvn, own_v, dv, my_key, n_keys, HEAD_DIM, BLOCK_D)
    store_rows(dk_ptr, stride_dkn, own_v, dk * scale, my_key, n_keys, HEAD_DIM, BLOCK_D)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, acc_desc, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    tiles_per_head, all_kv_heads, kv_heads, group, n_queries, n_keys, stat_rows, heads_per_section, scale, scale_log2,
    window, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    OWN_REGS: gl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile, summed over the `group` query heads that read it, and its share of their dq.

    A window is causal, and there are as many keys as queries.
    """
    SUBS: gl.constexpr = 128 // BLOCK_D  # slots of the ring that make a tile of queries
    TILE_ROWS: gl.constexpr = SUBS * ROWS
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
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_tiles = gl.allocate_shared_memory(q_desc.dtype, [2 * SUBS, KEYS, ROWS], DS_LAYOUT)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, SUM_ROWS, 256], acc_desc.layout)
    own_full = make_barriers(1, 1)
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    ds_full = make_barriers(2, 2)

    copies = (
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
        q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, own_full, full, empty,
        batch, kv_head, batch_head, group, first_key, first_tile, n_tiles, stat_rows,
    )  # fmt: skip
    results = (
        dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
        kv_heads, tiles_per_head, all_kv_heads, heads_per_section,
    )  # fmt: skip
    tensors = (
        results, acc_desc, q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
        ds_full, own_full, full, empty,
    )  # fmt: skip
    sizes = (
        first_key, batch_head * group, group, first_tile, clear_tile, tail_tile, n_tiles, stat_rows, n_keys, window,
        scale, scale_log2,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (0, tensors, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, SUBS, STAGES, OWN_REGS)),
            (_consume, (1, tensors, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_D, SUBS, STAGES, OWN_REGS)),
            (_load, (copies, TILE_ROWS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


TILES = {64: (4, False), 128: (2, False)}
"""head_dim's block → slots of the ring, and whether a consumer keeps its keys and values in registers."""


def _products(kernel: Any, tensors: dict[str, Tensor], is_causal: bool, scale: float, window: int | None) -> Launch:
    block_d = hopper_block_of(tensors["q"].shape[-1])
    stages, own_in_registers = TILES[block_d]
    options: dict[str, Any] = {}
    for name, rows in {"q": ROWS, "k": KEYS, "v": KEYS, "do": ROWS}.items():
        options[f"{name}_desc"] = tiles_of(tensors[name], rows.value, block_d)
    for name, box in {"lse": [ROWS.value], "delta": [ROWS.value], "acc": [SUM_ROWS.value, 256]}.items():
        t, layout = tensors[name], gl.NVMMASharedLayout(0, 32, len(box))
        options[f"{name}_desc"] = TensorDescriptor(t, t.shape, t.stride(), box, layout)
    return kernel_arguments(
        kernel, tensors, KEYS.value, is_causal, scale, sum_bytes=4 * block_d, **options, BLOCK_D=block_d,
        stat_rows=padded_rows(tensors["q"].shape[2]), STAGES=stages, OWN_REGS=own_in_registers, num_warps=4,
        window=window,
    )  # fmt: skip


launch_products = Launcher(backward_kernel, _products)
"""Tensors q, k, v, do, lse_out, delta, acc, dk, dv: adds to acc, fills dk and dv."""


def launch_backward(tensors: Sequence[Tensor], is_causal: bool, scale: float, window: int | None = None) -> None:
    """Tensors q, k, v, o, do, lse, dq, dk, dv, head_dim up to 128: fills the last three.

    Takes 4 · BLOCK_D + 8 bytes for each query of each head meanwhile, their number rounded up to 128.
    """
    q, k, v, o, do, lse, dq, dk, dv = tensors
    rows = q.shape[0] * q.shape[1] * padded_rows(q.shape[2])
    lse_out, delta = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(2))
    acc = torch.empty((rows * hopper_block_of(q.shape[-1]) // 256, 256), dtype=torch.float32, device=q.device)
    launch_prepare((o, do, lse, lse_out, delta, acc), scale)
    launch_products((q, k, v, do, lse_out, delta, acc, dk, dv), is_causal, scale, window)
    launch_finish((dq, acc), scale)
