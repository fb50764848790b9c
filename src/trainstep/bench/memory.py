"""The peak memory of a step, predicted and measured: `trainstep memory --peaks` (phase by phase) and `--checkpointing`
(with its time, policy by policy)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from trainstep.base.config import POLICIES, StepConfig, StepMode
from trainstep.base.errors import UnsupportedError
from trainstep.base.stats import summarize
from trainstep.bench.tracing import trace_step
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB, MemoryPeaks
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.step import WARMUP, case_columns, measure_step, memory_values, step_peaks
from trainstep.plan.memory import PeakBytes, peak_bytes
from trainstep.plan.traced import TracedStep
from trainstep.rows import CheckpointingRow, PeakRow
from trainstep.rows.records import Scalar, make_row
from trainstep.step.blocks import find_blocks
from trainstep.step.training_step import build_step
from trainstep.step.workload import WorkloadSource, resolve_device

UNFOLLOWED = "compiled code on a CPU allocates where nothing can follow it; use --compile off"


def measure_peaks(source: WorkloadSource, config: StepConfig, mode: StepMode) -> MemoryPeaks:
    """Build the workload and return the peaks of one step after `WARMUP`.

    Raises:
        UnsupportedError: compiled code on a CPU, whose allocations cannot be followed.
    """
    step = build_step(source, config)
    for _ in range(WARMUP):
        step(step.next_batch(), mode=mode)
    peaks = step_peaks(step, step.next_batch(), mode)
    if peaks is None:
        raise UnsupportedError(UNFOLLOWED)
    return peaks


def peak_records(source: WorkloadSource, configs: Iterable[StepConfig], modes: Sequence[StepMode]) -> Iterator[PeakRow]:
    """A row per configuration and mode; one that does not fit is a row too."""
    for config in configs:
        environment = describe(resolve_device(config.device))
        for mode in modes:
            case = case_columns(source, config) | {"mode": mode}
            found = attempt(partial(measure_peaks, source, config, mode))
            predicted = _predicted_peak(source, config, mode)
            if isinstance(found, Failure):
                yield failed_row(PeakRow, case, found, environment, _peak_values(predicted, None))
            else:
                values = memory_values(found) | _peak_values(predicted, found)
                yield make_row(PeakRow, case, values, environment=environment)


def default_policies(source: WorkloadSource, config: StepConfig) -> list[str]:
    """Every policy that treats all blocks alike.

    Raises:
        UnsupportedError: the workload has no blocks.
    """
    if source.model is None and not find_blocks(source.build(config).module):
        raise UnsupportedError(f"{source.name} has no blocks in an nn.ModuleList, so nothing to checkpoint by block")
    return list(POLICIES)


def checkpointing_records(
    source: WorkloadSource,
    config: StepConfig,
    names: Sequence[str],
    *,
    memory_gib: float | None = None,
    warmup: int = 2,
    steps: int = 10,
) -> Iterator[CheckpointingRow]:
    """A row per policy, in the order given.

    Args:
        memory_gib: what the step may take, for naming the best policy; None: the GPU's memory, on a CPU no limit.
    """
    device = resolve_device(config.device)
    environment = describe(device)
    if memory_gib is None and device.type == "cuda":
        memory_gib = torch.cuda.get_device_properties(device).total_memory / GIB
    configs = [dataclasses.replace(config, checkpointing=name) for name in names]  # so that a wrong name costs no run
    for each in configs:
        case = case_columns(source, each) | {"checkpointing": each.checkpointing}
        found = attempt(partial(measure_step, source, each, "step", warmup, steps))
        predicted = _predicted_peak(source, each, "step")
        values: dict[str, Scalar] = {"memory_gib": memory_gib}
        if isinstance(predicted, PeakBytes | TracedStep):
            values["predicted_moment"] = predicted.moment
        if isinstance(found, Failure):
            values |= _peak_values(predicted, None)
            yield failed_row(CheckpointingRow, case, found, environment, values)
            continue
        step_ms = [sample.wall_ms for sample in found.timing.samples]
        values |= summarize(step_ms).columns("step") | _peak_values(predicted, found.memory)
        yield make_row(CheckpointingRow, case, values, samples={"step": step_ms}, environment=environment)


def _predicted_peak(
    source: WorkloadSource, config: StepConfig, mode: StepMode
) -> PeakBytes | TracedStep | Failure | None:
    """The predicted peak: of the built-in model by formula, where there is one, else None; of a user's step from its
    trace, or why there is none."""
    if source.model is None:  # after measuring: what a model keeps of fake tensors in its globals is then no matter
        return attempt(partial(trace_step, source, config, mode))
    try:
        return peak_bytes(source.model, config, on_cuda=resolve_device(config.device).type == "cuda", mode=mode)
    except UnsupportedError:
        return None


def _peak_values(predicted: PeakBytes | TracedStep | Failure | None, measured: MemoryPeaks | None) -> dict[str, Scalar]:
    """The predicted peak and the measured one as columns, and by how much the prediction is off."""
    values: dict[str, Scalar] = {}
    if isinstance(predicted, Failure):
        values["not_predicted"] = f"{predicted.status}: {predicted.reason}"
        predicted = None
    if predicted is not None:
        values["predicted_gib"] = predicted.peak / GIB
    if measured is not None:
        values["peak_gib"] = measured.peak / GIB
        values |= {"uncompiled": True} if measured.is_uncompiled else {}
        values |= {"cache_gib": measured.cache / GIB} if measured.cache else {}
        values["peak_phase"] = max(measured.by_phase, key=measured.by_phase.__getitem__)
        if predicted is not None:
            values["prediction_error"] = predicted.peak / measured.peak - 1
    return values
