"""Steps that drop other elements than the plain one: right ones are accepted, wrong ones are caught, and by what."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.check import source_of
from tools.trust.planted.dropping import RIGHT
from trainstep.base.config import StepConfig
from trainstep.base.tolerance import REPEATS
from trainstep.check import draws
from trainstep.check.draws import DEVIATIONS, PAIRS, STEP, Draws, still_gradients
from trainstep.check.step import StepCheck
from trainstep.step.training_step import build_step

pytestmark = pytest.mark.usefixtures("small_pool")


@pytest.mark.parametrize("name", ["dropout drawn in bf16", "dropout drawn once more in backward"])
def test_a_right_dropout_with_other_masks_is_accepted(name):
    """Every one was called wrong: its gradients are others."""
    source, base, change = RIGHT[name]
    found = StepCheck(source, base).judge(dataclasses.replace(base, **change))
    assert found.is_right, str(found)
    assert found.notes["compared"] == "in eval mode"


def test_gradients_behind_dropout_by_hand_are_compared_in_eval_mode():
    source, base, change = RIGHT["dropout by hand"]

    def build(step):
        workload = source.build(step)
        if step.optimizer != base.optimizer:
            workload.module[1].part[1].weight.register_hook(lambda gradient: gradient * 1.001)
        return workload

    found = StepCheck(dataclasses.replace(source, build=build), base).judge(dataclasses.replace(base, **change))
    assert not found.is_right
    assert "1.part.1.weight off by 0.001" in str(found)


UNFIT = 0.6 * STEP
VALUES = torch.stack([torch.tensor([9.0, 4.0, 1e-9, 1.0, 1e-9]) + 0.1 * (-1) ** n * torch.tensor([0, 1, 0, 1, 0])
                      for n in range(PAIRS)]).double()  # fmt: skip
ALL_RIGHT = Draws(UNFIT, ("the loss", "the norm of a", "the norm of b", "of c", "of d"), VALUES)
LEAST = DEVIATIONS * 0.1 * (2 / (PAIRS - 1)) ** 0.5
"""Distance of two such means that passes, but for a thousandth of the mean."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"unfit": 2 * UNFIT + STEP}, ""),
        ({"unfit": float("nan")}, "drops other elements in backward than in forward, or in two passes from one state"),
        ({"unfit": 2.4 * STEP}, "its gradient is 0.0023 of 0.0021 off the difference of its loss"),
        ((0, 9 * REPEATS - 1e-6), ""),
        (
            (0, -9 * REPEATS - 2e-6),
            "scales otherwise: the loss over 24 passes is -0.001 off the plain step's mean, inf",
        ),
        ((1, LEAST + 4 * REPEATS + 2e-6), ""),
        ((1, LEAST + 5 * REPEATS), "the norm of a over 24 passes is +0.087"),
        ((3, LEAST + 2 * REPEATS), "of c over 24 passes is +0.34"),
        ((4, 3.9 * REPEATS**2), ""),
        ((4, 4.1 * REPEATS**2), "of d over 24 passes"),
    ],
)
def test_a_fault_is_named(change, said):
    if isinstance(change, tuple):  # of a mean: its column, and by how much it is off
        column, off = change
        change = {"values": VALUES + off * torch.eye(5)[column]}
    found = dataclasses.replace(ALL_RIGHT, **change).fault(ALL_RIGHT)
    assert said in found
    assert bool(found) == bool(said)


def test_a_step_s_draws_and_weights_afterwards(monkeypatch):
    def made():
        module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.5))
        module[0].bias.requires_grad = False
        return module

    step = build_step(source_of(made), StepConfig(device="cpu"))
    before = {name: each.clone() for name, each in step.module.state_dict().items()}
    batch = step.next_batch()
    found = Draws.of(step, batch)
    assert found.names == ("the loss", "the norm of 0.weight", "the variance of 0.weight")
    passes = [draws.gradients_at(step, batch, number) for number in range(2 * PAIRS)]
    for row, one, other in zip(found.values.tolist(), passes[::2], passes[1::2], strict=True):
        a, b = (each.by_name["0.weight"] for each in (one, other))
        squares = [float(each.square().sum()) for each in (a, b, a - b)]
        assert row == pytest.approx([one.loss + other.loss, squares[0] + squares[1], squares[2]])
    assert found.unfit == max(draws._unfit(step, batch, number) for number in (0, 1, 2)) < STEP
    monkeypatch.setattr(draws, "_unfit", lambda step, batch, number: float(number))
    assert Draws.of(step, batch).unfit == 2.0
    assert all(torch.equal(value, before[name]) for name, value in step.module.state_dict().items())


@pytest.mark.parametrize("start", [0.0, -5.0])
@pytest.mark.parametrize(("factor", "unfit"), [(1.0, 0.0), (1.25, 0.2), (0.0, 0.0)])
def test_a_gradient_is_held_against_the_difference_of_its_loss(start, factor, unfit):
    """The difference changes the loss by 2⁻¹⁰ of itself; the bias is used, and has a gradient of zero."""
    taken, module = [], nn.Linear(1, 1)
    module.weight.data.zero_()
    module.weight.register_hook(lambda gradient: gradient * factor)

    def loss(outputs, batch):
        found = 3 * module.weight.sum() + start + 0 * outputs.sum()
        taken.append(float(found))
        return found

    source = source_of(lambda: module)
    workload = dataclasses.replace(source.build(StepConfig()), batches=[(torch.zeros(1, 1),)], loss=loss)
    step = build_step(dataclasses.replace(source, build=lambda _: workload), StepConfig(device="cpu"))
    assert draws._unfit(step, step.next_batch(), 0) == pytest.approx(unfit, abs=1e-3)
    by = STEP / 2 * (abs(start) or 1.0) / (factor or 1.0)
    assert taken == pytest.approx([start] * 2 + [start + by, start - by, start] if factor else [start], rel=1e-5)


def test_in_eval_mode_norms_and_recurrent_modules_stay_as_they_are():
    seen = []

    class Outer(nn.Sequential):
        def forward(self, x):
            seen.append([each.training for each in self])
            return self[3](self[0](x))

    made = [nn.Linear(32, 32), nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.Dropout(), nn.Dropout().eval()]
    step = build_step(source_of(lambda: Outer(*made)), StepConfig(device="cpu"))
    batch = step.next_batch()
    assert [take(step, batch).drew for take in (still_gradients, draws.gradients_at)] == [False, True]
    assert seen == [[False, True, True, False, False], [True, True, True, True, False]]
