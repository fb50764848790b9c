"""Wrong schemes are found wrong and right ones right, by gradients, updates and a few steps beside one process."""

import dataclasses
import math

import pytest
import torch

from tests.bench.parallel import agreement, deviation
from tests.planted.parallel import CONFIG, RIGHT, SOURCE, WRONG, judge_right, judge_wrong
from trainstep.bench.check import allowed_error, one_rounding
from trainstep.bench.check.reference import DRAWS
from trainstep.bench.check.updates import UpdateError
from trainstep.bench.parallel import share_of
from trainstep.bench.parallel.one_process import MOVED, STEPS, expected
from trainstep.training_step import build_step
from trainstep.workload import WorkloadSource

TWO_RANKS = dataclasses.replace(CONFIG, batch=2 * CONFIG.batch)
PARTS = ("gradients × 1.02", "β₂ of 0.999", "reduced in 16 bits", "gradients × 1.05 on rank 1")
ONE_PASS = ("gradients × 1.05 in the first pass alone", "gradients × 1.05 from the third pass")
LATE = ("gradients × 1.05 after ten passes", "learning rate × 1.05 after ten steps")
STALE = "weights one update old in forward and backward"


@pytest.fixture(scope="module")
def wrong(two):
    """Half of them in either precision; `python -m tests.planted` takes all."""
    names = {"fp32": [*list(WRONG)[::2], STALE], "bf16": [*list(WRONG)[1::2], *PARTS, *ONE_PASS, *LATE, STALE]}
    found = {}
    for precision, each in names.items():
        found[precision], nothing = two.run(judge_wrong, precision, list(dict.fromkeys(each)), DRAWS)
        assert set(nothing.values()) == {None}, "only the first rank has what is wanted"
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_wrong_schemes_are_found_wrong(wrong, precision):
    assert [name for name, found in wrong[precision].items() if found.holds] == []
    assert all(str(found) for found in wrong[precision].values()), "each says what is wrong"


@pytest.mark.distributed
def test_each_part_finds_what_the_others_cannot(wrong):
    scale, moments, narrow, apart = (wrong["bf16"][name] for name in PARTS)
    assert (scale.optimizer.is_right, scale.update_error < scale.update_allowed) == (True, True)
    assert not scale.gradients.scale <= scale.gradients.scale_allowed
    assert (moments.gradients.is_right, moments.float32.is_right, moments.optimizer.is_right) == (True, True, False)
    assert moments.update_error < moments.update_allowed, "too small for five steps in bf16"
    assert (narrow.gradients.is_right, narrow.float32.is_right) == (True, False)
    assert apart.ranks_agree is False
    assert (apart.gradients.is_right, apart.optimizer.is_right) == (True, True), "the first rank's are"
    assert all(not wrong["bf16"][name].gradients.is_right for name in ONE_PASS)
    passes, steps = (wrong["bf16"][name] for name in LATE)
    assert (passes.gradients.is_right, passes.float32.is_right, passes.optimizer.is_right) == (False, True, True)
    assert (steps.gradients.is_right, steps.optimizer.is_right) == (True, False)
    stale = wrong["bf16"][STALE]
    assert (stale.float32.is_right, stale.optimizer.is_right, stale.update_error < stale.update_allowed) == (
        False, True, True,
    )  # fmt: skip
    assert "after 5 steps its parameters" in str(wrong["fp32"][STALE])


@pytest.mark.distributed
def test_unusual_right_schemes_are_found_right(two):
    names = list(RIGHT)[::2]
    found = two.run(judge_right, names)[0]
    assert {name: str(each) for name, each in found.items() if not getattr(each, "holds", False)} == {}


@pytest.mark.parametrize(
    "change",
    [
        {"gradients": deviation(gradient=0.03)},
        {"gradients": deviation(scale=math.nan)},
        {"float32": deviation(1e-6, worst=2e-6)},
        {"optimizer": UpdateError(2e-4, 1e-4, "head.weight")},
        {"optimizer": UpdateError(math.nan, 1e-4, "head.weight")},
        {"loss_error": 2e-6},
        {"update_error": 2e-6},
        {"update_error": math.nan},
        {"ranks_agree": False},
    ],
)
def test_one_part_that_is_wrong_is_enough(change):
    assert agreement().holds
    assert str(agreement()) == ""
    assert not agreement(**change).holds
    assert str(agreement(**change)).count(";") == 0, "it says that part alone"


def with_a_spare_parameter(step):
    workload = SOURCE.build(step)
    workload.module.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
    return workload


@pytest.mark.parametrize(("build", "moved"), [(SOURCE.build, MOVED), (with_a_spare_parameter, 0.0)])
def test_weights_differ_between_the_places_unless_one_may_go_without_a_gradient(build, moved):
    """A rank cannot move what it has no gradient of; then stale weights are looked for in training alone."""
    workload = build(TWO_RANKS)
    places = expected(WorkloadSource("little", build), TWO_RANKS, 2).gradients.places
    for name, value in workload.module.named_parameters():
        assert torch.equal(places[0].state[name], value)
        assert torch.equal(places[1].state[name], value + moved), name
    batches = [next(workload.batches)[0] for _ in range(3)]
    assert torch.equal(places[0].batch[0], batches[0])
    assert torch.equal(places[1].batch[0], batches[2])


def test_what_is_allowed_after_some_steps_is_twice_what_the_precision_is_off_by():
    """Losses and movement in bf16 and float32, from training by hand."""

    def train(precision):
        step = build_step(SOURCE, dataclasses.replace(TWO_RANKS, precision=precision))
        before = torch.cat([value.detach().flatten().clone() for value in step.module.parameters()])
        losses = []
        for _ in range(STEPS):
            batch = step.next_batch()
            losses.append(float(step.accumulate([share_of(batch, rank, 2) for rank in range(2)])[0]))
        after = torch.cat([value.detach().flatten() for value in step.module.parameters()])
        return torch.tensor(losses), after, float((after - before).norm())

    wanted, eps = expected(SOURCE, dataclasses.replace(TWO_RANKS, precision="bf16"), 2), one_rounding(torch.bfloat16)
    (losses, parameters, moved), (exact, reference, _) = train("bf16"), train("fp32")
    assert wanted.trained.losses == tuple(losses.tolist())
    off, apart = float((losses - exact).abs().max()), float((parameters - reference).norm()) / moved
    assert wanted.loss_allowed == pytest.approx(allowed_error(off, eps * float(losses.max())), rel=1e-4)
    assert wanted.update_allowed == pytest.approx(allowed_error(apart, eps), rel=1e-4)
