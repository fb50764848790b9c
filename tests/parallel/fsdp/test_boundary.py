"""What a call is given arrives as it was given, backward is seen leaving it, and tensors left in modules are found."""

import collections
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.workers import Workers
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.fsdp.boundary import Leavings


@dataclass
class _Kept:
    loss: torch.Tensor
    name: str = "aux"
    more: list = field(default_factory=list)


LEFT = {
    "a tensor": lambda t: t,
    "a list": lambda t: [1, t],
    "a dict": lambda t: {"loss": t},
    "a kind of dict": lambda t: collections.OrderedDict(loss=t),
    "a deque": lambda t: collections.deque([t]),
    "a dataclass": _Kept,
    "lists in a dict": lambda t: {"losses": [None, [t]]},
}
BEFORE = [None, True, 1, 1.5, 1j, "", b"", {}, [], torch.float32, torch.device("cpu"), len, lambda: None, int]


@pytest.mark.parametrize("left", LEFT)
def test_what_an_attribute_becomes_is_found(left):
    """Whatever it was before, and at the next look too."""
    unit, nothing = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ((), {})
    leavings, tensor = Leavings(unit), torch.ones(3)
    for before in BEFORE:
        unit[1].aux = before
        assert list(leavings.tensors(nothing)) == []
        unit[1].aux = LEFT[left](tensor)
        (found,) = leavings.tensors(nothing)
        assert found is tensor
    unit[1].aux = None
    unit[1].register_buffer("count", tensor)
    (found,) = leavings.tensors(nothing)
    assert found is tensor
    del unit[1].count
    assert list(leavings.tensors(nothing)) == []


def test_what_a_call_was_given_to_write_into():
    leavings, tensor = Leavings(nn.Linear(2, 2)), torch.ones(3)
    plain = (torch.ones(2), nn.Linear(2, 2), None, 1, "a", torch.float32, {})
    assert list(leavings.tensors((plain, {"flag": True}))) == [], "a tensor given itself is no place to leave one"
    for args, kwargs in [(([tensor],), {}), ((1,), {"cache": {"k": tensor}}), ((SimpleNamespace(k=tensor),), {})]:
        (found,) = leavings.tensors((args, kwargs))
        assert found is tensor


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


@pytest.mark.distributed
def test_arguments_of_every_form():
    with Workers(1) as one:
        (found,) = one.run(_all_ways)
    for way, give in GIVEN.items():
        expected, given, _ = _gradients(give, lambda net: net)
        gradients, given_sharded, freed = found[way]
        assert given_sharded == given, way
        assert all(map(torch.equal, gradients, expected)), way
        assert freed, way


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, found, *, given):
        found.append(self.layer(x))
        assert given[0].dtype == torch.bfloat16
        given.append(x)
        return found[-1]


def _of_the_wrapper(process):
    """In another dtype: what stood there is as it was given, what is written is there."""
    sharded = FullyShardedDataParallel(Collecting(), compute_dtype=torch.bfloat16)
    found, x = [], torch.ones(3, 4)
    given = [x]
    output = sharded(x, found, given=given)
    return found[0] is output, given[0] is x, len(given), given[1].dtype


@pytest.mark.distributed
def test_the_wrappers_own_arguments_are_written_into(two):
    assert two.run(_of_the_wrapper) == 2 * [(True, True, 2, torch.bfloat16)]
