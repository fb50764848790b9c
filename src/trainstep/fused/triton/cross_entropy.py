"""Cross-entropy of rows of logits, and its gradient written over them: a program for each row.

The first pass over the row finds its largest logit and Σ exp(logit - largest) together, the second writes
softmax(logits) - onehot(target). Labels that are out of range make their row NaN, and nothing is read there.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton import Launch, Launcher
from trainstep.fused.triton import named_arguments, warps_for

WIDTH = 8
"""Logits of a row that a thread holds at once, 16 bytes of them in 16 bits: they share one rescaling of its sum."""
BLOCKS = (8192, 4096, 2048, 1024)
"""Logits that a program may take at once."""


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, stride_logits, n_vocab, ignore_index,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
):  # fmt: skip
    """logits (N, V), targets (N,) int64, losses (N,) float32. Where GRADIENT, the logits become their gradient.

    SIDE_BY_SIDE: whether a thread's logits are, as rows whose length Triton knows to be aligned allow to be read at
    once; otherwise each of them is beside those of other threads, which are read together.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    target = tl.load(targets_ptr + row)
    ignored = target == ignore_index
    known = (target >= 0) & (target < n_vocab)
    LANES: tl.constexpr = BLOCK // WIDTH
    if SIDE_BY_SIDE:
        places = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    else:
        places = tl.arange(0, LANES)[:, None] + tl.arange(0, WIDTH)[None, :] * LANES

    largest = tl.full([LANES], float("-inf"), tl.float32)  # of each lane
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, n_vocab, BLOCK):
        x = tl.load(logits_ptr + start + places, mask=places < n_vocab - start, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # a lane that has seen nothing but -inf
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        largest = larger
    row_largest = tl.max(largest, 0)
    base = tl.where(row_largest == float("-inf"), 0.0, row_largest)
    log_sum = base + tl.log(tl.sum(total * tl.exp(largest - base), 0))
    picked = tl.load(logits_ptr + target, mask=known & (target != ignore_index), other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(ignored, 0.0, log_sum - picked))

    if GRADIENT:
        wrong = tl.where(known, 0.0, float("nan"))
        for start in range(0, n_vocab, BLOCK):
            mask = places < n_vocab - start
            x = tl.load(logits_ptr + start + places, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.exp(x - log_sum) - tl.where(start + places == target, 1.0, 0.0) + wrong
            gradient = tl.where(ignored, 0.0, gradient)
            tl.store(logits_ptr + start + places, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


def block_for(n_vocab: int) -> int:
    """The widest block that goes beyond a row by at most a sixteenth of it."""
    beyond = {block: -n_vocab % block for block in BLOCKS if block < 2 * n_vocab}
    fitting = [block for block, over in beyond.items() if over <= n_vocab / 16]
    if fitting:
        return fitting[0]
    return min(beyond, key=beyond.__getitem__, default=max(WIDTH, triton.next_power_of_2(n_vocab)))


def layout(n_vocab: int, stride: int) -> tuple[dict[str, Any], int]:
    """The kernel's constants for rows of so many logits that lie `stride` apart, and its warps."""
    block = block_for(n_vocab)
    constants = {"BLOCK": block, "WIDTH": WIDTH, "SIDE_BY_SIDE": n_vocab % 16 == stride % 16 == 0}
    return constants, warps_for(2 * block)


def _by_row(kernel: Any, tensors: dict[str, Tensor], ignore_index: int, gradient: bool) -> Launch:
    rows, n_vocab = tensors["logits"].shape
    constants, warps = layout(n_vocab, tensors["logits"].stride(0))
    return named_arguments(
        kernel, tensors, rows, n_vocab=n_vocab, ignore_index=ignore_index, GRADIENT=gradient, num_warps=warps,
        **constants,
    )  # fmt: skip


launch_loss = Launcher(cross_entropy_kernel, _by_row)
"""Tensors logits, targets, losses; the index to ignore, whether to write the gradient."""
