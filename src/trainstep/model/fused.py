"""The built-in decoder's blocks by our fused operators: the same modules, parameters and shapes as `transformer`'s."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainstep.fused import add_rms_norm, rms_norm, rope, swiglu
from trainstep.model.transformer import (
    NORM_EPS,
    CausalSelfAttention,
    Parts,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerBlock,
)


class FusedRMSNorm(RMSNorm):
    """RMSNorm by our kernels, also of a sum."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """(..., D) → (..., D); with a residual (..., D): the sum, and its norm."""
        if residual is None:
            return rms_norm(x, self.weight, NORM_EPS)
        return add_rms_norm(x, residual, self.weight, NORM_EPS)


class FusedSelfAttention(CausalSelfAttention):
    """Queries and keys turned by one kernel."""

    def turned(self, q: Tensor, k: Tensor, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Not in place: selective checkpointing keeps the results of the products before."""
        return rope(q, k, rotary.cos, rotary.sin)


class FusedSwiGLU(SwiGLU):
    """The elementwise part by our kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) → (B, S, D)."""
        return self.down(swiglu(self.gate(x), self.up(x)))


class FusedBlock(TransformerBlock):
    """The sum of the stream and attention joined with the norm after it."""

    norm, attention_type, feed_forward_type = FusedRMSNorm, FusedSelfAttention, FusedSwiGLU

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """(B, S, D) → (B, S, D)."""
        x, normed = self.feed_forward_norm(x, self.attention(self.attention_norm(x), rotary))
        return x + self.feed_forward(normed)


FUSED = Parts(FusedRMSNorm, FusedBlock)
