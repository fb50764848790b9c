"""`trainstep profile`: one training step, timed without and with the profiler, and taken apart kernel by kernel."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainstep.attention.eager import pieces_announced
from trainstep.bench.outcome import Failure, attempt, failed_row
from trainstep.bench.profile_rows import profile_rows, summary_values
from trainstep.bench.step import case_columns, phase_samples
from trainstep.config import PhaseContext, StepConfig
from trainstep.errors import UsageError
from trainstep.kinds import ProfileRow
from trainstep.measure.environment import describe
from trainstep.measure.flops import UNKNOWN_LISTS, Lists
from trainstep.measure.profile.kernels import KernelProfile, profile_of
from trainstep.measure.profile.nsys import is_sqlite, read_nsys
from trainstep.measure.profile.ranges import announce, record_steps, run_under_nvtx
from trainstep.measure.profile.trace import read_chrome_trace
from trainstep.measure.timing import Timing, device_clock, time_steps
from trainstep.records import Row, Scalar, make_row
from trainstep.stats import RUN_SPREAD, summarize
from trainstep.training_step import TrainingStep, build_step
from trainstep.workload import WorkloadSource, resolve_device


@dataclass(frozen=True)
class ProfileMeasurement:
    """One step, measured without and with the profiler in the same process."""

    plain: Timing
    profiled: Timing
    profile: KernelProfile


def profile_records(
    source: WorkloadSource,
    config: StepConfig,
    *,
    warmup: int = 3,
    steps: int = 10,
    profiled_steps: int = 3,
    trace: Path | None = None,
) -> Iterator[Row]:
    """Rows of kind "profile" (one), "family", "attention piece", "kernel" and "timeline".

    Args:
        source: the workload.
        config: how its step is taken.
        warmup: steps before the timed ones.
        steps: steps timed without the profiler.
        profiled_steps: steps recorded by it.
        trace: where to keep the trace (`.json.gz`); None keeps none.
    """
    case, environment = case_columns(source, config), describe(resolve_device(config.device))
    found = attempt(partial(measure_profile, source, config, warmup, steps, profiled_steps, trace))
    if isinstance(found, Failure):
        yield failed_row(ProfileRow, case, found, environment)
        return
    values = timing_values(found) | {"trace": trace.name if trace is not None else None}
    samples = {"step": [sample.wall_ms for sample in found.plain.samples]}
    samples |= {"profiled_step": [sample.wall_ms for sample in found.profiled.samples]}
    yield make_row(ProfileRow, case, values, samples=samples, environment=environment)
    yield from profile_rows(found.profile, case, config.precision, environment)


def measure_profile(
    source: WorkloadSource, config: StepConfig, warmup: int, steps: int, profiled_steps: int, trace: Path | None
) -> ProfileMeasurement:
    """Build the workload, time its step, then record it."""
    runner = _Runner(build_step(source, config))
    clock = device_clock(runner.step.device)
    plain = time_steps(runner.run, device=clock, warmup=warmup, steps=steps, after_step=runner.prepare_next)
    with tempfile.TemporaryDirectory() as folder, _pieces(config):
        file = trace or Path(folder) / "trace.json.gz"
        profiled = record_steps(
            runner.run,
            module=runner.step.module,
            device=clock,
            on_gpu=runner.step.device.type == "cuda",
            steps=profiled_steps,
            trace=file,
            prepare_next=runner.prepare_next,
        )
        recorded = read_chrome_trace(file)
    return ProfileMeasurement(plain, profiled, profile_of(recorded, _lists(runner.step)))


def run_nvtx(source: WorkloadSource, config: StepConfig, *, warmup: int, steps: int) -> Timing:
    """Run the step for an outside profiler: ranges to NVTX, the capture range by cudaProfilerStart and Stop.

    Raises:
        UsageError: the device is no GPU.
    """
    device = resolve_device(config.device)
    if device.type != "cuda":
        raise UsageError("NVTX ranges are for GPU profilers, and this would run on the CPU; use a machine with a GPU")
    runner = _Runner(build_step(source, config))
    with _pieces(config):
        return run_under_nvtx(
            runner.run,
            module=runner.step.module,
            device=device_clock(device),
            warmup=max(1, warmup),
            steps=steps,
            prepare_next=runner.prepare_next,
        )


def records_from_file(path: Path) -> Iterator[Row]:
    """The same rows, from a trace that was recorded elsewhere: an nsys SQLite export or torch.profiler's JSON.

    Raises:
        UsageError: the file cannot be read, is neither, or holds no GPU work.
    """
    trace = read_nsys(path) if is_sqlite(path) else read_chrome_trace(path)
    profile = profile_of(trace)
    if not profile.kernels:
        raise UsageError(f"{path} holds no kernels and no operators; profile with CUDA tracing on")
    case: dict[str, Scalar] = {"workload": path.name}
    environment: dict[str, Scalar] = {"device": trace.device} if trace.device else {}
    yield make_row(ProfileRow, case, summary_values(profile), environment=environment)
    yield from profile_rows(profile, case, None, environment)


class _Runner:
    """Takes a step on a batch that is ready, then makes the next one ready."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self._batch = step.next_batch()

    def run(self, phase: PhaseContext) -> None:
        self.step(self._batch, phase=phase)

    def prepare_next(self, *_: Any) -> None:
        self._batch = self.step.next_batch()


def _pieces(config: StepConfig) -> AbstractContextManager[Any]:
    """Announce the pieces of attention where they run one by one."""
    if config.compile != "off" or config.attention != "eager":
        return nullcontext()
    announce_piece: Callable[[str], AbstractContextManager[Any]] = partial(announce, "attention")
    return pieces_announced(announce_piece)


def _lists(step: TrainingStep) -> Lists:
    """The optimizer's parameters, which it handles in one list if they are one group of one dtype."""
    groups = [group["params"] for group in step.optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group if parameter.requires_grad]
    if len(groups) != 1 or len({parameter.dtype for parameter in parameters}) != 1:
        return UNKNOWN_LISTS
    return Lists(parameters[0].element_size(), sum(parameter.numel() for parameter in parameters))


def timing_values(found: ProfileMeasurement) -> dict[str, Scalar]:
    """The summary of the profile beside the times without it: its cost, idle time, and whether the sums agree."""
    plain, profiled = phase_samples(found.plain), phase_samples(found.profiled)
    step = summarize(plain["step"])
    profiled_ms = statistics.median(profiled["step"])
    values = summary_values(found.profile)
    busy = values["busy_ms"]
    assert isinstance(busy, float), "a profile has a busy time"
    values |= {
        "n": len(plain["step"]),
        **step.columns("step"),
        "profiled_step_ms": profiled_ms,
        "profiler_cost_ms": profiled_ms - step.median,
        "profiler_cost": profiled_ms / step.median - 1,
        "idle_ms": max(0.0, step.median - busy),
        "idle_share": max(0.0, 1 - busy / step.median),
    }
    # Profiling lengthens operators on a CPU, but not kernels on a GPU, which record their own times.
    cost_ms = profiled_ms - step.median if found.profile.is_cpu else 0.0
    allowed = max(cost_ms, RUN_SPREAD * step.median)
    over = []
    for phase in found.plain.samples[0].laps:
        median = statistics.median(plain[phase])
        values[f"{phase}_ms"] = median
        values[f"{phase}_profiled_ms"] = statistics.median(profiled[phase])
        kernels = values.get(f"{phase}_busy_ms")
        if isinstance(kernels, float) and kernels > median + allowed:
            over.append(phase)
    if busy > step.median + allowed:
        over.append("step")
    values["sums_allowed_ms"] = allowed
    values["sums_disagree"] = tuple(over) or None
    assert math.isfinite(profiled_ms), "a step has a time"
    return values
