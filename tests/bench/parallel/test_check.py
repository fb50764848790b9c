"""Wrong schemes are found wrong and right ones right, by gradients, updates and a few steps beside one process."""

import dataclasses
import math

import pytest
import torch

from tests.bench.parallel import agreement, by_scheme, deviation
from tools.trust.planted.parallel import CONFIG, RIGHT, SOURCE, WRONG, judge_right, judge_wrong, quick
from trainstep.base.config import ModelConfig
from trainstep.base.schemes import SCHEMES
from trainstep.base.tolerance import DRAWS, allowed_error, one_rounding
from trainstep.bench.parallel import ParallelCase
from trainstep.check.gradients import Gradients
from trainstep.check.one_process import MOVED, SHRUNK, STEPS, _places, expected
from trainstep.check.ranks import RANKS_DIFFER, compare_with_one_process
from trainstep.step.batches import share_of
from trainstep.step.training_step import build_step
from trainstep.step.workload import WorkloadSource, builtin_source

TWO_RANKS = dataclasses.replace(CONFIG, batch=2 * CONFIG.batch)
PARTS = ("gradients × 1.02", "β₂ of 0.999", "reduced in 16 bits", "gradients × 1.05 on rank 1")
ONE_PASS = ("gradients × 1.05 in the first pass alone", "gradients × 1.05 from the third pass")
LATE = ("gradients × 1.05 after ten passes", "learning rate × 1.05 after ten steps")
STALE = "weights one update old in forward and backward"


@pytest.fixture(scope="module")
def wrong(two):
    """Half of them in either precision; `python -m tools.trust.planted` takes all."""
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
    assert (scale.parts["optimizer"].is_right, scale.parts["update"].is_right) == (True, True)
    assert not scale.gradients.scale <= scale.gradients.scale_allowed
    assert (moments.gradients.is_right, moments.float32.is_right, moments.parts["optimizer"].is_right) == (
        True,
        True,
        False,
    )
    assert moments.parts["update"].is_right, "too small for five steps in bf16"
    assert (narrow.gradients.is_right, narrow.float32.is_right) == (True, False)
    assert apart.faults == (RANKS_DIFFER,)
    assert (apart.gradients.is_right, apart.parts["optimizer"].is_right) == (True, True), "the first rank's are"
    assert all(not wrong["bf16"][name].gradients.is_right for name in ONE_PASS)
    passes, steps = (wrong["bf16"][name] for name in LATE)
    assert (passes.gradients.is_right, passes.float32.is_right, passes.parts["optimizer"].is_right) == (
        False,
        True,
        True,
    )
    assert (steps.gradients.is_right, steps.parts["optimizer"].is_right) == (True, False)
    stale = wrong["bf16"][STALE]
    assert (stale.float32.is_right, stale.parts["optimizer"].is_right, stale.parts["update"].is_right) == (
        False, True, True,
    )  # fmt: skip
    assert "after 5 steps its parameters" in str(wrong["fp32"][STALE])


@pytest.mark.distributed
@pytest.mark.thorough
def test_unusual_right_schemes_are_found_right(two):
    names = list(RIGHT)[::2]
    found = two.run(judge_right, names)[0]
    assert {name: str(each) for name, each in found.items() if not getattr(each, "holds", False)} == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gradients": deviation(gradient=0.03)}, "the gradients off by 0.03 of 0.02"),
        ({"gradients": deviation(scale=math.nan)}, "their scale off by nan of 0.02"),
        ({"float32": deviation(1e-6, worst=2e-6)}, "in float32, head.weight off by 2e-06 of 1e-06"),
        ({"optimizer": 0.12345}, "12 updates of head.weight from equal gradients off by 0.12 of 0.0001"),
        ({"optimizer": math.nan},
         "12 updates of head.weight from equal gradients off by nan of 0.0001"),
        ({"loss": 0.123456}, f"after {STEPS} steps its loss off by 0.12 of 1e-06"),
        ({"update": 0.123456}, f"after {STEPS} steps its parameters' movement off by 0.12 of 1e-06"),
        ({"update": math.nan}, f"after {STEPS} steps its parameters' movement off by nan of 1e-06"),
        ({"ranks_agree": False}, "its ranks have different parameters"),
    ],
)  # fmt: skip
def test_one_part_that_is_wrong_is_enough(change, said):
    assert agreement().holds
    assert str(agreement()) == ""
    assert not agreement(**change).holds
    assert str(agreement(**change)) == said, "it says that part alone"


def test_an_error_as_large_as_is_allowed_is_allowed():
    assert agreement(loss=1e-6, update=1e-6).holds
    assert agreement(float32=None).holds
    assert agreement(float32=None).columns()["float32_error"] == agreement().gradients.gradient
    assert agreement().columns()["float32_error"] == agreement().float32.gradient


def _fused(process):
    fused = dataclasses.replace(CONFIG, optimizer="adamw-fused", precision="bf16")
    with quick():
        found = by_scheme(compare_with_one_process([ParallelCase(SOURCE, fused, SCHEMES["torch-fsdp2"])], process))
    return str(*found.values())


@pytest.mark.distributed
def test_fsdp2_is_judged_where_the_step_fuses_its_optimizer(two):
    """Torch has no fused SGD of DTensors, so gradients are shown by another."""
    assert two.run(_fused)[0] == ""


def with_a_spare_parameter(step):
    workload = SOURCE.build(step)
    workload.module.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
    return workload


@pytest.mark.parametrize(("build", "moves"), [(SOURCE.build, True), (with_a_spare_parameter, False)])
def test_weights_differ_between_the_places_unless_one_may_go_without_a_gradient(build, moves):
    """A rank cannot move what it has no gradient of; then stale weights are looked for in training alone."""
    workload = build(TWO_RANKS)
    places = expected(WorkloadSource("little", build), TWO_RANKS, 2).gradients.places
    for name, value in workload.module.named_parameters():
        assert torch.equal(places[0].state[name], value)
        assert torch.equal(places[1].state[name], value - (value * SHRUNK - MOVED) if moves else value), name
    batches = [next(workload.batches)[0] for _ in range(3)]
    assert torch.equal(places[0].batch[0][0], batches[0])
    assert torch.equal(places[1].batch[0][0], batches[2])


def test_blocks_of_a_wide_model_have_gradients_in_both_places():
    """Weights that are all larger by one number add up over a row: of width 1280 and six layers, only the head had any,
    and one rounding took the blocks' off by five times their size."""
    source = builtin_source("wide", ModelConfig(vocab_size=256, d_model=1280, d_ff=64, num_layers=6, num_heads=20))
    step = build_step(source, dataclasses.replace(CONFIG, batch=1))
    shares = []
    for batch in _places(True, step):
        squares = Gradients.of(step.gradients(batch[0]), step.module).squares
        shares.append(sum(value for name, value in squares.items() if "blocks." in name) / sum(squares.values()))
    assert min(shares) > 0.5, shares


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
