"""Matrix products of tiles, with the rounding that float32 operands need before they go to tf32 matrix units."""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, accumulated in float32. PRECISION: "tf32" or "ieee", read for float32 operands only."""
    if a.dtype == tl.float32 and PRECISION == "tf32":
        a = _round_to_tf32(a)
        b = _round_to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _round_to_tf32(x):
    """The nearest number with ten bits of mantissa. The matrix unit only drops the other thirteen, which doubles the
    error and gives it a direction."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
