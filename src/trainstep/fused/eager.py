"""The oracles: each operator as its formula says, in plain PyTorch, in whatever floating-point dtype comes; and inputs.

Numbers of 16 bits are widened to float32 and rounded once, at the end; float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainstep.base.operators import Sizes

THETA = 10_000.0
"""Base of the rotary frequencies."""
Draw = Callable[..., Tensor]
"""Function of a shape: standard normal numbers that take a gradient."""


def rope_inputs(sizes: Sizes, tokens: int, draw: Draw) -> tuple[Tensor, ...]:
    """q, k as the products leave them, (1, tokens, heads, head_dim) in memory, and the tables of their angles."""
    shape = (1, tokens, sizes.heads, sizes.d_model // sizes.heads)
    q, k = (draw(*shape).detach().transpose(1, 2).requires_grad_() for _ in range(2))
    return q, k, *rotary_tables(tokens, shape[-1], THETA, q.device)


def rotary_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (S, K/2) in float32 of each position's angles, which grow with it; made in float64, so that late
    positions keep theirs."""
    half = head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64, device=device) / half
    places = torch.arange(positions, dtype=torch.float64, device=device)
    angles = torch.outer(places, theta**-exponents)  # (S, K/2)
    return angles.cos().float(), angles.sin().float()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (Su et al. 2021) of queries and keys (..., S, K): feature i is paired with i + K/2.

    cos, sin: (S, K/2) or longer, of each position's angles.
    """
    return turn(q, cos, sin), turn(k, cos, sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., S, K) turned by the angles of cos and sin, (S, K/2) or longer."""
    cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]
    first, second = _wide(x).chunk(2, dim=-1)  # (..., S, K/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def linear_cross_entropy_inputs(sizes: Sizes, tokens: int, draw: Draw) -> tuple[Tensor, ...]:
    """Hidden states, weights with the variance of a head's at its start, and ids."""
    weight = (draw(sizes.vocab_size, sizes.d_model).detach() * sizes.d_model**-0.5).requires_grad_()
    hidden = draw(tokens, sizes.d_model)
    generator = torch.Generator(hidden.device).manual_seed(3)
    return hidden, weight, torch.randint(sizes.vocab_size, (tokens,), device=hidden.device, generator=generator)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of hidden (..., D) times the transposed weight (V, D) against ids (...), the logits widened.

    Its "mean" over the targets that are not `ignore_index` (NaN, with gradients of 0, where all are), or its "sum".
    """
    logits = hidden.flatten(0, -2) @ weight.T
    return F.cross_entropy(_wide(logits), targets.flatten(), ignore_index=ignore_index, reduction=reduction)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
