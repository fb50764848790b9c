"""Bytes that one attention call needs: derived from what is alive, tested against what is measured.

Let T = batch · heads · seq · head_dim elements (one of q, k, v, o) and N = batch · heads · seq² scores, e bytes each.
The inputs q, k, v and the gradient of o are alive throughout: 4T.

Eager. Forward multiplies, scales, and takes the softmax; each step frees the one before, so two score matrices are
alive at once, and the probabilities P stay for backward. Backward holds P and dP and writes dS: three, and on a GPU
four, as CUDA's softmax backward first writes dP ∘ P. With a causal mask the masked scores take the place of the scaled
ones, and masks of a byte per score of one head are alive too.

Flash. No score matrix exists. Backward needs o and the log-sum-exp (one float32 per query), and adds the three
gradients and one more float32 per query (the row sums of dO ∘ O). Left out is the float32 sum of dQ that our backward
holds on Hopper where it need not be deterministic. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

STATISTIC_BYTES = 4
"""The log-sum-exp and the row sums are float32."""


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes, inputs and upstream gradient included."""

    before_backward: int
    """Alive between forward and backward."""
    peak: int
    """The most alive at once."""
    score_matrices: int
    """How many of them are alive at the peak."""


def eager_memory(
    batch: int, heads: int, seq: int, head_dim: int, element_bytes: int, *, is_causal: bool, on_gpu: bool
) -> AttentionMemory:
    """Memory of the eager oracle, forward and backward, self-attention."""
    tensor = batch * heads * seq * head_dim * element_bytes
    scores = batch * heads * seq**2 * element_bytes
    mask = seq**2 if is_causal else 0  # saved for backward
    before = 5 * tensor + scores + mask  # the inputs, o, and P
    forward = 4 * tensor + 2 * scores + 2 * mask
    in_backward = 4 if on_gpu else 3  # P, dP, dS, and on a GPU dP ∘ P
    backward = 6 * tensor + in_backward * scores + mask  # beside the inputs: o and dv
    return AttentionMemory(before, max(forward, backward), in_backward if backward > forward else 2)


def flash_memory(batch: int, heads: int, seq: int, head_dim: int, element_bytes: int) -> AttentionMemory:
    """Memory of a flash implementation, forward and backward, self-attention: linear in seq."""
    tensor = batch * heads * seq * head_dim * element_bytes
    statistics = batch * heads * seq * STATISTIC_BYTES
    before = 5 * tensor + statistics
    return AttentionMemory(before, before + 3 * tensor + statistics, 0)
