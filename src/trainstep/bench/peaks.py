"""`trainstep memory --peaks`: the most memory of forward alone and of a full step, phase by phase, case by case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from trainstep.bench.outcome import Failure, attempt
from trainstep.bench.step import case_columns, memory_values, step_peaks
from trainstep.config import StepConfig, StepMode
from trainstep.errors import UnsupportedError
from trainstep.kinds import row_of
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB, MemoryPeaks
from trainstep.plan.memory import peak_bytes
from trainstep.records import Row, Scalar
from trainstep.training_step import build_step
from trainstep.workload import WorkloadSource, resolve_device

WARMUP = 2
"""Steps before the one that is measured: the optimizer has its state and libraries their workspaces."""
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


def peak_records(source: WorkloadSource, configs: Iterable[StepConfig], modes: Sequence[StepMode]) -> Iterator[Row]:
    """One row per configuration and mode; one that does not fit is a row too."""
    for config in configs:
        environment = describe(resolve_device(config.device))
        for mode in modes:
            case = case_columns(source, config) | {"mode": mode}
            predicted = _predicted(source, config) if mode == "step" else None
            values: dict[str, Scalar] = {} if predicted is None else {"predicted_gib": predicted / GIB}
            found = attempt(partial(measure_peaks, source, config, mode))
            if isinstance(found, Failure):
                yield row_of("peak", case, values, {}, found.status, found.reason, environment)
                continue
            values |= memory_values(found) | {"peak_phase": max(found.by_phase, key=found.by_phase.__getitem__)}
            if predicted is not None:
                values["prediction_error"] = predicted / found.peak - 1
            yield row_of("peak", case, values, environment=environment)


def _predicted(source: WorkloadSource, config: StepConfig) -> int | None:
    """The predicted peak of a full step, where there is a formula."""
    if source.model is None:
        return None
    try:
        on_cuda = resolve_device(config.device).type == "cuda"
        return peak_bytes(source.model, config, on_cuda=on_cuda).peak
    except UnsupportedError:
        return None
