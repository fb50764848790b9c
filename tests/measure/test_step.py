"""A measured step: its FLOPs and tokens by mode, and batches, whose time is apart and which do no work of a step."""

import functools
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.bench.step import run_cases, step_cases
from trainstep.measure.outcome import Failure, WrongError, attempt
from trainstep.measure.step import Preparing, case_columns, check_batches_leave_weights, measure_step, measured_fields
from trainstep.measure.timing import CpuClock
from trainstep.plan.flops import step_flops
from trainstep.step.batches import count_tokens
from trainstep.step.training_step import build_step
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

SLEEP_MS = 3.0
TOY = ModelConfig(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=256)
TOY_SOURCE = builtin_source("toy", TOY)


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


def test_a_users_workload_is_not_said_to_have_our_optimizer():
    source = WorkloadSource("own", lambda step: None)
    assert case_columns(source, StepConfig())["optimizer"] is None
    assert case_columns(source, StepConfig(optimizer="adamw-fused"))["optimizer"] == "adamw-fused"


def test_a_users_workload_is_counted_by_torch():
    def build(step):
        return Workload(
            module=nn.Linear(64, 32, bias=False),
            batches=[(torch.randn(8, 64), torch.randn(8, 32))],
            loss=lambda out, batch: nn.functional.mse_loss(out, batch[1]),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )

    measured = measure_step(WorkloadSource("linear", build), StepConfig(device="cpu"), steps=1, warmup=0)
    forward = 2 * 8 * 64 * 32
    assert measured.flops == 2 * forward  # forward and the weight's gradient; the input needs none
    assert measured.tokens is None


@pytest.mark.parametrize(("mode", "passes"), [("forward", 1), ("forward-backward", 3), ("step", 3)])
def test_flops_are_those_of_the_mode(mode, passes):
    """The forward pass alone, or with a backward pass of twice as many; ours by formula, others counted by torch."""

    def build(step):
        return Workload(
            module=nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)),
            batches=[(torch.randn(8, 64, requires_grad=True),)],
            loss=lambda out, batch: out.square().mean(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )

    for source, forward in (
        (TOY_SOURCE, step_flops(TOY, 2, 32, "forward")),
        (WorkloadSource("own", build), 4 * 8 * 64**2),
    ):
        config = StepConfig(batch=2, context=32, device="cpu")
        assert measure_step(source, config, mode, warmup=0, steps=1).flops == passes * forward


@pytest.mark.parametrize(("precision", "peak"), [("fp32", 67.0), ("tf32", 494.7), ("bf16", 989.4)])
def test_utilisation_is_of_the_peak_at_the_step_s_precision(monkeypatch, precision, peak):
    """Peaks from the H200's datasheet; before, a bf16 step's share of the float32 units' peak would have passed."""
    monkeypatch.setattr("trainstep.measure.step.device_name", lambda device: "NVIDIA H200")
    measured = measure_step(TOY_SOURCE, StepConfig(batch=2, context=32, device="cpu"), warmup=0, steps=1)
    fields = measured_fields(measured, measured.timing, precision)
    assert fields["achieved_tflops"] > 0
    assert fields["utilisation"] == pytest.approx(fields["achieved_tflops"] / peak)


def test_every_step_trains_on_the_next_batch():
    seen = []

    def forward(module, batch):
        seen.append(int(batch[0][0]))
        return module(batch[0])

    def build(step):
        return Workload(
            module=nn.Linear(1, 1),
            batches=[(torch.full((1,), float(number)),) for number in range(5)],
            forward=forward,
            loss=lambda out, batch: out.square().mean(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )

    measured = measure_step(WorkloadSource("numbers", build), StepConfig(device="cpu"), warmup=1, steps=3)
    assert seen[:4] == [0, 1, 2, 3]
    assert len(set(measured.losses)) == 4


def test_tokens_are_counted_where_the_batch_tells():
    ids = torch.zeros(3, 7, dtype=torch.long)
    assert count_tokens((ids, ids)) == 21
    assert count_tokens({"mask": torch.ones(3, 7), "input_ids": ids}) == 21
    assert count_tokens(torch.ones(3, 7)) is None
    assert count_tokens("text") is None
