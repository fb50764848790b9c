"""Running statistics and the like, that a step changes: planted wrongs are caught, and right steps are right."""

import dataclasses
import itertools
import math
from functools import partial, partialmethod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.check import source_of, verdict_of
from tools.trust.planted.buffers import biased, momentum, moves, norms
from trainstep.base.config import StepConfig
from trainstep.check.buffers import NO_BUFFERS, apart
from trainstep.check.gradients import Rounding, compare
from trainstep.check.reference import Reference, gradients_at
from trainstep.checkpointing.policies import Policy
from trainstep.step.training_step import build_step
from trainstep.step.workload import Workload, WorkloadSource

pytestmark = pytest.mark.usefixtures("small_pool")

CPU = StepConfig(device="cpu")
FUSED = {"optimizer": "adamw-fused"}
"""What makes a step a changed one."""
BF16 = FUSED | {"precision": "bf16"}


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(dropout)

    def forward(self, x):
        return self.drop(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    """Two blocks with batch norm over 16 rows."""

    def __init__(self, make=Block):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([make(), make()]), nn.Linear(32, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def source(make=Net, change=lambda module: None, only_in=None, factor=1.0):
    """A model on rows of random numbers, with something done to it where the step is a changed one."""

    def build(step):
        torch.manual_seed(step.seed)
        module, rows = make(), torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
        if step.optimizer == "adamw-fused" and only_in in (None, step.precision):
            change(module)
        loss = lambda out, batch: factor * (out - 0.3).square().mean()  # noqa: E731
        return Workload(module, [(0.5 + rows[0],), (rows[1],)], loss, partial(torch.optim.AdamW, lr=1e-3))

    return WorkloadSource("normed", build)


def each_norm(act, hook="register_forward_pre_hook"):
    """Something that every batch norm does before or after it runs; `data` leaves no trace that backward looks for."""

    def acts(norm, inputs, *_):
        with torch.no_grad():
            act(norm, inputs[0].float())

    def change(module):
        for norm in norms(module):
            getattr(norm, hook)(acts)

    return change


after_each = partial(each_norm, hook="register_forward_hook")


def counts(norm, x):
    norm.num_batches_tracked += 1


def halves(norm, x):
    """The mean of half of the batch."""
    norm.running_mean.data += norm.momentum * (x[:8].mean(0) - x.mean(0))


def computed_again(module):
    """As torch's activation checkpointing does it."""
    for block in module.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def set_off(module):
    """They begin elsewhere."""
    for norm in norms(module):
        norm.running_mean += 0.3


WRONG = {
    "running statistics move twice": (each_norm(moves), "running_"),
    "blocks are computed again, statistics and all": (computed_again, "num_batches_tracked"),
    "they stand still": (momentum(0.0), "running_"),
    "another momentum": (momentum(0.13), "running_"),
    "the first layer's stand still": (momentum(0.0, slice(0, 1)), "blocks.0.norm.running_"),
    "the second layer's stand still": (momentum(0.0, slice(1, 2)), "blocks.1.norm.running_"),
    "a batch is counted twice": (each_norm(counts), "num_batches_tracked"),
    "the biased variance": (after_each(biased), "running_var"),
    "the mean of half the batch": (after_each(halves), "running_mean"),
    "other statistics to begin with": (set_off, "running_mean"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_buffer_is_caught(what):
    change, named = WRONG[what]
    verdict = verdict_of(source(change=change), **FUSED)
    assert not verdict.is_right
    assert str(verdict).startswith("buffer ")
    assert f"{named}" in str(verdict).split(" off by ")[0]
    assert verdict.gradients.gradient <= verdict.gradients.gradient_allowed, "nothing else shows it"


@pytest.mark.parametrize("what", WRONG)
def test_in_bf16_alone_it_is_caught_too(what):
    verdict = verdict_of(source(change=WRONG[what][0], only_in="bf16"), **BF16)
    assert verdict.float32.is_right
    assert str(verdict).startswith("buffer ")


def test_a_momentum_that_is_a_hundredth_off_is_caught_in_float32():
    verdict = verdict_of(source(change=momentum(0.101)), **BF16)
    assert verdict.gradients.is_right, "bf16 cannot show it"
    assert "in float32, buffer blocks." in str(verdict)


@pytest.mark.parametrize(
    ("change", "off"), [(each_norm(moves), 0.9), (momentum(0.0), 1.0), (momentum(0.13), 0.3), (momentum(0.2), 1.0)]
)
def test_the_error_is_that_of_the_change(change, off):
    plain, found = (build_step(source(change=each), config) for each, config in ((lambda _: None, CPU), (change, FAST)))
    batch = plain.next_batch()
    expected, own = gradients_at(plain, batch), gradients_at(found, batch)
    errors = {name: each.error / each.change for name, each in apart(own.buffers, expected.buffers)}
    assert len(errors) == 6
    for name, error in errors.items():
        assert error == pytest.approx(0.0 if "num" in name else off, rel=1e-3)


FAST = dataclasses.replace(CPU, **FUSED)


class ByFunction(Block):
    """The function on buffers of its own, which changes them without a trace."""

    def __init__(self):
        super().__init__()
        del self.norm
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("var", torch.ones(32))
        self.norm = lambda x: F.batch_norm(x, self.mean, self.var, training=True)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 16, 3, bias=False), nn.BatchNorm2d(16)

    def forward(self, x):
        return self.norm(self.convolution(x.view(16, 2, 4, 4))).flatten(1)


def channels_last(module):
    module.to(memory_format=torch.channels_last)


RIGHT = {
    "float32": (source(), FUSED),
    "bf16": (source(), BF16),
    "fp16": (source(), FUSED | {"precision": "fp16"}),
    "each block computed again": (source(), FUSED | {"checkpointing": "every-1"}),
    "selective, bf16": (source(), BF16 | {"checkpointing": "selective"}),
    "all computed again": (source(), FUSED | {"checkpointing": "every-1"}),
    "by the function": (source(partial(Net, ByFunction)), FUSED | {"checkpointing": "every-1"}),
    "channels last": (source(Images, channels_last), FUSED),
    "channels last, bf16": (source(Images, channels_last), BF16),
    "dropout": (source(partial(Net, partial(Block, 0.3))), FUSED),
    "dropout, computed again, bf16": (source(partial(Net, partial(Block, 0.3))), BF16 | {"checkpointing": "every-1"}),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_step_is_right(what):
    given, change = RIGHT[what]
    verdict = verdict_of(given, **change)
    assert verdict.is_right, str(verdict)
    assert verdict.gradients.gradient_allowed < 0.1


@pytest.mark.parametrize("change", [FUSED, BF16, FUSED | {"checkpointing": "every-1"}], ids=str)
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_a_right_step_is_right_compiled(monkeypatch, compiled, change):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    verdict = verdict_of(source(), compile=compiled, **change)
    assert verdict.is_right, str(verdict)


def test_a_wrong_step_is_wrong_compiled(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    assert "running_" in str(verdict_of(source(change=momentum(0.13)), compile="model", **FUSED))


def test_updates_in_backward_leave_buffers_alone(tmp_path):
    Policy(update_in_backward=True).save(tmp_path / "policy.json")
    change = FUSED | {"checkpointing": f"@{tmp_path / 'policy.json'}"}
    verdict = verdict_of(source(), **change)
    assert verdict.is_right, str(verdict)
    assert "running_" in str(verdict_of(source(change=momentum(0.0)), **change))


def test_what_several_passes_of_fp16_make_of_buffers_is_what_one_does():
    """Gradients of thousands overflow at the first scales that are tried."""
    verdict = verdict_of(source(factor=1e4), precision="fp16", **FUSED)
    assert verdict.is_right, str(verdict)


class Leaves(nn.Module):
    """A linear layer that leaves something in its buffers."""

    def __init__(self, buffers, leave):
        super().__init__()
        self.linear, self.leave = nn.Linear(32, 32), leave
        for name, value in buffers.items():
            self.register_buffer(name, value if value is None else value.clone())

    def forward(self, x):
        out = self.linear(x)
        with torch.no_grad():
            self.leave(self, out)
        return out


def draws(generator, module, out):
    module.noise.copy_(torch.randn(4, generator=generator))


def grows(module, out):
    module.cache = torch.cat([module.cache, out])


def makes_a_mask(module, out):
    module.mask = torch.ones(3) if module.mask is None else module.mask


def smallest(module, out):
    module.low = torch.minimum(module.low, out.amin(0))


def sends(module, out):
    """Counts elements by a digit that roundings decide."""
    module.counts += (out.double() * 1e8).round().remainder(2).sum().long()


def follows(module, out):
    module.average.lerp_(out.mean(0).float().to(module.average.dtype), 1e-6)


def turns(module, out):
    module.phase *= torch.complex(out.mean().float().cos(), out.mean().float().sin())


@pytest.mark.parametrize("change", [FUSED, BF16], ids=str)
@pytest.mark.parametrize(
    ("buffers", "leave"),
    [
        ({"noise": torch.zeros(4)}, partial(draws, torch.Generator())),
        ({"cache": torch.zeros(0, 32)}, grows),
        ({"mask": None}, makes_a_mask),
        ({"low": torch.full((32,), math.inf)}, smallest),
        ({"counts": torch.tensor(0)}, sends),
        ({"average": torch.full((32,), 3.0)}, follows),
        ({"phase": torch.ones(4, dtype=torch.complex64)}, turns),
        ({"bias": torch.full((3, 3), -math.inf).triu(1), "none": torch.tensor(math.nan)}, lambda *_: None),
    ],
    ids=["random", "grows", "made late", "from infinity", "by roundings", "hardly moves", "complex", "odd"],
)
def test_buffers_that_may_differ_are_not_called_wrong(buffers, leave, change):
    verdict = verdict_of(source_of(lambda: Leaves(buffers, leave)), **change)
    assert verdict.is_right, str(verdict)


def test_a_buffer_that_the_plain_step_does_not_repeat_is_left_out():
    generator = torch.Generator()
    reference = Reference(source_of(lambda: Leaves({"noise": torch.zeros(4)}, partial(draws, generator))), CPU)
    assert reference._unsteady == {"noise"}
    assert all(not place.gradients.buffers.after for place in reference.places)
    assert "noise" in reference.places[0].gradients.buffers.unchanged
    assert Reference(source(), CPU)._unsteady == frozenset()


@pytest.mark.parametrize(("apart", "is_compared"), [(1e-4, True), (1e-2, False)])
def test_what_sums_in_another_order_may_do_is_repeated(apart, is_compared):
    """On a GPU, between two builds."""
    builds = itertools.count()

    def make():
        moves = 1 + apart * (next(builds) % 2)
        return Leaves({"sums": torch.zeros(4)}, lambda module, _: module.sums.add_(moves))

    assert Reference(source_of(make), CPU)._unsteady == (frozenset() if is_compared else {"sums"})


def test_gradients_of_a_module_without_buffers_have_none():
    step = build_step(source_of(lambda: nn.Linear(32, 32)), CPU)
    assert gradients_at(step, step.next_batch()).buffers == NO_BUFFERS


def test_a_buffer_that_is_missing_is_wrong_where_its_module_is_there():
    def loses(module):
        for norm in norms(module):
            norm.running_mean = norm.running_var = None

    def renames(module):
        for block in module.blocks:
            block.add_module("another", nn.Identity())
            norm, block._modules["norm"] = block.norm, nn.Sequential(nn.Identity())
            block.norm.add_module("inside", norm)

    names = {"blocks.0.norm.inside": "blocks.0.norm", "blocks.1.norm.inside": "blocks.1.norm"}
    whole, without, renamed = (
        gradients_at(build_step(source(change=each), FAST), batch()) for each in (lambda _: None, loses, renames)
    )
    reference = gradients_at(build_step(source(), CPU), batch())
    assert compare(whole, reference, Rounding(), 1e-5).is_right
    found = compare(without, reference, Rounding(), 1e-5)
    assert "running_" in found.worst_name
    assert found.worst == math.inf
    assert not found.is_right
    assert {each.rpartition(".")[0] for each in renamed.buffers.after} == names.keys()
    assert [*apart(renamed.buffers, reference.buffers)] == []


def batch():
    return (torch.randn(16, 32, generator=torch.Generator().manual_seed(1)),)
