"""The small GPT of `slow.py` after the tour of docs/tour.md: attention and loss are one call each.

    trainstep analyze --workload examples.tour.fast:workload

What else makes it fast (bf16 autocast, compiled blocks, a fused optimizer) is applied from outside, as flags.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainstep import Workload

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 4096, 256, 2, 8, 512, 2


class Norm(nn.Module):
    """Layer normalisation, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return self.gain * (x - mean) / torch.sqrt(variance + 1e-5) + self.bias


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # (batch, heads, context, head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two layers with the tanh form of GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h**3))))


class Block(nn.Module):
    """Attention and feed-forward, each normalised first and added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.feed_forward = Norm(), Attention(), Norm(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Model(nn.Module):
    """Token ids (batch, context) → logits (batch, context, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, the mean over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def workload() -> Workload:
    """What `--workload` names: called anew for every setting that is measured."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (4, BATCH, CONTEXT + 1), generator=random)
    return Workload(
        module=Model(),
        batches=[(each[:, :-1], each[:, 1:]) for each in ids],
        loss=loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
    )
