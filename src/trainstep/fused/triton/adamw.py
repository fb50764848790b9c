"""AdamW over any number of tensors in one launch: a program for each piece of BLOCK numbers of any of them.

The tensors are found through tables of addresses, as torch's multi-tensor kernels find theirs. Everything is computed
in float32. What is stored in 16 bits is rounded to nearest, or where STOCHASTIC (bfloat16 only) up or down at random so
that the mean is exact: sixteen random bits are added below the last bit that is kept.
"""

from typing import Any

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _stored(x, random, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """x as TYPE; where STOCHASTIC rounded by the low sixteen bits of `random`, an int32."""
    if STOCHASTIC:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + (random & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where((bits & 0x7F800000) == 0x7F800000, x, rounded)  # infinities and NaN stay what they are
    return x.to(TYPE)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    table, owners, tensors,
    decay, rate, gain1, beta2, gain2, correction, eps, seed,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, P_STOCHASTIC: tl.constexpr, S_STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """table (6, tensors) int64: addresses of parameter, gradient and both states, size and first piece of each tensor;
    owners (pieces,) int32: whose each piece is.

    decay = 1 - lr · weight_decay; rate = lr / (1 - beta1^step); gain1 = 1 - beta1 and gain2 = 1 - beta2, which float32
    would not give exactly; correction = √(1 - beta2^step). P, G, S: the types of the parameters, the gradients and the
    states. seed: below 2^31, another for every step.
    """
    piece = tl.program_id(0)
    table += tl.load(owners + piece)
    p_ptr = tl.load(table).to(tl.pointer_type(P))
    g_ptr = tl.load(table + tensors).to(tl.pointer_type(G))
    m_ptr = tl.load(table + 2 * tensors).to(tl.pointer_type(S))
    v_ptr = tl.load(table + 3 * tensors).to(tl.pointer_type(S))
    size = tl.load(table + 4 * tensors)
    start = (piece - tl.load(table + 5 * tensors)) * BLOCK  # int64
    places = tl.arange(0, BLOCK)
    mask = places < size - start
    p_ptr += start + places
    g_ptr += start + places
    m_ptr += start + places
    v_ptr += start + places

    p = tl.load(p_ptr, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr, mask=mask, other=0.0).to(tl.float32)
    m = m + (g - m) * gain1
    v = v * beta2 + g * g * gain2
    p = p * decay - rate * (m / (tl.sqrt(v) / correction + eps))

    first = tl.zeros([BLOCK], tl.int32)
    second = first
    if P_STOCHASTIC or S_STOCHASTIC:
        key = (piece.to(tl.int64) << 31) ^ seed
        first, second, _, _ = tl.randint4x(key, tl.arange(0, BLOCK))
        first = first.to(tl.int32, bitcast=True)
        second = second.to(tl.int32, bitcast=True)
    tl.store(p_ptr, _stored(p, first, P, P_STOCHASTIC), mask=mask)
    tl.store(m_ptr, _stored(m, first >> 16, S, S_STOCHASTIC), mask=mask)
    tl.store(v_ptr, _stored(v, second, S, S_STOCHASTIC), mask=mask)


def launch_adamw(table: Any, owners: Any, scalars: tuple[float, ...], seed: int, **constants: Any) -> None:
    """`adamw_kernel` over the pieces of a table; `constants` by name, types as Triton's."""
    adamw_kernel[(len(owners),)](table, owners, table.shape[1], *scalars, seed, **constants, BLOCK=BLOCK, num_warps=4)
