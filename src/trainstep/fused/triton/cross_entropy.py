"""Cross-entropy of rows of logits, and its gradient written over them: a program for each row.

A row that fits into a program's registers is read once. Of a wider one the first pass finds its largest logit and
Σ exp(logit - largest) together, the second writes the gradient, softmax(logits) - onehot(target). Both are over the
number of targets where a mean is wanted. Labels that are out of range make their row NaN, and nothing is read there.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton import Launch, Launcher
from trainstep.fused.triton import named_arguments, warps_for

ALIGNED = 16
"""Logits that rows lie a multiple of apart: reading 16 bytes at once, and matrix units' fastest products, need it."""
WIDTH = 8
"""Logits of a row that a thread holds at once, 16 bytes of them in 16 bits: they share one rescaling of its sum."""
BLOCKS = (8192, 4096, 2048, 1024)
"""Logits that a program may take at once, of a row that it reads twice."""
WHOLE = 10_240
"""Logits of a row that a program may hold in its registers: 40 in each of the threads of 8 warps. On an H200 that takes
0.91 of the time of reading it twice, and with more warps (16,384 and 32,000 logits) 1.07 and 1.48.
"""
TARGETS = 4096
"""Targets that the one program which counts them takes at once."""


@triton.jit(do_not_specialize=["n_targets", "ignore_index"])
def count_targets_kernel(
    targets_ptr, scales_ptr, fits_ptr, n_targets, n_vocab, ignore_index,
    MEAN: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """targets (N,) int64 → scales (3,) and fits (), int32: 1 where all are ignored or in the vocabulary.

    By scales a target's loss is multiplied, then its gradient as it is made, then the gradient in backward: 1 over the
    number of targets that are not ignored, or without MEAN 1. LATER: gradients in backward alone.
    """
    count = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_targets, BLOCK):
        places = start + tl.arange(0, BLOCK)
        target = tl.load(targets_ptr + places, mask=places < n_targets, other=ignore_index)
        counts = target != ignore_index
        count += counts.to(tl.int32)
        wrong += (counts & ((target < 0) | (target >= n_vocab))).to(tl.int32)
    tl.store(fits_ptr, (tl.sum(wrong, 0) == 0).to(tl.int32))
    total = tl.sum(count, 0)
    share = 1.0 / tl.maximum(total, 1).to(tl.float32) if MEAN else 1.0
    no_targets = (total == 0) & MEAN
    tl.store(scales_ptr, tl.where(no_targets, float("inf"), share))  # of which the mean is NaN
    tl.store(scales_ptr + 1, 1.0 if LATER else share)
    tl.store(scales_ptr + 2, share if LATER else 1.0)


@triton.jit
def _target_of(row, logits_ptr, targets_ptr, n_vocab, ignore_index):
    """The row's target, whether it is ignored, whether it is in the vocabulary, and its logit.

    To be asked before a sum over the warps, which all of them wait for: after it some may have written over the logit.
    """
    target = tl.load(targets_ptr + row)
    ignored = target == ignore_index
    known = (target >= 0) & (target < n_vocab)
    picked = tl.load(logits_ptr + target, mask=known & (target != ignore_index), other=float("nan")).to(tl.float32)
    return target, ignored, known, picked


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, scales_ptr, stride_logits, n_vocab, ignore_index,
    GRADIENT: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """logits (N, V), targets (N,) int64, losses (N,), scales (3,), both float32. Where GRADIENT, logits become theirs.

    PADDED: whether rows lie further apart than they are long. What is between them is read and written along, so that
    no thread has to ask for each logit by itself.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    scale = tl.load(scales_ptr)
    of_gradient = tl.load(scales_ptr + 1)
    target, ignored, known, picked = _target_of(row, logits_ptr, targets_ptr, n_vocab, ignore_index)
    LANES: tl.constexpr = BLOCK // WIDTH
    places = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]

    largest = tl.full([LANES], float("-inf"), tl.float32)  # of each lane
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, n_vocab, BLOCK):
        mask = places < stride_logits - start
        x = tl.load(logits_ptr + start + places, mask=mask, other=float("-inf")).to(tl.float32)
        if PADDED:
            x = tl.where(places < n_vocab - start, x, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # a lane that has seen nothing but -inf
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        largest = larger
    row_largest = tl.max(largest, 0)
    base = tl.where(row_largest == float("-inf"), 0.0, row_largest)
    log_sum = base + tl.log(tl.sum(total * tl.exp(largest - base), 0))
    tl.store(losses_ptr + row, tl.where(ignored, 0.0, log_sum - picked) * scale)

    if GRADIENT:
        wrong = tl.where(known, 0.0, float("nan"))
        for start in range(0, n_vocab, BLOCK):
            mask = places < stride_logits - start
            x = tl.load(logits_ptr + start + places, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.exp(x - log_sum) - tl.where(start + places == target, 1.0, 0.0) + wrong
            gradient = tl.where(ignored, 0.0, gradient * of_gradient)
            tl.store(logits_ptr + start + places, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ignore_index"])
def whole_row_cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, scales_ptr, stride_logits, n_vocab, ignore_index,
    GRADIENT: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """`cross_entropy_kernel` of rows whose FIRST and then at most REST logits a program holds, each exp computed once.

    FIRST < V <= FIRST + REST.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    scale = tl.load(scales_ptr)
    of_gradient = tl.load(scales_ptr + 1)
    target, ignored, known, picked = _target_of(row, logits_ptr, targets_ptr, n_vocab, ignore_index)
    first = tl.arange(0, FIRST)
    rest = FIRST + tl.arange(0, REST)
    x = tl.load(logits_ptr + first).to(tl.float32)
    y = tl.load(logits_ptr + rest, mask=rest < stride_logits, other=float("-inf")).to(tl.float32)
    if PADDED:
        y = tl.where(rest < n_vocab, y, float("-inf"))
    largest = tl.maximum(tl.max(x, 0), tl.max(y, 0))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    x = tl.exp(x - base)
    y = tl.exp(y - base)
    total = tl.sum(x, 0) + tl.sum(y, 0)
    tl.store(losses_ptr + row, tl.where(ignored, 0.0, base + tl.log(total) - picked) * scale)

    if GRADIENT:
        share = tl.where(known, of_gradient / total, float("nan"))
        dtype: tl.constexpr = logits_ptr.dtype.element_ty
        x = tl.where(ignored, 0.0, x * share - tl.where(first == target, of_gradient, 0.0))
        y = tl.where(ignored, 0.0, y * share - tl.where(rest == target, of_gradient, 0.0))
        tl.store(logits_ptr + first, x.to(dtype))
        tl.store(logits_ptr + rest, y.to(dtype), mask=rest < stride_logits)


def block_for(n_vocab: int) -> int:
    """The widest block that goes beyond a row by at most a sixteenth of it."""
    beyond = {block: -n_vocab % block for block in BLOCKS if block < 2 * n_vocab}
    fitting = [block for block, over in beyond.items() if over <= n_vocab / 16]
    if fitting:
        return fitting[0]
    return min(beyond, key=beyond.__getitem__, default=max(WIDTH, triton.next_power_of_2(n_vocab)))


def halves(n_vocab: int) -> tuple[int, int]:
    """A row's length as the powers of two FIRST, below it, and REST, at least what is left of it."""
    first = triton.next_power_of_2(n_vocab) // 2
    return first, triton.next_power_of_2(n_vocab - first)


def is_whole(n_vocab: int) -> bool:
    """True if a program holds a row of so many logits at once, and by at most a sixteenth of it more than that."""
    return 1 < n_vocab <= WHOLE and 16 * sum(halves(n_vocab)) <= 17 * n_vocab


def kernel_for(n_vocab: int) -> Any:
    """The kernel for rows of so many logits."""
    return whole_row_cross_entropy_kernel if is_whole(n_vocab) else cross_entropy_kernel


def layout(n_vocab: int, stride: int) -> tuple[dict[str, Any], int]:
    """The constants of `kernel_for` rows of so many logits that lie `stride` apart, and its warps."""
    is_padded = {"PADDED": stride != n_vocab}
    if is_whole(n_vocab):
        first, rest = halves(n_vocab)
        return is_padded | {"FIRST": first, "REST": rest}, warps_for((first + rest) // 2)
    block = block_for(n_vocab)
    return is_padded | {"BLOCK": block, "WIDTH": WIDTH}, warps_for(2 * block)


def _by_row(kernel: Any, tensors: dict[str, Tensor], ignore_index: int, gradient: bool) -> Launch:
    rows, n_vocab = tensors["logits"].shape
    constants, warps = layout(n_vocab, tensors["logits"].stride(0))
    return named_arguments(
        kernel, tensors, rows, n_vocab=n_vocab, ignore_index=ignore_index, GRADIENT=gradient, num_warps=warps,
        **constants,
    )  # fmt: skip


def _counted(
    kernel: Any, tensors: dict[str, Tensor], n_vocab: int, ignore_index: int, is_mean: bool, later: bool
) -> Launch:
    return named_arguments(
        kernel, tensors, 1, n_targets=len(tensors["targets"]), n_vocab=n_vocab, ignore_index=ignore_index,
        MEAN=is_mean, LATER=later, BLOCK=TARGETS, num_warps=8,
    )  # fmt: skip


launch_targets = Launcher(count_targets_kernel, _counted)
"""Tensors targets, scales, fits; the vocabulary's size, the index to ignore, whether a mean is wanted, and LATER."""
_LAUNCHERS = {each: Launcher(each, _by_row) for each in (cross_entropy_kernel, whole_row_cross_entropy_kernel)}


def launch_loss(tensors: tuple[Tensor, Tensor, Tensor, Tensor], ignore_index: int, gradient: bool) -> None:
    """Tensors logits, targets, losses, scales; the index to ignore, whether to write the gradient."""
    _LAUNCHERS[kernel_for(tensors[0].shape[1])](tensors, ignore_index, gradient)
