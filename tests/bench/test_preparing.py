"""Batches between steps: their time is a sample of its own, and what a step leaves to them is refused."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from trainstep.base.config import StepConfig
from trainstep.bench.step import Preparing, check_batches_leave_weights, run_cases, step_cases
from trainstep.measure.outcome import Failure, WrongError, attempt
from trainstep.measure.timing import CpuClock
from trainstep.step.training_step import build_step
from trainstep.step.workload import Workload, WorkloadSource

SLEEP_MS = 3.0


class Batches:
    """One batch, again and again; `between` is called each time before it."""

    def __init__(self, between):
        self.between = between

    def __iter__(self):
        while True:
            self.between()
            yield (torch.ones(2, 4), torch.zeros(2, 2))


def source(between, dtype=torch.float32):
    """A workload whose batches call `between(module, optimizer)`, the optimizer None before it is made."""

    def build(config):
        torch.manual_seed(config.seed)
        module, made = nn.Linear(4, 2).to(dtype), []

        def optimizer(parameters):
            made.append(torch.optim.AdamW(parameters))
            return made[0]

        return Workload(
            module=module,
            batches=Batches(lambda: between(module, made[0] if made else None)),
            loss=lambda outputs, batch: nn.functional.mse_loss(outputs.float(), batch[1].float()),
            optimizer=optimizer,
        )

    return WorkloadSource("between", build)


def nothing(module, optimizer):
    pass


def moves_weights(module, optimizer):
    module.weight.data.mul_(1.02)


def moves_state(module, optimizer):
    for state in optimizer.state.values() if optimizer else ():
        state["exp_avg"].data.mul_(1.01)


def drops_state(module, optimizer):
    if optimizer:
        optimizer.state.clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
@pytest.mark.parametrize("between", [moves_weights, moves_state, drops_state])
def test_batches_that_do_a_part_of_the_step_are_wrong(between, precision):
    step = build_step(source(between), StepConfig(device="cpu", precision=precision))
    with pytest.raises(WrongError, match=r"changed weights or optimizer state.*update in the optimizer's step"):
        check_batches_leave_weights(step, step.next_batch(), "step")


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_batches_alone_are_right(precision):
    step = build_step(source(nothing), StepConfig(device="cpu", precision=precision))
    check_batches_leave_weights(step, step.next_batch(), "step")


def test_such_a_step_is_a_row_that_is_wrong_and_has_no_times():
    (row,) = run_cases(step_cases([source(moves_weights)], {"device": ("cpu",)}, warmups=(1,), steps=6), check=False)
    assert (row.status, row.times) == ("wrong", {})
    assert row.reason.startswith("asking for the next batch changed weights")


def test_an_attempt_that_is_wrong_is_no_failure_of_the_code():
    def wrong():
        raise WrongError("of something else")

    assert attempt(wrong) == Failure("wrong", "of something else")


def test_the_time_between_steps_is_a_sample_of_each():
    cases = step_cases([source(lambda *_: time.sleep(SLEEP_MS / 1e3))], {"device": ("cpu",)}, warmups=(0, 2), steps=7)
    cold, warm = run_cases(cases, check=False)
    for row in (cold, warm):
        assert len(row.samples["batch"]) == 7
        assert min(row.samples["batch"]) >= SLEEP_MS
        assert row.times["batch"].median >= SLEEP_MS
    assert cold.samples["batch"][2:] == warm.samples["batch"][:5], "of the same run"
    (sustained,) = run_cases([replace(cases[1], sustained=True)], check=False)
    assert "batch" not in sustained.samples
    assert sustained.step_ms >= SLEEP_MS, "it is in the step's own time"


def test_it_lasts_until_the_device_has_the_batch():
    class Slow(CpuClock):
        def synchronize(self):
            time.sleep(SLEEP_MS / 1e3)

    preparing = Preparing(partial(next, iter([1])), Slow())
    preparing(None)
    (only,) = preparing.ms
    assert only >= SLEEP_MS
