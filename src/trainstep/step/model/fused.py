"""The built-in decoder's blocks by our fused operators: the same modules, parameters and shapes as `transformer`'s."""

from __future__ import annotations

from torch import Tensor

from trainstep.fused import rope
from trainstep.step.model.transformer import CausalSelfAttention, RotaryEmbedding, TransformerBlock


class FusedSelfAttention(CausalSelfAttention):
    """Queries and keys turned by one kernel."""

    def turned(self, q: Tensor, k: Tensor, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Not in place: selective checkpointing keeps the results of the products before."""
        return rope(q, k, rotary.cos, rotary.sin)


class FusedBlock(TransformerBlock):
    """With its rotary positions by our kernel."""

    attention_type = FusedSelfAttention
