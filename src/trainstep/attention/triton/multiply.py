"""Matrix products of tiles, at the precision that float32 is to have.

"tf32x3": each float32 is a sum of two TF32 numbers, big + small, and big·big + big·small + small·big leaves out less
than float32 rounds off (Ootomo & Yokota 2022, after Markidis et al. 2018). What is left is that matrix units round
their sums toward zero, so a sum over many terms drifts: longer ones are taken in parts, which are added in float32.
"""

import triton
import triton.language as tl

LONGEST_SUM = tl.constexpr(64)
"""Terms in one sum of a matrix unit where float32 is to be exact. Emulated with a rounding after every eight terms,
attention's errors reach 0.9 of float32's budget with sums of 64, 1.2 with 128 and 2.1 with 256. Measured on an H200
with sums of 64, the worst are 0.99 (dQ at head_dim 64), 0.74 (128) and 0.56 (256)."""


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, accumulated in float32. PRECISION: "tf32" or "tf32x3", read for float32 operands only."""
    if a.dtype == tl.float32:
        if PRECISION == "tf32x3" and a.shape[1] > LONGEST_SUM:
            a_even, a_odd = _halves(a)
            b_even, b_odd = _halves(tl.trans(b))
            acc = multiply(a_even, tl.trans(b_even), acc, PRECISION)
            return multiply(a_odd, tl.trans(b_odd), acc, PRECISION)
        if PRECISION == "tf32":
            a = _round_to_tf32(a)
            b = _round_to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _halves(x):
    """The even and the odd columns of x, which lie in one thread's registers as neighbours: nothing moves."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _round_to_tf32(x):
    """The nearest number with ten bits of mantissa. The matrix unit only drops the other thirteen, which doubles the
    error and gives it a direction."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # adding to the bits of a NaN may make a zero of it
