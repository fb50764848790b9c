"""Models in the shape in which others write them by hand: nanoGPT's, nanochat's with its compiled optimizer, an LSTM,
torch's own nn.TransformerEncoder. Shapes and habits are theirs, the code is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, width: int, heads: int, *, is_rotary: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.is_rotary = heads, is_rotary
        self.joint, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.joint(x).split(width, dim=2)
        )
        if self.is_rotary:
            assert rotary is not None
            q, k = (F.rms_norm(_turned(part, *rotary), part.shape[-1:]) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attn = _Attention(width, heads, is_rotary=False, dropout=0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Learned positions, a ModuleList inside a ModuleDict, tied embeddings, the loss inside."""

    def __init__(self, vocab: int, positions: int, width: int, *, layers: int, heads: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(positions, width),
                "h": nn.ModuleList(_GptBlock(width, heads) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """ids, targets (batch, length) → (logits, loss)."""
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


class _ChatBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = _Attention(width, heads, is_rotary=True)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(F.rms_norm(x, x.shape[-1:]), rotary)
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class NanoChat(nn.Module):
    """Rotary positions, normed queries and keys, squared ReLU, norms without weights, soft-capped logits."""

    def __init__(self, vocab: int, positions: int, width: int, *, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks = nn.ModuleList(_ChatBlock(width, heads) for _ in range(layers))
        self.residual_scales = nn.Parameter(torch.ones(layers))
        half = width // heads // 2
        angles = torch.outer(torch.arange(positions), 10_000 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) → logits."""
        rotary = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.rms_norm(self.embedding(ids), (self.embedding.embedding_dim,))
        for index, block in enumerate(self.blocks):
            x = block(self.residual_scales[index] * x, rotary)
        logits = self.head(F.rms_norm(x, x.shape[-1:])).float()
        return 15 * torch.tanh(logits / 15)


@torch.compile(dynamic=False, fullgraph=True)
def _adamw_step(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, rate: Tensor) -> None:
    mean.lerp_(grad, 0.1)
    square.lerp_(grad.square(), 0.05)
    corrected = (square / (1 - 0.95**step)).sqrt() + 1e-10
    weight.add_(mean / corrected * (-rate / (1 - 0.9**step)))


@torch.compile(dynamic=False, fullgraph=True)
def _muon_step(weights: Tensor, grads: Tensor, momentum: Tensor, rate: Tensor) -> None:
    """All matrices of one shape at once, (matrices, rows, columns), their update made orthogonal (Newton-Schulz)."""
    momentum.lerp_(grads, 0.05)
    x = grads.lerp(momentum, 0.95)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for _ in range(3):
        product = x @ x.mT
        x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
    weights.sub_(rate * x)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices that are alike in shape, AdamW for the rest, both compiled; scalars are 0-d CPU tensors."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        everything = list(parameters)
        shapes = sorted({p.shape for p in everything if p.ndim == 2 and 256 not in p.shape[:1]})
        matrices = [{"params": [p for p in everything if p.shape == shape], "kind": "muon"} for shape in shapes]
        others = [p for p in everything if p.shape not in shapes]
        super().__init__([{"params": others, "kind": "adamw"}, *matrices], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            weights, rate = group["params"], torch.tensor(group["lr"])
            if group["kind"] == "muon":
                state = self.state[weights[0]]
                stacked, grads = torch.stack(weights), torch.stack([p.grad for p in weights])
                momentum = state.setdefault("momentum", torch.zeros_like(grads))
                _muon_step(stacked, grads, momentum, rate)
                torch._foreach_copy_(weights, list(stacked.unbind()))
                continue
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state.update(step=torch.tensor(0.0), mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
                state["step"] += 1
                _adamw_step(weight, weight.grad, state["mean"], state["square"], state["step"], rate)


@torch.compile(fullgraph=True)
def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class _CompiledBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = _Attention(width, heads, is_rotary=False)
        self.mlp = _Mlp(width)
        self.mlp.compile(fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(_normed(x))
        return x + self.mlp(_normed(x))


class CompiledParts(nn.Module):
    """Parts compiled by the model's author: a function, and a submodule in place."""

    def __init__(self, vocab: int, positions: int, width: int, *, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(positions, width))
        self.blocks = nn.ModuleList(_CompiledBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) → logits."""
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LstmLanguageModel(nn.Module):
    """An embedding, two layers of LSTM, a head."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.recurrent = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) → logits."""
        return self.head(self.recurrent(self.embedding(ids))[0])


class EncoderLanguageModel(nn.Module):
    """nn.TransformerEncoder with a causal mask made in forward."""

    def __init__(self, vocab: int, positions: int, width: int, *, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) → logits."""
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.embedding(ids) + self.positions(places), mask=mask, is_causal=True))
