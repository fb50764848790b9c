"""Random numbers of a step are compared as closely as they allow: dropout, compiled code, a model's own draws."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch.nn import functional as F

from tests.check import is_plain, source_of, verdict_of
from tools.trust.planted.step import BASE, BF16, PLAIN
from trainstep.base.config import StepConfig
from trainstep.check import dropout
from trainstep.check.step import RIGHT_UNCOMPILED, StepCheck
from trainstep.check.verdict import Deviation
from trainstep.step.workload import WorkloadSource

pytestmark = pytest.mark.usefixtures("small_pool")


@pytest.mark.parametrize(
    ("own", "reference", "are_counted"),
    [
        (BF16, {}, True),
        ({"precision": "fp16"}, {}, False),  # whose scaler may take several passes
        (BF16 | {"compile": "blocks"}, {}, False),  # whose dropout torch decomposes
        (BF16, {"precision": "fp16"}, False),
        (BF16, {"compile": "model"}, False),
    ],
)
def test_elements_that_are_dropped_are_counted_where_both_sides_are_eager(monkeypatch, own, reference, are_counted):
    asked, check = [], StepCheck(PLAIN, BASE)
    monkeypatch.setattr("trainstep.check.step.drops_otherwise", lambda *_, are_counted: asked.append(are_counted) or "")
    monkeypatch.setattr(check, "_build", lambda *_: None)
    monkeypatch.setattr(check, "_gradients", lambda *_: SimpleNamespace(drew=False))
    monkeypatch.setattr(check, "_hold_further", lambda step, reference, found: found)
    right = Deviation(0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, "w")
    held = SimpleNamespace(config=dataclasses.replace(BASE, **reference), compare=lambda *_: right)
    assert check._hold_without_dropout(dataclasses.replace(BASE, **own), held, 0)[0].is_right
    assert asked == [are_counted]


class Block(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.linear, self.last = nn.Linear(32, 32), last

    def forward(self, x):
        return self.last(F.gelu(self.linear(x)))


class OtherDropout(nn.Dropout):
    """Drops other elements of bf16 tensors, as on a GPU."""

    def forward(self, x):
        if x.dtype == torch.bfloat16:
            torch.rand(1)
        return super().forward(x)


def dropped(kind=nn.Dropout):
    return nn.Sequential(nn.Sequential(*(Block(kind(0.3)) for _ in range(2))))


class CompiledDropout(OtherDropout):
    """Draws other random numbers where it is compiled, unless it is told to draw eager code's."""

    def forward(self, x):
        if getattr(self, "is_compiled", False) and not inductor.fallback_random:
            torch.rand(1)
        return super().forward(x)


@pytest.fixture
def without_compiler(monkeypatch):
    def compile_nothing(module):
        for each in module.modules():
            each.is_compiled = True

    monkeypatch.setattr(nn.Module, "compile", compile_nothing)
    monkeypatch.setattr(dropout, "release_memory", lambda: None)  # there is no compiled code to drop


@pytest.mark.parametrize(
    ("change", "compared"),
    [
        ({"compile": "off", "optimizer": "sgd"}, "as it is"),
        ({"compile": "blocks"}, "with eager code's random numbers"),
        ({"compile": "off", "precision": "bf16"}, "without dropout"),
        ({"compile": "blocks", "precision": "bf16"}, "without dropout"),
    ],
    ids=str,
)
def test_dropout_is_compared_as_closely_as_its_random_numbers_allow(without_compiler, change, compared):
    source = source_of(lambda: dropped(CompiledDropout))
    found = verdict_of(source, **change)
    assert found.notes.get("compared", "as it is") == compared
    assert found.is_right
    assert found.gradients.gradient_allowed < 0.05
    wrong = source_of(lambda: dropped(CompiledDropout), scale=lambda step: 1.0 if is_plain(step) else 1.3)
    assert not verdict_of(wrong, **change).is_right


@pytest.mark.parametrize(
    "change", [{"optimizer": "sgd"}, {"precision": "bf16"}, {"compile": "blocks", "precision": "bf16"}], ids=str
)
@pytest.mark.parametrize("p", [0.5, 0.0])
def test_a_step_that_drops_otherwise_is_wrong(without_compiler, change, p):
    """Without dropout on both sides it is right, and so it was called."""

    def build(step):
        workload = source_of(dropped).build(step)
        for module in workload.module.modules() if not is_plain(step) else ():
            if isinstance(module, nn.Dropout):
                module.p = p
        return workload

    found = verdict_of(WorkloadSource("toy", build), **change)
    assert not found.is_right
    own = f"256 elements with p = {p:g}" if p else "nothing"
    assert str(found).endswith(f"drops from {own} in a pass, and the plain step from 256 elements with p = 0.3")


def test_compiled_code_tells_what_it_would_drop():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25))
    module.compile(fullgraph=True)
    with dropout.without_dropout() as seen:
        module(torch.randn(2, 8))
    assert seen.elements == {0.25: 0}


class OwnRandom(nn.Linear):
    """Leaves out rows that it draws itself; compiled it draws others, unless it is told to draw eager code's."""

    def forward(self, x):
        if getattr(self, "is_compiled", False) and not inductor.fallback_random:
            torch.rand(1)
        return super().forward(x) * (torch.rand(len(x), 1) > 0.3)


class OtherCompiled(nn.Linear):
    """Draws nothing, and is wrong where it is compiled as it is timed."""

    def forward(self, x):
        is_wrong = getattr(self, "is_compiled", False) and not inductor.fallback_random
        return super().forward(x) * (1.1 if is_wrong else 1.0)


def in_blocks(kind):
    return nn.Sequential(nn.Sequential(*(Block(kind(32, 32)) for _ in range(2))))


def test_what_a_compiled_model_draws_by_itself_is_compared_with_eager_code_s_numbers(without_compiler):
    source = source_of(lambda: in_blocks(OwnRandom))
    found = verdict_of(source, compile="blocks")
    assert (found.is_right, found.notes.get("compared"), found.gradients.note) == (
        True,
        "with eager code's random numbers",
        "",
    ), found
    wrong = source_of(lambda: in_blocks(OwnRandom), scale=lambda step: 1.0 if is_plain(step) else 1.3)
    wrong_too = verdict_of(wrong, compile="blocks")
    assert not wrong_too.is_right
    of_the_compiler = verdict_of(source_of(lambda: in_blocks(OtherCompiled)), compile="blocks")
    assert not of_the_compiler.is_right, "it draws nothing"
    assert str(of_the_compiler).endswith(f"({RIGHT_UNCOMPILED})")
    wrong_anyway = source_of(
        lambda: in_blocks(OtherCompiled), scale=lambda step: 1.3 if step.optimizer == "sgd" else 1.0
    )
    assert RIGHT_UNCOMPILED not in str(verdict_of(wrong_anyway, compile="blocks", optimizer="sgd"))


class OtherCompiledOnceTrained(nn.Linear):
    """Right with the weights that it starts from."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.first = self.weight.detach().clone()

    def forward(self, x):
        is_wrong = getattr(self, "is_compiled", False) and not torch.equal(self.weight, self.first)
        return super().forward(x) * (1.1 if is_wrong else 1.0)


def test_what_only_compiled_code_does_with_trained_weights_is_said_to_be_the_compilers(without_compiler):
    found = verdict_of(source_of(lambda: in_blocks(OtherCompiledOnceTrained)), compile="blocks")
    assert not found.is_right
    assert found.gradients.note == RIGHT_UNCOMPILED


def test_how_random_numbers_were_compared_is_told_of_both_precisions():
    """In float32 it draws as the plain step does, in bf16 it does not."""
    config = StepConfig(device="cpu", precision="bf16")
    _, verdict = StepCheck(source_of(lambda: dropped(OtherDropout)), StepConfig(device="cpu")).start(config)
    assert verdict.notes.get("compared", "as it is") == "without dropout"


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"precision": "bf16", "compile": "blocks"}], ids=str)
def test_dropout_on_a_gpu(change):
    found = verdict_of(source_of(dropped), device="cuda", **change)
    assert found.is_right, str(found)
    assert found.gradients.gradient_allowed < 0.05
