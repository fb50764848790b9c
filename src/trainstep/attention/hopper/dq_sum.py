"""dQ's sum in float32, to which the programs of backward.py add: cleared before them, finished after them.

It holds each 64 x 64 block of dQ in the order in which threads hold it. The kernel before also computes what the
products need about each row; the kernel after scales, orders and rounds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.attention.triton import SIZES, Launch, Launcher, pointers_and_strides
from trainstep.attention.tuned import hopper_block_of

SUM_ROWS = gl.constexpr(16)  # a 64 x 64 block of the sum is passed around as [16, 256]
SUMMANDS = gl.constexpr(16)  # numbers for a row's statistic up to head_dim 64: what one product with ones adds up


@gluon.jit
def in_fragment_order(dq):
    """A 64 x 64 block in the order [chunk of 8 columns, warp, lane, 4 registers], as [16, 256].

    A matrix instruction's result gives each thread two neighbours in one row and the two eight rows below.
    """
    parts = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, half, row; chunk, column pair, column
    return parts.permute([3, 0, 2, 4, 1, 5]).reshape([SUM_ROWS, 256])


@triton.jit
def _store_statistic(pointer, rows, x, BLOCK_D: tl.constexpr):
    """x as float32, or as three numbers of 8 significant bits that add up to it, and zeros."""
    if BLOCK_D == 64:
        high = x.to(tl.bfloat16)
        rest = tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float32), 0.0)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        column = tl.arange(0, SUMMANDS)[None, :]
        summands = tl.where(column == 0, high[:, None], tl.where(column == 1, middle[:, None], low[:, None]))
        tl.store(pointer + rows[:, None] * SUMMANDS + column, tl.where(column < 3, summands, 0.0))
    else:
        tl.store(pointer + rows, x)


@triton.jit(do_not_specialize=SIZES)
def prepare_dq_kernel(
    o_ptr, do_ptr, lse_ptr, lse_out_ptr, delta_ptr, acc_ptr,
    stride_ob, stride_oh, stride_on, stride_dob, stride_doh, stride_don,
    heads, n_queries, stat_rows, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """-lse / scale, -delta = -rowsum(dO ∘ O) and zeros in dQ's accumulator, for 64 queries of one head.

    Up to head_dim 64 the first two are `SUMMANDS` each, bfloat16; above, float32.
    """
    tile = tl.program_id(0) % (stat_rows // 64)
    batch_head = (tl.program_id(0) // (stat_rows // 64)).to(tl.int64)
    rows = tile * 64 + tl.arange(0, 64)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < n_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    o_ptr += batch_head // heads * stride_ob + batch_head % heads * stride_oh
    do_ptr += batch_head // heads * stride_dob + batch_head % heads * stride_doh
    o = tl.load(o_ptr + rows.to(tl.int64)[:, None] * stride_on + dims[None, :], mask=mask, other=0.0)
    do = tl.load(do_ptr + rows.to(tl.int64)[:, None] * stride_don + dims[None, :], mask=mask, other=0.0)
    acc_ptr += (batch_head * stat_rows + tile * 64) * BLOCK_D
    tl.store(acc_ptr + tl.arange(0, 64 * BLOCK_D), tl.zeros([64 * BLOCK_D], tl.float32))
    # exp2(-inf) = 0: rows past the end, which the copy engine fills with zeros, add nothing anywhere.
    lse = tl.load(lse_ptr + batch_head * n_queries + rows, mask=rows < n_queries, other=float("inf"))
    _store_statistic(lse_out_ptr, batch_head * stat_rows + rows, -lse / scale, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    _store_statistic(delta_ptr, batch_head * stat_rows + rows, -delta, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def finish_dq_kernel(
    dq_ptr, acc_ptr, stride_dqb, stride_dqh, stride_dqn, heads, n_queries, stat_rows, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq = scale · accumulator, in dq's own order and dtype, for 64 queries of one head."""
    tile = tl.program_id(0) % (stat_rows // 64)
    batch_head = (tl.program_id(0) // (stat_rows // 64)).to(tl.int64)
    row = tl.arange(0, 64)
    dim = tl.arange(0, BLOCK_D)
    # See `in_fragment_order`.
    of_row = row // 16 * 128 + row % 8 * 16 + row // 8 % 2 * 2
    of_dim = dim // 64 * 4096 + dim % 64 // 8 * 512 + dim // 2 % 4 * 4 + dim % 2
    acc_ptr += (batch_head * stat_rows + tile * 64) * BLOCK_D
    dq = tl.load(acc_ptr + of_row[:, None] + of_dim[None, :]) * scale
    rows = tile * 64 + row
    dq_ptr += batch_head // heads * stride_dqb + batch_head % heads * stride_dqh
    tl.store(
        dq_ptr + rows.to(tl.int64)[:, None] * stride_dqn + dim[None, :],
        dq.to(dq_ptr.dtype.element_ty),
        mask=(rows < n_queries)[:, None] & (dim < HEAD_DIM)[None, :],
    )


def padded_rows(n_queries: int) -> int:
    """Rows of one head in the accumulator and the statistics: whole tiles of queries at either head_dim."""
    return triton.cdiv(n_queries, 128) * 128


def empty_statistic(rows: int, block_d: int, device: torch.device) -> Tensor:
    """Memory for a statistic of so many rows, as `prepare_dq_kernel` fills it."""
    if block_d == 64:
        return torch.empty((rows, SUMMANDS.value), dtype=torch.bfloat16, device=device)
    return torch.empty(rows, dtype=torch.float32, device=device)


def statistic_tiles(statistic: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of an `empty_statistic` in tiles of so many rows."""
    box = [rows, *statistic.shape[1:]]
    if statistic.ndim == 1:
        layout = gl.NVMMASharedLayout(0, 32, 1)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    return TensorDescriptor(statistic, statistic.shape, statistic.stride(), box, layout)


def _by_rows(kernel: Any, tensors: dict[str, Tensor], scale: float) -> Launch:
    """A program for each 64 rows; the first tensor has dq's shape."""
    batch, heads, n_queries, head_dim = next(iter(tensors.values())).shape
    stat_rows = padded_rows(n_queries)
    named = pointers_and_strides(kernel, tensors)
    named |= {"heads": heads, "n_queries": n_queries, "stat_rows": stat_rows, "scale": scale}
    named |= {"HEAD_DIM": head_dim, "BLOCK_D": hopper_block_of(head_dim), "num_warps": 4}
    return (batch * heads * stat_rows // 64,), named


launch_prepare = Launcher(prepare_dq_kernel, _by_rows)
"""Tensors o, do, lse, lse_out, delta, acc: fills the last three, for whole tiles of rows."""
launch_finish = Launcher(finish_dq_kernel, _by_rows)
"""Tensors dq, acc: fills dq."""
