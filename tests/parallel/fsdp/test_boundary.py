"""What a call is given arrives as it was given, and backward is seen leaving it."""

import collections
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.workers import Workers
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed

Pair = collections.namedtuple("Pair", "x scale")


class _Block(nn.Module):
    """Computes with a pair that it finds in whatever it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.given = None

    def forward(self, *args, **kwargs):
        self.given = [type(each).__name__ for each in args], {key: type(each).__name__ for key, each in kwargs.items()}
        first, *rest = (*args, *kwargs.values())
        if isinstance(first, SimpleNamespace):
            first = vars(first)
        if not isinstance(first, torch.Tensor):
            first, *rest = first.values() if isinstance(first, dict) else first
        return self.linear(first) * rest[0]


class _Net(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.blocks, self.give = nn.ModuleList([_Block(), _Block()]), give

    def forward(self, x):
        scale = x.mean()
        for block in self.blocks:
            args, kwargs = self.give(x, scale)
            x = block(*args, **kwargs)
        return x


GIVEN = {
    "tensors": lambda x, scale: ((x, scale), {}),
    "and plain values": lambda x, scale: ((x, scale, None, 2, "mask", nn.Identity()), {"flag": True}),
    "by name": lambda x, scale: ((x,), {"scale": scale}),
    "all by name": lambda x, scale: ((), {"x": x, "scale": scale}),
    "a list": lambda x, scale: (([x, scale],), {}),
    "a named tuple": lambda x, scale: ((Pair(x, scale),), {"flag": None}),
    "a dict by name": lambda x, scale: ((), {"pair": {"x": x, "scale": scale}}),
    "an object": lambda x, scale: ((SimpleNamespace(x=x, scale=scale),), {}),
}


def _gradients(give, wrap):
    torch.manual_seed(0)
    net = _Net(give)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    outer = wrap(net)
    x = torch.randn(3, 4, requires_grad=True)
    outer(x).sum().backward()
    freed = None
    if outer is not net:
        freed = not any(group.is_gathered for group in outer._schedule.groups)
        outer.finish_gradient_synchronization()
    return [each.grad.clone() for each in (x, *outer.parameters())], [block.given for block in net.blocks], freed


def _all_ways(process):
    return {way: _gradients(give, FullyShardedDataParallel) for way, give in GIVEN.items()}


def test_arguments_of_every_form():
    with Workers(1) as one:
        (found,) = one.run(_all_ways)
    for way, give in GIVEN.items():
        expected, given, _ = _gradients(give, lambda net: net)
        gradients, given_sharded, freed = found[way]
        assert given_sharded == given, way
        assert all(map(torch.equal, gradients, expected)), way
        assert freed, way
