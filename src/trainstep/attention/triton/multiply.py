"""Matrix products of tiles, at the precision that float32 is to have.

"tf32x3": each float32 is a sum of two TF32 numbers, big + small, and big·big + big·small + small·big leaves out less
than float32 rounds off (Ootomo & Yokota 2022, after Markidis et al. 2018), on matrix units. "ieee" uses ordinary cores.
"""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, accumulated in float32. PRECISION: "tf32", "tf32x3" or "ieee", read for float32 operands only."""
    if a.dtype == tl.float32 and PRECISION == "tf32":
        a = _round_to_tf32(a)
        b = _round_to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _round_to_tf32(x):
    """The nearest number with ten bits of mantissa. The matrix unit only drops the other thirteen, which doubles the
    error and gives it a direction."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # adding to the bits of a NaN may make a zero of it
