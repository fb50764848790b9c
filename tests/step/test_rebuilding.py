import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.step import rebuilding
from trainstep.step.randomness import generator_states
from trainstep.step.rebuilding import Factory


class Built:
    def __init__(self, module, **others):
        self.module = module
        self.others = others


class Watching(TorchDispatchMode):
    """An instrument of others."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch):
    monkeypatch.setattr(rebuilding, "LEAST", 1)


def a_model():
    module = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 11, bias=False))
    nn.init.trunc_normal_(module[1].weight, std=0.02)
    module[3].weight.data.normal_(0.0, 0.5)
    module.register_buffer("noise", torch.randn(4))
    module.register_buffer("hidden", torch.empty(3).uniform_(), persistent=False)
    return module


def tied():
    module = a_model()
    module[3].weight = module[0].weight
    return Built(module)


def with_data():
    module = a_model()
    batch = torch.empty(5).normal_()  # in place, but no weight
    return Built(module, batch=batch, draw=torch.rand(3), numpys=np.random.rand(2), pythons=random.random())


def half_frozen_in_bf16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = a_model()
    finally:
        torch.set_default_dtype(torch.float32)
    module[0].weight.requires_grad_(False)
    return Built(module)


def cast():
    return Built(a_model().to(torch.bfloat16))


def initialised_from_another():
    module = a_model()
    with torch.no_grad():
        module[1].bias.copy_(module[1].weight.sum(1))
    return Built(module)


def everything(built):
    """All values of what was built, and where the generators are."""
    found = {name: each.clone() for name, each in [*built.module.named_parameters(), *built.module.named_buffers()]}
    others = {name: np.asarray(each) for name, each in built.others.items()}
    return found, others, (generator_states([]), random.getstate(), np.random.get_state()[1].tolist())


def check_alike(one, other):
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(value, other[0][name]) for name, value in one[0].items())
    assert all(np.array_equal(value, other[1][name]) for name, value in one[1].items())
    assert one[2] == other[2]


@pytest.mark.parametrize(
    ("make", "is_drawn"),
    [(tied, False), (with_data, False), (half_frozen_in_bf16, False), (cast, True), (initialised_from_another, True)],
)
def test_every_call_has_the_same_result_bit_for_bit(make, is_drawn):
    factory = Factory(make)
    first = everything(factory(3))
    for _ in range(3):
        check_alike(first, everything(factory(3)))
    assert (factory._known[3] is None) == is_drawn
    other = everything(factory(4))
    assert not all(torch.equal(value, other[0][name]) for name, value in first[0].items())
    check_alike(first, everything(factory(3)))


def test_from_the_third_call_on_no_weight_is_drawn(monkeypatch):
    factory = Factory(with_data)
    factory(0), factory(0)
    left_out = [fill.is_left_out for fill in factory._known[0].fills]
    assert left_out.count(False) == 1  # the batch
    assert left_out.count(True) == 7
    monkeypatch.setattr(rebuilding, "load", lambda module, state: None)
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", zero_first)
    monkeypatch.setattr(torch.nn.Embedding, "reset_parameters", zero_first)
    module = factory(0).module
    assert all(not module[place].weight.any() for place in (0, 1, 3))


def zero_first(module):
    """As torch initialises them, in memory that is all zero."""
    with torch.no_grad():
        for each in module.parameters():
            each.zero_()
    (nn.init.normal_ if isinstance(module, nn.Embedding) else nn.init.kaiming_uniform_)(module.weight)
    if getattr(module, "bias", None) is not None:
        nn.init.uniform_(module.bias)


@pytest.mark.parametrize(
    "derive",
    [
        lambda module: {"copy": module[1].weight.detach().clone()},
        lambda module: {"norm": module[1].weight.norm().item()},
        lambda module: {"equal": torch.equal(module[0].weight, module[0].weight + 1)},
        lambda module: {"of a part": module[1].weight[0].detach() * 2},
    ],
)
def test_weights_that_something_else_was_computed_from_are_drawn(derive):
    def make():
        module = a_model()
        return Built(module, **derive(module))

    factory = Factory(make)
    first = everything(factory(0))
    for _ in range(3):
        check_alike(first, everything(factory(0)))
    assert factory._known == {0: None}


@pytest.mark.parametrize("catches", [False, True])
def test_a_call_that_does_otherwise_is_begun_again(catches):
    calls = []

    def make():
        calls.append(0)
        module = a_model()
        if len(calls) > 2:
            try:
                nn.init.normal_(module[1].bias)
            except Exception:
                if not catches:
                    raise
        return Built(module)

    factory = Factory(make)
    factory(0), factory(0)
    third = everything(factory(0))
    assert len(calls) == 4  # the third twice
    check_alike(third, everything(factory(0)))
    assert len(calls) == 5


def test_other_shapes_are_begun_again():
    calls = []

    def make():
        calls.append(0)
        return Built(nn.Linear(4, 4 if len(calls) < 3 else 5))

    factory = Factory(make)
    factory(0), factory(0)
    assert factory(0).module.out_features == 5


def test_little_is_drawn_as_before(monkeypatch):
    monkeypatch.setattr(rebuilding, "LEAST", 10**6)
    factory = Factory(tied)
    for _ in range(3):
        factory(0)
    assert factory._known == {0: None}


def test_what_has_no_module_is_returned():
    factory = Factory(lambda: "nothing")
    assert [factory(0) for _ in range(3)] == ["nothing"] * 3


def test_nothing_is_kept_where_others_watch():
    factory = Factory(tied)
    for _ in range(3):
        with Watching():
            factory(0)
    assert factory._known == {}


def test_an_error_of_the_factory_is_its_own():
    calls = []

    def make():
        calls.append(0)
        if len(calls) == 3:
            raise ValueError("no data")
        return tied()

    factory = Factory(make)
    factory(0), factory(0)
    with pytest.raises(ValueError, match="no data"):
        factory(0)
