"""RMSNorm: a program per row forward; backward as many programs as fill the device, each with its rows.

With y = w · x̂ and x̂ = x / rms(x): dx = (w·dy - x̂ · mean(w·dy·x̂)) / rms(x), and dw = Σ over rows of dy·x̂. A program of
the backward adds up its rows' part of dw in float32; the parts are added outside, in an order that never changes.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton import Launch, Launcher
from trainstep.fused.triton import named_arguments, warps_for


@triton.jit(do_not_specialize=["eps"])
def rms_norm_forward_kernel(
    x_ptr, r_ptr, w_ptr, h_ptr, y_ptr, rstd_ptr, stride_x, stride_r, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """x, r (N, D), h, y (N, D) contiguous, rstd (N,) float32. Where ADD: h = x + r, and y is the norm of h."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + row * stride_r + columns, mask=mask, other=0.0).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row * D + columns, h, mask=mask)
        x = h.to(tl.float32)  # the norm is of what was stored
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * D + columns, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_backward_kernel(
    x_ptr, w_ptr, rstd_ptr, dy_ptr, dh_ptr, dx_ptr, dw_ptr, stride_x, stride_dy, stride_dh, n_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dx (N, D) contiguous, dw (programs, D) float32. Where ADD: dh (N, D), the gradient of the sum, is added to dx."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_D], tl.float32)
    for number in range(program, n_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = x * rstd
        scaled = w * dy
        dx = (scaled - normed * (tl.sum(normed * scaled, 0) / D)) * rstd
        if ADD:
            dx += tl.load(dh_ptr + row * stride_dh + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * D + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * normed
    tl.store(dw_ptr + program.to(tl.int64) * D + columns, dw, mask=mask)


def _forward(kernel: Any, tensors: dict[str, Tensor], eps: float, add: bool) -> Launch:
    n_rows, d = tensors["x"].shape
    return _of_rows(kernel, tensors, n_rows, d, add, eps=eps)


def _backward(kernel: Any, tensors: dict[str, Tensor], add: bool) -> Launch:
    n_rows, d = tensors["x"].shape
    return _of_rows(kernel, tensors, len(tensors["dw"]), d, add, n_rows=n_rows)


def _of_rows(kernel: Any, tensors: dict[str, Tensor], programs: int, d: int, add: bool, **named: Any) -> Launch:
    block = triton.next_power_of_2(d)
    return named_arguments(kernel, tensors, programs, D=d, BLOCK_D=block, ADD=add, num_warps=warps_for(block), **named)


launch_forward = Launcher(rms_norm_forward_kernel, _forward)
"""Tensors x, r, w, h, y, rstd; eps, whether to add. Without a sum r and h are any tensors of two dimensions, unread."""
launch_backward = Launcher(rms_norm_backward_kernel, _backward)
"""Tensors x, w, rstd, dy, dh, dx, dw; whether to add. dw has as many rows as there are to be programs."""
