"""The built-in decoder (pre-norm RMSNorm, rotary positions, SwiGLU, untied head, no biases) and its loss.

Shapes in comments: B batch, S sequence, D d_model, H heads, K head_dim, F d_ff, V vocabulary, N = B·S tokens. Nothing
here knows of devices, precision or ranks; autocast, compilation and parallelism are applied from outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainstep.attention import attention
from trainstep.base.config import AttentionImpl, ModelConfig
from trainstep.fused import eager

NORM_EPS = 1e-5
CHUNK_TOKENS = 1024  # tokens whose logits are alive at once in the chunked loss


class RMSNorm(nn.Module):
    """x / rms(x) · weight (Zhang & Sennrich 2019), computed in float32 and returned in x's dtype."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → (..., D)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), NORM_EPS).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary positions (Su et al. 2021): turn feature pairs (i, i + K/2) by angles that grow with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, theta: float, max_context: int) -> None:
        super().__init__()
        self.theta = theta
        table = torch.empty(max_context, head_dim // 2, dtype=torch.float32)  # (S, K/2)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", table.clone(), persistent=False)

    def init_weights(self) -> None:
        """Fill the tables."""
        positions, half = self.cos.shape
        cos, sin = eager.rotary_tables(positions, 2 * half, self.theta, self.cos.device)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, x: Tensor) -> Tensor:
        """(..., S, K) → (..., S, K), turned in float32 and returned in x's dtype."""
        return eager.turn(x, self.cos, self.sin)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions on queries and keys."""

    def __init__(self, config: ModelConfig, impl: AttentionImpl) -> None:
        super().__init__()
        self.num_heads, self.impl = config.num_heads, impl
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.d_model, config.d_model, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """(B, S, D) → (B, S, D)."""
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, S, K)
            for projection in (self.query, self.key, self.value)
        )
        q, k = self.turned(q, k, rotary)
        mixed = attention(q, k, v, is_causal=True, impl=self.impl)  # (B, H, S, K)
        return self.output(mixed.transpose(1, 2).flatten(-2))

    def turned(self, q: Tensor, k: Tensor, rotary: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """q and k (B, H, S, K), each feature pair turned by its position's angle."""
        return rotary(q), rotary(k)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020), three matrices."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) → (B, S, D)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    attention_type = CausalSelfAttention

    def __init__(self, config: ModelConfig, impl: AttentionImpl) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = self.attention_type(config, impl)
        self.feed_forward_norm = RMSNorm(config.d_model)
        self.feed_forward = SwiGLU(config.d_model, config.d_ff)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """(B, S, D) → (B, S, D)."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """The decoder-only language model. Parameters are uninitialised until `init_weights`; see `build_transformer`."""

    def __init__(
        self, config: ModelConfig, impl: AttentionImpl = "eager", block: type[TransformerBlock] = TransformerBlock
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.max_context)
        self.blocks = nn.ModuleList(block(config, impl) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, *, return_hidden: bool = False) -> Tensor:
        """Token ids (B, S) → logits (B, S, V), or the normalised hidden states (B, S, D) that the head would take."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        x = self.norm(x)
        return x if return_hidden else self.head(x)

    def init_weights(self) -> None:
        """Initialise every parameter and buffer in place from torch's global random state; see `init_module`."""
        for module in self.modules():
            init_module(module)


def init_module(module: nn.Module) -> None:
    """Initialise the parameters and buffers that one module of the Transformer has itself.

    Matrices: normal with variance 2 / (fan_in + fan_out), cut at 3 standard deviations; embedding: standard normal cut
    at 3; norm gains: 1.
    """
    if isinstance(module, nn.Linear):
        std = (2 / (module.in_features + module.out_features)) ** 0.5
        nn.init.trunc_normal_(module.weight, std=std, a=-3 * std, b=3 * std)
    elif isinstance(module, nn.Embedding):
        nn.init.trunc_normal_(module.weight, a=-3, b=3)
    elif isinstance(module, RMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, RotaryEmbedding):
        module.init_weights()


def build_transformer(
    config: ModelConfig,
    *,
    impl: AttentionImpl = "eager",
    block: type[TransformerBlock] = TransformerBlock,
    device: torch.device | str = "cpu",
) -> Transformer:
    """A `Transformer` created directly on `device`, never on the host first; on "meta", shapes without storage.

    Weights come from torch's global random state: seed it for a reproducible model.
    """
    with torch.device("meta"):
        model = Transformer(config, impl, block)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights()
    return model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in float32 of logits (B, S, V) against token ids (B, S)."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def chunked_cross_entropy(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """The same loss from hidden states (B, S, D), applying `head` to slices of tokens; or its "sum" over tokens.

    Only one slice's logits (chunk_tokens × V) exist at a time; backward computes them again. That costs one more head
    product (2·N·D·V FLOPs) and saves the N × V logits and their gradient. Targets that are `ignore_index` count for
    nothing: where all are, the mean is NaN, with gradients of 0. Logits of float64 stay so.
    """

    def slice_sum(hidden_slice: Tensor, target_slice: Tensor) -> Tensor:
        logits = head(hidden_slice)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, target_slice, reduction="sum", ignore_index=ignore_index)

    states, ids = hidden.flatten(0, -2), targets.flatten()  # (N, D), (N,)
    slices = zip(states.split(chunk_tokens), ids.split(chunk_tokens), strict=True)
    total = sum(checkpoint(slice_sum, *pair, use_reentrant=False, preserve_rng_state=False) for pair in slices)
    return total / (ids != ignore_index).sum() if reduction == "mean" else total


def chunked_weight_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`chunked_cross_entropy` of a head's weight (V, D), as `bench fused` has it beside the fused loss."""
    return chunked_cross_entropy(hidden, lambda states: states @ weight.T, targets)
