"""The product of the joined loss, in rows that are aligned whatever the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from trainstep.fused.triton.cross_entropy import ALIGNED


def logits_of(states: Tensor, weight: Tensor) -> Tensor:
    """states (N, D) by weight (V, D) → (N, V), its rows a multiple of `ALIGNED` apart."""
    logits = empty_logits(states, len(weight))
    return torch.mm(states, weight.T, out=logits)


def empty_logits(states: Tensor, n_vocab: int) -> Tensor:
    """Logits (N, V) that nothing was written to, in the dtype of states (N, D). What follows a row is theirs too."""
    return states.new_empty((len(states), width_of(n_vocab)))[:, :n_vocab]


def width_of(n_vocab: int) -> int:
    """How far rows of so many logits lie apart, in logits."""
    return -(-n_vocab // ALIGNED) * ALIGNED
