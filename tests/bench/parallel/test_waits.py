"""What a step waits for other ranks is seen wherever it waits, and what is under way is seen whoever started it."""

import dataclasses
import time

import pytest
import torch

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.run import COMPUTING, Timed, measure, parallel_row
from trainstep.bench.parallel.waits import _WAITS
from trainstep.step.workload import WorkloadSource, builtin_source

LATE_S = 0.3
SEEN_MS = 0.5e3 * LATE_S
"""At least, in the slower of two steps: on a busy machine the other rank may be late, too."""
MODEL = ModelConfig(vocab_size=256, d_model=16, d_ff=32, num_layers=3, num_heads=2, max_context=16)
WAITS_IN = {
    "naive": "communication",
    "bucketed-25": "communication",
    "sharded-optimizer": "communication",
    "fsdp": "backward",
    "torch-ddp": "backward",
    "torch-zero": "backward",
    "torch-fsdp2": "backward",
}
"""Scheme → the phase in which a rank waits for one that is late in the loss."""


def late_in_the_loss(rank):
    workload = builtin_source("little", MODEL)

    def build(step):
        built = workload.build(step)

        def loss(outputs, batch):
            time.sleep(LATE_S if rank else 0)
            return built.loss(outputs, batch)

        return dataclasses.replace(built, loss=loss)

    return WorkloadSource("late", build, MODEL)


def late_after_the_update(rank):
    """The second rank comes late to its update's end, and so to the gathers that follow it."""
    workload = builtin_source("little", MODEL)

    def build(step):
        built = workload.build(step)

        class Late(torch.optim.SGD):
            def step(self, closure=None):
                time.sleep(LATE_S if rank else 0)
                return super().step(closure)

        return dataclasses.replace(built, optimizer=lambda parameters: Late(parameters, lr=0.1))

    return WorkloadSource("late", build, MODEL)


def _measured(process, source_of, schemes):
    config = StepConfig(context=16, batch=2, device="cpu")
    found = {}
    for name in ("single", *schemes):
        case = ParallelCase(source_of(process.rank), config, SCHEMES[name], warmup=1, steps=2)
        rank = measure(case, process)
        found[name] = rank, parallel_row(case, process, Timed([[rank]], None), num_parameters=MODEL.num_parameters)
    return found, [getattr(owner, name) is before for (owner, name), before in zip(_WAITS, BEFORE, strict=True)]


def waits_seen(name, rank, row, slack=1.0):
    """Milliseconds that each step waited where the scheme waits for the late rank, once they hold; none of "single"."""
    parts = [row.samples[f"{phase}_computing"] for phase in COMPUTING]
    exposed, step = row.samples["exposed_communication"], row.samples["step"]
    assert all(sum(each) <= slack * whole for *each, whole in zip(*parts, exposed, step, strict=True)), name
    if name == "single":
        assert (exposed, row.all_communication_ms) == ([0.0, 0.0], 0)
        return []
    phase = WAITS_IN[name]
    seen = [each[phase] for each in rank.waited] if phase == "backward" else row.samples["communication"]
    assert max(seen) >= SEEN_MS, (name, seen)
    assert row.all_communication_ms >= SEEN_MS, f"{name}: a call is under way until the other rank comes"
    return seen


BEFORE = [getattr(owner, name) for owner, name in _WAITS]


@pytest.mark.distributed
def test_a_rank_waits_for_a_late_one_wherever_its_scheme_waits(two):
    (found, is_restored), (late, _) = two.run(_measured, late_in_the_loss, tuple(WAITS_IN))
    assert all(is_restored)
    for name, (rank, row) in found.items():
        seen = waits_seen(name, rank, row)
        if not seen:
            continue
        exposed = row.samples["exposed_communication"]
        assert all(whole >= part for whole, part in zip(exposed, seen, strict=True))
        assert row.exposed_share == pytest.approx(row.times["exposed_communication"].median / row.step_ms)
        assert row.samples_per_s == pytest.approx(2e3 / row.step_ms), "of the one rank that was given"
        assert min(late[name][1].samples["loss_computing"]) >= 1e3 * LATE_S, "what is late computes, and waits not"


@pytest.mark.distributed
def test_waits_for_parameters_are_seen_in_the_update_and_in_the_next_forward(two):
    schemes = {
        "sharded-optimizer": "optimizer",
        "sharded-optimizer-1000-overlapped": "forward",
        "torch-zero": "optimizer",
    }
    (found, _), _ = two.run(_measured, late_after_the_update, tuple(schemes))
    for name, phase in schemes.items():
        assert max(waited[phase] for waited in found[name][0].waited) >= SEEN_MS, name
