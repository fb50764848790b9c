"""Rotary positions: a program turns all heads of queries and keys at one position of one sequence.

The backward is the same kernel with the angles negated. What is read may be what is written.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton import Launch, Launcher
from trainstep.fused.triton import named_arguments, warps_for

BLOCK_HEADS = 16


@triton.jit
def _turn_heads(
    from_ptr, to_ptr, stride_from, stride_to, cos, sin, heads, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Turn `heads` heads of one position, each HALF pairs; the strides are from head to head."""
    features = tl.arange(0, BLOCK_HALF)
    for start in range(0, heads, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)
        mask = (head < heads)[:, None] & (features < HALF)[None, :]
        source = from_ptr + head.to(tl.int64)[:, None] * stride_from + features[None, :]
        target = to_ptr + head.to(tl.int64)[:, None] * stride_to + features[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        turned = (first * cos[None, :] - second * sin[None, :]).to(to_ptr.dtype.element_ty)
        turned_second = (second * cos[None, :] + first * sin[None, :]).to(to_ptr.dtype.element_ty)
        tl.store(target, turned, mask=mask)
        tl.store(target + HALF, turned_second, mask=mask)


@triton.jit(do_not_specialize=["positions"])
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, oq_ptr, ok_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_oqb, stride_oqh, stride_oqn, stride_okb, stride_okh, stride_okn, stride_cos, stride_sin,
    positions, q_heads, k_heads, sign,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """q, oq (batch, q_heads, positions, 2 HALF), k, ok with k_heads; cos, sin (positions, HALF). sign: 1.0 or -1.0."""
    program = tl.program_id(0)
    batch = (program // positions).to(tl.int64)
    place = (program % positions).to(tl.int64)
    features = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + place * stride_cos + features, mask=features < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + place * stride_sin + features, mask=features < HALF, other=0.0).to(tl.float32) * sign
    _turn_heads(
        q_ptr + batch * stride_qb + place * stride_qn, oq_ptr + batch * stride_oqb + place * stride_oqn,
        stride_qh, stride_oqh, cos, sin, q_heads, HALF, BLOCK_HALF, BLOCK_H,
    )  # fmt: skip
    _turn_heads(
        k_ptr + batch * stride_kb + place * stride_kn, ok_ptr + batch * stride_okb + place * stride_okn,
        stride_kh, stride_okh, cos, sin, k_heads, HALF, BLOCK_HALF, BLOCK_H,
    )  # fmt: skip


def warps(q_heads: int, half: int) -> int:
    """By the numbers that a program holds and that are no padding: two loads and two stores of each head's pairs."""
    return warps_for(4 * min(BLOCK_HEADS, q_heads) * half)


def _by_position(kernel: Any, tensors: dict[str, Tensor], sign: float) -> Launch:
    q, k = tensors["q"], tensors["k"]
    batch, q_heads, positions, head_dim = q.shape
    half = head_dim // 2
    strides = {
        f"stride_{name}{axis}": stride
        for name in ("q", "k", "oq", "ok")
        for axis, stride in zip("bhn", tensors[name].stride(), strict=False)
    }
    return named_arguments(
        kernel, tensors, batch * positions, **strides, positions=positions, q_heads=q_heads, k_heads=k.shape[1],
        sign=sign, HALF=half, BLOCK_HALF=triton.next_power_of_2(half), BLOCK_H=BLOCK_HEADS,
        num_warps=warps(q_heads, half),
    )  # fmt: skip


launch_rope = Launcher(rope_kernel, _by_position)
"""Tensors q, k, cos, sin, oq, ok; the sign of the angles."""
