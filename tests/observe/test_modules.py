"""The search for models, among objects of all kinds: it never raises, and passes by what is no module of Python's."""

import pytest
import torch
from torch import nn

from trainstep.observe.hooks import Hooks
from trainstep.observe.lines import Lines
from trainstep.observe.steps import StepFinder


class Own(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 1))


class NeverBegun(nn.Module):
    def __init__(self):
        """Leave out `super().__init__()`."""


class Lies:
    __class__ = nn.Module

    def __getattribute__(self, name):
        if name == "__class__":
            return nn.Module
        raise RuntimeError("nobody may ask")


class Refuses(nn.Module):
    def __getattribute__(self, name):
        raise RuntimeError("nobody may ask")


class OwnParameters(Own):
    def parameters(self, recurse=True):
        raise RuntimeError("not to be called from outside")

    named_parameters = parameters


class Sealed(type):
    def __setattr__(cls, name, value):
        raise TypeError("nothing may be set")


class OfSealed(Own, metaclass=Sealed):
    pass


ODD = {
    "scripted": lambda: torch.jit.script(Own()),
    "traced": lambda: torch.jit.trace(Own(), torch.ones(1, 4)),
    "part of it scripted": lambda: nn.ModuleList([torch.jit.script(Own())]),
    "never begun": NeverBegun,
    "made without a call": lambda: Own.__new__(Own),
    "lies": Lies,
    "refuses": lambda: object.__new__(Refuses),
    "own parameters": OwnParameters,
    "sealed": OfSealed,
    "quantized": lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 1))),
    "its parts are none": lambda: _with(Own(), part=None),
}


def _with(module, **parts):
    module._modules |= parts
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_the_search_passes_odd_objects_by_and_finds_the_model_beside_them(name):
    odd, model = ODD[name](), Own()
    failures = []
    hooks = Hooks(StepFinder(lambda: 0.0, lambda step: None), Lines(lambda *line: None), on_failure=failures.append)
    try:
        hooks.roots.search()
        hooks.roots.search_deeper()
        hooks.finder.enter("data")
        call(model)
        assert any(each is model for each in hooks.roots.called())
        assert not failures
    finally:
        hooks.remove()
    assert "__call__" not in vars(Own) | dict(vars(OwnParameters))
    del odd


def call(model):
    return model(torch.ones(1, 4))
