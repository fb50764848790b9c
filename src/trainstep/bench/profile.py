"""`trainstep profile`: one training step, timed without and with the profiler, and taken apart kernel by kernel.

And the ceilings it is held against: what the device reaches at best in a large product and in a large copy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from trainstep.attention.eager import pieces_announced
from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.precision import Rate
from trainstep.measure.costs import UNKNOWN_LISTS, Lists
from trainstep.measure.environment import describe, measure_ceilings
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import KernelProfile, profiles_of
from trainstep.measure.profile.nsys import is_sqlite, read_nsys
from trainstep.measure.profile.ranges import announce, record_steps, run_under_nvtx
from trainstep.measure.profile.rows import profile_rows, summary_values, timing_values
from trainstep.measure.step import BatchedStep, case_columns, phase_samples
from trainstep.measure.timing import Timing, device_clock, time_steps
from trainstep.rows import CeilingRow, ProfileRow
from trainstep.rows.records import Row, Scalar, collection_paused, make_row
from trainstep.step.casting import check_precision
from trainstep.step.training_step import TrainingStep, build_step
from trainstep.step.workload import WorkloadSource, resolve_device

MANY_MODULES = 1_000
"""Modules above which one step is profiled: 3,000 on a CPU make half a million events, which take seconds to read."""


def ceiling_records(device: torch.device) -> Iterator[CeilingRow]:
    """A row per precision that the device has, with the rate of a large product, and one for a large copy."""
    environment = describe(device)
    supported = [
        each for each in get_args(Rate) if not isinstance(attempt(partial(check_precision, each, device)), Failure)
    ]
    measured = attempt(partial(measure_ceilings, device, supported))
    if isinstance(measured, Failure):
        yield failed_row(CeilingRow, {"operation": "all"}, measured, environment)
        return
    for precision, rate in measured.matmul_tflops.items():
        yield CeilingRow(operation="matmul", precision=precision, tflops=rate, environment=environment)
    yield CeilingRow(operation="copy", gb_s=measured.copy_gb_s, environment=environment)


def profile_records(
    source: WorkloadSource,
    config: StepConfig,
    *,
    warmup: int = 3,
    steps: int = 10,
    profiled_steps: int | None = None,
    trace: Path | None = None,
) -> Iterator[Row]:
    """Rows of kind "profile" (one), "family", "attention piece", "kernel" and "timeline".

    After the warm-up, `steps` are timed without the profiler, then `profiled_steps` recorded by it: without a number
    three, or one of a model of more than `MANY_MODULES`. Their trace is kept at `trace` (`.json.gz`).
    """
    case, environment = case_columns(source, config), describe(resolve_device(config.device))
    found = attempt(lambda: list(_measure(source, config, warmup, steps, profiled_steps, trace, environment)))
    yield from [failed_row(ProfileRow, case, found, environment)] if isinstance(found, Failure) else found


def _device_cases(
    profiles: Mapping[str, KernelProfile], case: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], KernelProfile, dict[str, Scalar]]]:
    """Each device's case and profile, and how many devices there are; one alone is not named."""
    devices = len(profiles) if len(profiles) > 1 else None
    for device, profile in profiles.items():
        yield ({**case, "device": device} if devices else dict(case)), profile, {"devices": devices}


def _measure(
    source: WorkloadSource,
    config: StepConfig,
    warmup: int,
    steps: int,
    profiled_steps: int | None,
    trace: Path | None,
    environment: Mapping[str, Scalar],
) -> Iterator[Row]:
    """Rows of the step without and with the profiler, in the same process. A million objects of a large profile are let
    go before memory is given back, which looks through all that is left."""
    config.require_kernels()
    runner = BatchedStep(build_step(source, config))
    clock = device_clock(runner.step.device)
    timed = time_steps(runner.run, device=clock, warmup=warmup, steps=steps, after_step=runner.prepare_next)
    with tempfile.TemporaryDirectory() as folder, _pieces(config):
        file = trace or Path(folder) / "trace.json.gz"
        count = profiled_steps or (1 if sum(1 for _ in runner.step.module.modules()) > MANY_MODULES else 3)
        recorded = record_steps(runner.run, clock, count, file, runner.step.module, runner.prepare_next)
        plain, profiled = phase_samples(timed), phase_samples(recorded)
        samples = {"step": plain["step"], "profiled_step": profiled["step"]}
        with collection_paused():
            profiles = profiles_of(read_chrome_trace(file), _lists(runner.step))
            for own, profile, devices in _device_cases(profiles, case_columns(source, config)):
                values = timing_values(plain, profiled, profile) | devices
                values["trace"] = trace.name if trace is not None else None
                yield make_row(ProfileRow, own, values, samples=samples, environment=environment)
                yield from profile_rows(profile, own, config.precision, environment)


def run_nvtx(source: WorkloadSource, config: StepConfig, *, warmup: int, steps: int) -> Timing:
    """Run the step for an outside profiler: ranges to NVTX, the capture range by cudaProfilerStart and Stop.

    Raises:
        UsageError: the device is no GPU, or no step warms up: the capture range begins after one.
    """
    config.require_kernels()
    device = resolve_device(config.device)
    if warmup < 1:
        raise UsageError(f"warmup is {warmup}; expected at least 1, after which the profiler begins to record")
    if device.type != "cuda":
        raise UsageError("NVTX ranges are for GPU profilers, and this would run on the CPU; use a machine with a GPU")
    runner = BatchedStep(build_step(source, config))
    with _pieces(config):
        clock, module = device_clock(device), runner.step.module
        return run_under_nvtx(runner.run, clock, warmup, steps, module, runner.prepare_next)


def records_from_file(path: Path) -> Iterator[Row]:
    """The same rows, from a trace that was recorded elsewhere: an nsys SQLite export or torch.profiler's JSON.

    Of several devices, each has its rows.

    Raises:
        UsageError: the file cannot be read, is neither, or holds no GPU work.
    """
    trace = read_nsys(path) if is_sqlite(path) else read_chrome_trace(path)
    profiles = profiles_of(trace)
    if not profiles:
        raise UsageError(f"{path} holds no kernels and no operators; profile with CUDA tracing on")
    environment = {"device": trace.device} if trace.device else {}
    for case, profile, devices in _device_cases(profiles, {"workload": path.name}):
        yield make_row(ProfileRow, case, summary_values(profile) | devices, environment=environment)
        yield from profile_rows(profile, case, None, environment)


def _pieces(config: StepConfig) -> AbstractContextManager[Any]:
    """Announce the pieces of attention where they run one by one."""
    if config.compile != "off" or config.attention != "eager":
        return nullcontext()
    return pieces_announced(partial(announce, "attention"))


def _lists(step: TrainingStep) -> Lists:
    """The optimizer's parameters, which it handles in one list if they are one group of one dtype."""
    groups = [group["params"] for group in step.optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group if parameter.requires_grad]
    if len(groups) != 1 or len({parameter.dtype for parameter in parameters}) != 1:
        return UNKNOWN_LISTS
    return Lists(parameters[0].element_size(), sum(parameter.numel() for parameter in parameters))
