"""Right training steps that a careless check would call wrong: odd models, and other ways to compute the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.trust.planted import table
from tools.trust.planted.step import MODEL, Change
from trainstep.base.config import StepConfig
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

Case = tuple[WorkloadSource, StepConfig, Change]


def built_in(change: Change, **base: Any) -> Case:
    """The built-in model, changed."""
    return builtin_source("toy", MODEL), StepConfig(**({"batch": 2, "context": 64, "device": "cpu"} | base)), change


def own(make: Callable[[], nn.Module], shape: tuple[int, ...], change: Change, *, integer: bool = False) -> Case:
    """A model of one's own on random data, trained towards zero."""

    def build(step: StepConfig) -> Workload:
        torch.manual_seed(step.seed)
        module = make()
        generator = torch.Generator().manual_seed(1)
        made = [
            torch.randint(64, shape, generator=generator) if integer else torch.randn(shape, generator=generator)
            for _ in range(3)
        ]
        return Workload(
            module=module,
            batches=[(one,) for one in made],
            loss=lambda result, batch: (result - 0.3).square().mean(),
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        )

    return WorkloadSource("own", build), StepConfig(device="cpu"), change


class Residual(nn.Module):
    """x + part(x)."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.part = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(x)


class Experts(nn.Module):
    """A mixture of experts: each token by the best two of four."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            weight = (weights * (chosen == index)).sum(-1, keepdim=True)
            found = found + weight * expert(x)
        return x + found


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(64, 32), Residual(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.mix(self.embedding(tokens)), self.embedding.weight)


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])  # type: ignore[no-any-return]


class Grouped(nn.Module):
    """Causal attention in which two query heads share a key head, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.pair, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.pair(x).unflatten(-1, (4, 8)).transpose(1, 2).chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A temperature, learned: a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(32, 32), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.temperature.exp() * self.linear(x)).softmax(-1) * 8


def mlp(*between: Callable[[], nn.Module], depth: int = 3) -> nn.Module:
    """Linear layers with something between them."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), *(make() for make in between))]
    return nn.Sequential(*layers, nn.Linear(32, 8))


def convolutions() -> nn.Module:
    """Convolutions with batch normalisation."""
    parts = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*parts, nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


BF16, SDPA, CHUNKED = {"precision": "bf16"}, {"attention": "sdpa"}, {"loss": "chunked"}
FUSED, EVERY = {"optimizer": "adamw-fused"}, {"checkpointing": "every-1"}
ROWS, TOKENS = (16, 12, 32), (4, 24)
RIGHT: dict[str, Case] = table(globals(), "RIGHT")
"""What it is → its workload, the plain configuration, and the change."""
