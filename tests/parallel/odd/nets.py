"""The net that scenarios change one thing of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parallel.odd.runs import WIDTH


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A first layer, blocks, a norm and a head; the models below change one thing of it."""

    block: type[nn.Module] = Block
    count = 4

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rank = self.step = 0

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.body(self.first(x))))


UNUSED = {"unused": True}
"""Settings of a wrapper that is told that some parameters may have no gradient."""
