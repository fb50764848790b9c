"""Rotary positions: a program turns all heads of queries and keys at one position of one sequence.

A block of both is under way at a time: the keys are asked for before the queries are written. The compiler knows the
number of heads, so where a block is all of them there is no loop.

The backward is the same kernel with the angles negated. What is read may be what is written.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.triton import Launch, Launcher
from trainstep.fused.triton import named_arguments

BLOCK_PAIRS = 2048
"""Pairs of queries, and as many of keys, that a program holds at a time at most."""


@triton.jit
def _pairs_of(ptr, stride, head, heads, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Pairs of heads [BLOCK_H] of one position, each HALF pairs: where the first of each pair is, and which there
    are."""
    features = tl.arange(0, BLOCK_HALF)[None, :]
    return ptr + head.to(tl.int64)[:, None] * stride + features, (head < heads)[:, None] & (features < HALF)


@triton.jit
def _load_pairs(first_ptr, mask, HALF: tl.constexpr):
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_turned(first_ptr, mask, first, second, cos, sin, HALF: tl.constexpr):
    dtype = first_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, oq_ptr, ok_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_oqb, stride_oqh, stride_oqn, stride_okb, stride_okh, stride_okn, stride_cos, stride_sin,
    sign,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """q, oq (batch, Q_HEADS, positions, 2 HALF), k, ok with K_HEADS; cos, sin (positions, HALF). sign: 1.0 or -1.0."""
    place = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    features = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + place * stride_cos + features, mask=features < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + place * stride_sin + features, mask=features < HALF, other=0.0).to(tl.float32)[None, :]
    sin *= sign
    q_ptr += batch * stride_qb + place * stride_qn
    k_ptr += batch * stride_kb + place * stride_kn
    oq_ptr += batch * stride_oqb + place * stride_oqn
    ok_ptr += batch * stride_okb + place * stride_okn
    for start in tl.static_range(0, Q_HEADS if Q_HEADS > K_HEADS else K_HEADS, BLOCK_H):  # max is no constant in 3.5
        head = start + tl.arange(0, BLOCK_H)
        queries, q_mask = _pairs_of(q_ptr, stride_qh, head, Q_HEADS, HALF, BLOCK_HALF)
        keys, k_mask = _pairs_of(k_ptr, stride_kh, head, K_HEADS, HALF, BLOCK_HALF)
        q_first, q_second = _load_pairs(queries, q_mask, HALF)
        k_first, k_second = _load_pairs(keys, k_mask, HALF)
        queries, q_mask = _pairs_of(oq_ptr, stride_oqh, head, Q_HEADS, HALF, BLOCK_HALF)
        keys, k_mask = _pairs_of(ok_ptr, stride_okh, head, K_HEADS, HALF, BLOCK_HALF)
        _store_turned(queries, q_mask, q_first, q_second, cos, sin, HALF)
        _store_turned(keys, k_mask, k_first, k_second, cos, sin, HALF)


def tile(heads: int, half: int) -> tuple[int, int]:
    """Heads in a block, of the more of queries and keys, and warps; those that were fastest on an H200."""
    block = min(triton.next_power_of_2(heads), max(1, BLOCK_PAIRS // triton.next_power_of_2(half)))
    return block, 4 if min(block, heads) * half <= 1280 else 8


def _by_position(kernel: Any, tensors: dict[str, Tensor], sign: float) -> Launch:
    q, k = tensors["q"], tensors["k"]
    batch, q_heads, positions, head_dim = q.shape
    half, k_heads = head_dim // 2, k.shape[1]
    block, warps = tile(max(q_heads, k_heads), half)
    strides = {
        f"stride_{name}{axis}": stride
        for name in ("q", "k", "oq", "ok")
        for axis, stride in zip("bhn", tensors[name].stride(), strict=False)
    }
    return named_arguments(
        kernel, tensors, positions, batch, **strides, sign=sign, Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_H=block, num_warps=warps,
    )  # fmt: skip


launch_rope = Launcher(rope_kernel, _by_position)
"""Tensors q, k, cos, sin, oq, ok; the sign of the angles."""
