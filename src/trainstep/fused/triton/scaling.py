"""A tensor times a number that is on the device, in place: where the number is 1, nothing is read or written."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton import Launch, Launcher
from trainstep.fused.triton import named_arguments

BLOCK = 8192
"""Numbers that a program takes at once."""
PROGRAMS = 1024
"""At most: some for each multiprocessor, and few enough to cost a microsecond or two where they do nothing."""


@triton.jit(do_not_specialize=["n"])
def scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    """x (N,), contiguous, factor () float32."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
            places = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + places, mask=places < n).to(tl.float32)
            tl.store(x_ptr + places, (x * factor).to(x_ptr.dtype.element_ty), mask=places < n)


def _by_block(kernel: Any, tensors: dict[str, Tensor]) -> Launch:
    n = tensors["x"].numel()
    return named_arguments(kernel, tensors, min(PROGRAMS, triton.cdiv(n, BLOCK)), n=n, BLOCK=BLOCK, num_warps=8)


launch_scale = Launcher(scale_kernel, _by_block)
"""Tensors x and factor."""
