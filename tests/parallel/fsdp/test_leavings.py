"""Which tensors are found where modules leave them."""

import collections
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

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
