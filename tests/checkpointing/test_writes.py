"""Compiled blocks that write to tensors: refused where their backward computes with these, and right otherwise."""

import pytest
import torch
from torch import nn

from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.recomputing import Checkpointing


class Block(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra
        self.fc, self.out, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.code, self.plain = nn.Parameter(torch.ones(8)), torch.ones(8)
        self.register_buffer("matrix", torch.ones(8, 8))
        self.generator, self.count = torch.Generator().manual_seed(3), 0

    def forward(self, x):
        x = torch.tanh(self.fc(x))
        return x + torch.tanh(self.out(x * self.extra(self, x)))


@torch.no_grad()
def codebook(block, x):
    block.code.mul_(0.5)
    return block.code.clone()


def matrix_through_data(block, x):
    block.matrix.data.mul_(0.5)
    return block.matrix.sum(0)


def plain_through_data(block, x):
    block.plain.data.mul_(0.5)
    return block.plain.clone()


@torch.no_grad()
def counts_in_a_buffer(block, x):
    block.matrix.add_(1)
    return 2.0


def normalizes(block, x):
    return block.norm(x.mT).mT


def draws(block, x):
    return torch.rand(8, generator=block.generator)


def counts(block, x):
    block.count += 1
    return block.count


def nothing(block, x):
    return 2.0


def trained(policy, extra, compiled):
    """Gradients of three steps, and what was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    module = nn.Sequential(nn.ModuleList(Block(extra) for _ in range(2)))
    module.forward = lambda x: module[0][1](module[0][0](x))
    for each in {"blocks": module[0], "model": [module], "off": []}[compiled]:
        each.compile(backend="aot_eager")
    Checkpointing(module, policy)
    seen = []
    for _ in range(3):
        module.zero_grad()
        module(torch.ones(3, 5, 8).cumsum(1)).square().mean().backward()
        seen += [each.grad for each in module.parameters() if each.grad is not None]
    counters = torch._dynamo.utils.counters
    return [*seen, *module.buffers()], (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


@pytest.mark.parametrize("compiled", ["blocks", "model"])
@pytest.mark.parametrize("policy", ["every-1", "selective"])
@pytest.mark.parametrize("extra", [nothing, normalizes, counts_in_a_buffer, draws, counts])
def test_compiled_blocks_are_right(extra, policy, compiled):
    expected, _ = trained("none", extra, "off")
    found, made = trained(policy, extra, compiled)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if extra not in (draws, counts):  # which the compiler leaves to Python
        assert made == trained("none", extra, compiled)[1]


@pytest.mark.parametrize("compiled", ["blocks", "model"])
@pytest.mark.parametrize(
    ("extra", "place"), [(codebook, "code"), (matrix_through_data, "matrix"), (plain_through_data, "plain")]
)
def test_compiled_blocks_that_compute_with_what_they_wrote_are_refused(extra, place, compiled):
    with pytest.raises(UnsupportedError, match=rf"0\.0 changes 0\.0\.{place} in place, and its compiled backward"):
        trained("every-1", extra, compiled)
