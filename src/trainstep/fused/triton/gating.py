"""SwiGLU: silu(gate) · up and its gradients, elementwise over rows of any stride, such as halves of one product."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton import Launch, Launcher
from trainstep.fused.triton import named_arguments

BLOCK = 1024


@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, y_ptr, stride_gate, stride_up, columns, blocks, BLOCK: tl.constexpr):
    """gate, up (N, F), y (N, F) contiguous; `blocks` programs a row."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    places = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = places < columns
    gate = tl.load(gate_ptr + row * stride_gate + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + places, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * columns + places, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, stride_gate, stride_up, stride_dy, columns, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate, dup (N, F) contiguous: dy · up · σ(g)(1 + g(1 - σ(g))) and dy · silu(g)."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    places = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = places < columns
    gate = tl.load(gate_ptr + row * stride_gate + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + places, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride_dy + places, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dgate_ptr + row * columns + places, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * columns + places, (dy * silu).to(dup_ptr.dtype.element_ty), mask=mask)


def _elementwise(kernel: Any, tensors: dict[str, Tensor]) -> Launch:
    rows, columns = tensors["gate"].shape
    blocks = triton.cdiv(columns, BLOCK)
    return named_arguments(kernel, tensors, rows * blocks, columns=columns, blocks=blocks, BLOCK=BLOCK, num_warps=4)


launch_forward = Launcher(swiglu_forward_kernel, _elementwise)
"""Tensors gate, up, y."""
launch_backward = Launcher(swiglu_backward_kernel, _elementwise)
"""Tensors gate, up, dy, dgate, dup."""
