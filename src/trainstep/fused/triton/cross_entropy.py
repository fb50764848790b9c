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
"""Logits of a row that a thread reads at once: 16 bytes of them in 16 bits."""
BLOCKS = (8192, 4096, 2048, 1024)
"""Logits that a program may take at once."""


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, stride_logits, n_vocab, ignore_index,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """logits (N, V), targets (N,) int64, losses (N,) float32. Where GRADIENT, the logits become their gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    target = tl.load(targets_ptr + row)
    ignored = target == ignore_index
    known = (target >= 0) & (target < n_vocab)
    LANES: tl.constexpr = BLOCK // WIDTH
    places = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]

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


def _by_row(kernel: Any, tensors: dict[str, Tensor], ignore_index: int, gradient: bool) -> Launch:
    rows, n_vocab = tensors["logits"].shape
    block = block_for(n_vocab)
    return named_arguments(
        kernel, tensors, rows, n_vocab=n_vocab, ignore_index=ignore_index, GRADIENT=gradient, BLOCK=block,
        WIDTH=WIDTH, num_warps=warps_for(block),
    )  # fmt: skip


launch_loss = Launcher(cross_entropy_kernel, _by_row)
"""Tensors logits, targets, losses; the index to ignore, whether to write the gradient."""
