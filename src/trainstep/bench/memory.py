"""`trainstep memory --peaks`: the peak memory of a step, phase by phase, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from trainstep.base.config import StepConfig, StepMode
from trainstep.base.errors import UnsupportedError
from trainstep.bench.tracing import trace_step
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB, MemoryPeaks
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.step import WARMUP, case_columns, memory_values, step_peaks
from trainstep.plan.memory import PeakBytes, peak_bytes
from trainstep.plan.traced import TracedStep
from trainstep.rows import PeakRow
from trainstep.rows.records import Scalar, make_row
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
