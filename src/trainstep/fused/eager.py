"""The oracles: each operator as its formula says, in plain PyTorch, in whatever floating-point dtype comes.

Numbers of 16 bits are widened to float32 and rounded once, at the end; float64 stays float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
