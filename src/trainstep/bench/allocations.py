"""`trainstep memory --timeline` and `--from`: every allocation of a step, and who owns the peak, as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainstep.bench.allocation_rows import groups_by_owner, groups_by_size, timeline_rows
from trainstep.bench.outcome import Failure, attempt
from trainstep.bench.peaks import UNFOLLOWED, WARMUP
from trainstep.bench.step import case_columns
from trainstep.config import StepConfig
from trainstep.errors import UnsupportedError
from trainstep.kinds import row_of
from trainstep.measure.allocations.attribution import StepWatch
from trainstep.measure.allocations.cpu import record_on_cpu
from trainstep.measure.allocations.cuda import record_on_cuda
from trainstep.measure.allocations.snapshot import imported_timelines, snapshot_of
from trainstep.measure.allocations.snapshot_file import load_snapshot, write_snapshot
from trainstep.measure.allocations.timeline import Timeline
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB
from trainstep.records import Row, Scalar
from trainstep.training_step import TrainingStep
from trainstep.workload import WorkloadSource, resolve_device


@dataclass(frozen=True)
class RecordedStep:
    """One step's allocations."""

    timeline: Timeline
    snapshot: Mapping[str, Any]
    allocator_peak: int | None
    """Bytes asked for at the peak as the GPU's allocator counts them; None on a CPU."""


def record_step(source: WorkloadSource, config: StepConfig) -> RecordedStep:
    """Build the workload, take `WARMUP` steps, and record the next.

    Raises:
        UnsupportedError: compiled code on a CPU, whose allocations cannot be followed.
    """
    device = resolve_device(config.device)
    if device.type == "cpu" and config.compile != "off":
        raise UnsupportedError(UNFOLLOWED)
    workload = source.build(config)
    losses: list[Callable[..., Tensor]] = [workload.loss]
    step = TrainingStep(dataclasses.replace(workload, loss=lambda *args: losses[-1](*args)), config)
    for _ in range(WARMUP):
        step(step.next_batch())
    batch = step.next_batch()
    watch = StepWatch(step.module, step.optimizer, sees_modules=config.compile == "off")
    losses.append(watch.loss_of(workload.loss))

    def take() -> None:
        step(batch, phase=watch.phase)

    if device.type == "cuda":
        recording = record_on_cuda(take, watch, batch, device)
        return RecordedStep(recording.timeline, recording.snapshot, recording.allocator_peak)
    timeline = record_on_cpu(take, watch, batch)
    return RecordedStep(timeline, snapshot_of(timeline), None)


def allocation_records(source: WorkloadSource, config: StepConfig, snapshot: Path | None = None) -> Iterator[Row]:
    """The timeline of one step, who owns its peak, and the largest allocations.

    Args:
        snapshot: where to write the step's memory snapshot, if anywhere.
    """
    case, environment = case_columns(source, config), describe(resolve_device(config.device))
    found = attempt(partial(record_step, source, config))
    if isinstance(found, Failure):
        yield row_of("memory-timeline", case, {}, {}, found.status, found.reason, environment)
        return
    extra: dict[str, Scalar] = {}
    if found.allocator_peak is not None:
        extra["allocator_gib"] = found.allocator_peak / GIB
    if snapshot is not None:
        write_snapshot(found.snapshot, snapshot)
        extra["snapshot"] = snapshot.name
    yield from timeline_rows(found.timeline, groups_by_owner(found.timeline), case, extra, environment)


def imported_records(path: Path) -> Iterator[Row]:
    """The same of anyone's snapshot, one device after the other; owners are its categories, or lines of code.

    Raises:
        UsageError: as `load_snapshot`.
    """
    for device, timeline in imported_timelines(load_snapshot(path)).items():
        case: dict[str, Scalar] = {"workload": path.name, "device": device}
        yield from timeline_rows(timeline, groups_by_size(timeline), case, {}, {})
