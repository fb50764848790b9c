"""Next-token cross-entropy, with the logits in full or never in full.

Shapes: B batch, S sequence, D d_model, V vocabulary, N = B·S tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024
"""Tokens whose logits are alive at once in the chunked loss."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in float32 of logits (B, S, V) against token ids (B, S)."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def chunked_cross_entropy(
    hidden: Tensor, head: nn.Module, targets: Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """The same loss from hidden states (B, S, D), applying `head` to slices of tokens.

    Only one slice's logits (chunk_tokens × V) exist at a time; backward computes them again. That costs one more head
    product (2·N·D·V FLOPs) and saves the N × V logits and their gradient.
    """

    def slice_sum(hidden_slice: Tensor, target_slice: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden_slice).float(), target_slice, reduction="sum")

    states, ids = hidden.flatten(0, -2), targets.flatten()  # (N, D), (N,)
    slices = zip(states.split(chunk_tokens), ids.split(chunk_tokens), strict=True)
    total = sum(checkpoint(slice_sum, *pair, use_reentrant=False, preserve_rng_state=False) for pair in slices)
    return total / ids.numel()
