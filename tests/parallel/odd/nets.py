"""The net that scenarios change one thing of."""

import torch
from torch import nn

from tests.parallel.odd.runs import WIDTH


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inner=16):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A first layer, blocks, a norm and a head."""

    block = Block

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rank = self.step = 0

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.norm(self.body(self.first(x))))


plain, plain_block = Net.forward, Block.forward


def net(*, forward=None, body=None, block=None, then=lambda net: None, **parts):
    """A net with one thing changed: its `forward(net, x)`, its `body(net, x)` or that of its blocks, a class or their
    `forward(block, x)`; with `parts`, made after its own, and `then(net)` at last."""

    class Changed(Net):
        def __init__(self):
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())
            then(self)

    Changed.forward, Changed.body = forward or Net.forward, body or Net.body
    if block is not None:
        Changed.block = block if isinstance(block, type) else type("Changed", (Block,), {"forward": block})
    return Changed


UNUSED = {"unused": True}
"""Settings of a wrapper that is told that some parameters may have no gradient."""
