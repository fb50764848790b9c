"""The same kernels for Hopper in Gluon, with explicit warp roles, for 16-bit inputs; here, what they share.

The gradients are made by one kernel (`backward`) or, the same bits every time, by two (`dq`, `dkdv`).

One producer warp streams tiles of two tensors (keys and values, or queries and output gradients) through a ring of
slots in shared memory; every consumer warpgroup reads every tile. A slot has two barriers: `full` completes when its
bytes have landed, `empty` when all consumers are done with it. Step n uses slot n % STAGES for the (n // STAGES)-th
time, and a barrier's phase alternates from one use to the next.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.attention.triton import Launch, kernel_arguments, owns_keys
from trainstep.attention.tuned import HopperTile, hopper_block_of


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that each complete a phase after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), ARRIVALS)
    return barriers


@gluon.jit
def copy_rows(desc, batch, head, row, tile, full):
    """Start copying one head's rows from `row` on into `tile` [1, 1, rows, BLOCK_D]; `full` awaits their bytes."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full, tile)


@gluon.jit
def copy_pair(desc_a, desc_b, batch, head, row, tile_a, tile_b, full):
    """The same rows of two tensors, under one barrier."""
    mbarrier.expect(full, 2 * desc_a.block_type.nbytes)
    tma.async_copy_global_to_shared(desc_a, [batch, head, row, 0], full, tile_a)
    tma.async_copy_global_to_shared(desc_b, [batch, head, row, 0], full, tile_b)


@gluon.jit
def refill(desc, batch, head, row, tiles, full, empty, step, STAGES: gl.constexpr):
    """Producer: put the rows from `row` on into the slot of `step`, once its consumers are done with what was there."""
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    copy_rows(desc, batch, head, row, tiles.index(slot), full.index(slot))


@gluon.jit
def refill_pair(desc_a, desc_b, batch, head, row, tiles_a, tiles_b, full, empty, step, STAGES: gl.constexpr):
    """`refill` for two tensors whose slots are filled and emptied together."""
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    copy_pair(desc_a, desc_b, batch, head, row, tiles_a.index(slot), tiles_b.index(slot), full.index(slot))


@gluon.jit
def wait_filled(full, step, n_steps, STAGES: gl.constexpr):
    """Consumer: wait until the slot of `step` holds its rows; there are none to wait for from n_steps on.

    Where this stands matters beyond its meaning. The wait is a loop, and the assembler does not move arithmetic
    across one, while it happily moves it across a wait for matrix products. So exponentials that should overlap a
    product in flight are kept before its wait by waiting here, between the two, for the next step's tile.
    """
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=step < n_steps)


@gluon.jit
def tile_of(tiles, step, STAGES: gl.constexpr, ROWS: gl.constexpr, BLOCK_D: gl.constexpr):
    """The slot of `step` as [ROWS, BLOCK_D]."""
    return tiles.index(step % STAGES).reshape([ROWS, BLOCK_D])


@gluon.jit
def release(empty, step, STAGES: gl.constexpr):
    """Consumer: the tile of `step` has been read."""
    mbarrier.arrive(empty.index(step % STAGES), count=1)


@gluon.jit
def program_id_again():
    """gl.program_id(0), read where it stands: what is computed from it is not kept in registers across a loop."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def own_tile(tiles, ROWS: gl.constexpr, BLOCK_D: gl.constexpr):
    """A program's only own tile as [ROWS, BLOCK_D], addressed where it stands: a wide tile has more matrix descriptors
    than there are uniform registers, and made before the loop, as the compiler would, they go to local memory."""
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return tiles.index(zero).reshape([ROWS, BLOCK_D])


@gluon.jit
def store_rows(pointer, stride, tile, value, first_row, n_rows, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """Store 64 rows of a result by way of `tile`'s shared memory, so that each thread stores 16 adjacent bytes."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    tile.store(value.to(tile.dtype))
    rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, WIDE))
    gl.store(
        pointer + rows.to(gl.int64)[:, None] * stride + dims[None, :],
        tile.load(WIDE),
        mask=(rows < n_rows)[:, None] & (dims < HEAD_DIM)[None, :],
    )


def on_hopper(
    kernel: Any, tensors: dict[str, Tensor], is_causal: bool, scale: float, tile: HopperTile, window: int | None = None
) -> Launch:
    """A launch as `triton.portable`, for 16-bit tensors whose rows are aligned to 16 bytes."""
    by_key, block_d = owns_keys(kernel), hopper_block_of(tensors["q"].shape[-1])
    options: dict[str, Any] = {"BLOCK_Q" if by_key else "BLOCK_K": tile.block}
    for name in {"q", "k", "v", "do"} & tensors.keys():
        rows = 64 if (name in ("k", "v")) == by_key else tile.block  # a consumer's own, or streaming past it
        options[f"{name}_desc"] = tiles_of(tensors[name], rows, block_d)
    if "stat" in tensors:
        options["stat_rows"] = tensors["stat"].shape[-1]
    if "window" in kernel.arg_names:
        options["window"] = window
    else:
        assert window is None, "a kernel that knows no window"
    consumers = 1 if by_key and block_d > 128 else tile.consumers  # there, two work on the same keys
    return kernel_arguments(
        kernel, tensors, 64 * consumers, is_causal, scale, **options, BLOCK_D=block_d, CONSUMERS=tile.consumers,
        STAGES=tile.stages, OWN_REGS=tile.own_in_registers, REGISTERS=tile.registers, num_warps=4,
    )  # fmt: skip


def tiles_of(t: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """A descriptor of (batch, heads, length, head_dim) in tiles of [1, 1, rows, block_d]."""
    shape, element = [1, 1, rows, block_d], gl.float16 if t.dtype == torch.float16 else gl.bfloat16
    return TensorDescriptor(t, t.shape, t.stride(), shape, gl.NVMMASharedLayout.get_default_for(shape, element))
