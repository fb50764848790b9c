"""Model FLOPs of the built-in Transformer: what the mathematics needs, whatever the implementation does.

A multiply-add counts as 2. Counted: every matrix product (attention projections, SwiGLU, head) and attention's two
products, causal attention with half of the S × S scores. Left out: norms, softmax, rotary positions, activation
functions, the embedding look-up, the optimizer, and whatever an implementation computes again (FlashAttention's
backward, activation checkpointing). Utilisation computed from this count is *model* FLOPs utilisation: a step that
recomputes gets no credit for it. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainstep.base.config import ModelConfig, StepMode

OMISSIONS = (
    "matrix products and the causal half of attention, backward as twice forward; without norms, softmax, rotary "
    "positions, activation functions, embedding, optimizer and recomputation"
)
"""A line for tables: what the count includes and leaves out."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass over a batch, by part."""

    projections: int  # query, key, value and output projections of all blocks
    feed_forward: int  # the three SwiGLU matrices of all blocks
    attention: int  # QKᵀ and PV of all blocks, causal half
    head: int  # the projection to the vocabulary

    @property
    def total(self) -> int:
        return self.projections + self.feed_forward + self.attention + self.head


def forward_flops(model: ModelConfig, batch: int, context: int) -> ForwardFlops:
    """FLOPs of one forward pass over `batch` sequences of `context` tokens.

    A product of (m × k) with (k × n) costs 2·m·k·n. Causal attention multiplies, for each query i, with the i + 1 keys
    up to itself: S(S + 1)/2 pairs of the S² — the exact half, diagonal included.
    """
    tokens = batch * context
    pairs = batch * context * (context + 1) // 2
    return ForwardFlops(
        projections=model.num_layers * 2 * tokens * 4 * model.d_model**2,
        feed_forward=model.num_layers * 2 * tokens * 3 * model.d_model * model.d_ff,
        attention=model.num_layers * 2 * 2 * pairs * model.d_model,
        head=2 * tokens * model.d_model * model.vocab_size,
    )


def attention_flops(
    batch: int, heads: int, n_queries: int, n_keys: int, head_dim: int, *, is_causal: bool, window: int | None = None
) -> int:
    """FLOPs of one attention forward: 4·B·H·Sq·Sk·D, half of it when causal (the convention of published tables).

    A causal window of W keys, as many keys as queries: W·S - W²/2 pairs of them, which is the same half where W is S.
    """
    full = 4 * batch * heads * n_queries * n_keys * head_dim
    if window is not None:
        return 2 * batch * heads * (2 * n_queries - window) * window * head_dim
    return full // 2 if is_causal else full


BACKWARD_OVER_FORWARD = 2
"""Each product y = x·W has two in backward: one for the gradient of x, one for that of W."""


def step_flops(model: ModelConfig, batch: int, context: int, mode: StepMode) -> int:
    """Model FLOPs of one step in the given mode (the optimizer's few FLOPs per parameter are left out)."""
    forward = forward_flops(model, batch, context).total
    return forward if mode == "forward" else forward * (1 + BACKWARD_OVER_FORWARD)
