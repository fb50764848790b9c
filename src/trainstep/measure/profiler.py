"""Runs steps under torch.profiler or NVTX, warm-ups left out, through the same stopwatch as without."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from trainstep.measure.ranges import announced_phase, announced_steps, modules_announced
from trainstep.measure.timing import DeviceClock, Timing, time_steps
from trainstep.phases import PhaseContext, together

Step = Callable[[PhaseContext], object]
WARMUP = 2
"""Steps under the profiler before those that are recorded: one to start it, one as it is when recording."""


def record_steps(
    step: Step,
    *,
    module: nn.Module | None,
    device: DeviceClock,
    on_gpu: bool,
    steps: int,
    trace: Path,
    prepare_next: Callable[[], object],
) -> Timing:
    """Run `step` under torch.profiler with its ranges announced, write the trace, and return the profiled timing.

    Args:
        step: as for `time_steps`.
        module: whose submodules are announced, and the shapes of operators' arguments recorded; None does without
            both, which makes the profiler's own cost smaller.
        device: where the work runs.
        on_gpu: whether kernels are recorded; else the operators stand for them.
        steps: recorded steps, after `WARMUP` that are not.
        trace: the file to write, `.json.gz`: Perfetto (ui.perfetto.dev) and chrome://tracing open it.
        prepare_next: called after each step.
    """
    if not on_gpu:  # torch 2.13's profiler says on stderr when it starts and stops; where a GPU is, it may say more
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    plan = schedule(wait=0, warmup=WARMUP, active=steps, repeat=1)
    trace.parent.mkdir(parents=True, exist_ok=True)
    with (
        modules_announced(module) if module is not None else nullcontext(),
        profile(
            activities=activities,
            schedule=plan,
            record_shapes=module is not None,
            acc_events=True,  # there is one cycle; without it torch warns of others
            on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
        ) as profiler,
    ):

        def after_step(_: object) -> None:
            prepare_next()
            profiler.step()

        return time_steps(_announced(step), device=device, warmup=WARMUP, steps=steps, after_step=after_step)


def run_under_nvtx(
    step: Step, *, module: nn.Module, device: DeviceClock, warmup: int, steps: int, prepare_next: Callable[[], object]
) -> Timing:
    """Run `step` with all ranges and operators announced to NVTX, `steps` of them between cudaProfilerStart and Stop.

    For an outside profiler such as Nsight Systems, told to capture between the two: the warm-ups before are left out.
    """
    taken = 0

    def after_step(_: object) -> None:
        nonlocal taken
        prepare_next()
        taken += 1
        if taken == warmup:
            torch.cuda.profiler.start()

    with modules_announced(module), torch.autograd.profiler.emit_nvtx(record_shapes=False):
        timing = time_steps(_announced(step), device=device, warmup=warmup, steps=steps, after_step=after_step)
        torch.cuda.profiler.stop()
    return timing


def _announced(step: Step) -> Step:
    """`step` with itself and its phases announced."""
    return announced_steps(lambda phase: step(together(announced_phase, phase)))
