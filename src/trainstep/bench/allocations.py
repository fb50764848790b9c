"""`trainstep memory --timeline` and `--from`: every allocation of a step, and who owns the peak, as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from trainstep.base.config import StepConfig, StepMode
from trainstep.base.errors import UnsupportedError
from trainstep.bench.memory import UNFOLLOWED
from trainstep.measure.allocations.loading import imported_timelines
from trainstep.measure.allocations.recording import Recording, StepWatch, record_on_cpu, record_on_cuda
from trainstep.measure.allocations.rows import groups_by_owner, groups_by_size, timeline_rows
from trainstep.measure.allocations.snapshot import write_snapshot
from trainstep.measure.environment import describe
from trainstep.measure.memory import GIB
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.step import WARMUP, case_columns
from trainstep.rows import MemoryTimelineRow
from trainstep.rows.records import Row, Scalar
from trainstep.step.training_step import TrainingStep, uncompiled
from trainstep.step.workload import WorkloadSource, resolve_device


def record_step(source: WorkloadSource, config: StepConfig, mode: StepMode = "step") -> Recording:
    """Build the workload, take `WARMUP` steps, and record the next, all of them in this mode.

    Raises:
        UnsupportedError: compiled code on a CPU, whose allocations cannot be followed.
    """
    config.require_kernels()
    device = resolve_device(config.device)
    if device.type == "cpu" and config.compile != "off":
        raise UnsupportedError(UNFOLLOWED)
    workload = source.build(config)
    losses: list[Callable[..., Tensor]] = [workload.loss]
    step = TrainingStep(dataclasses.replace(workload, loss=lambda *args: losses[-1](*args)), config)
    for _ in range(WARMUP):
        step(step.next_batch(), mode=mode)
    batch = step.next_batch()
    watch = StepWatch(step.module, [step.optimizer], sees_modules=config.compile == "off")
    losses.append(watch.loss_of(workload.loss))
    take = partial(step, batch, mode=mode, phase=watch.phase)
    on_gpu = device.type == "cuda"
    with uncompiled():  # modules and lines are seen in eager code only
        found = record_on_cuda(take, watch, batch, device) if on_gpu else record_on_cpu(take, watch, batch)
    return dataclasses.replace(found, is_uncompiled=step.compiles_by_itself)


def allocation_records(
    source: WorkloadSource, config: StepConfig, mode: StepMode = "step", snapshot: Path | None = None
) -> Iterator[Row]:
    """The timeline of one step, who owns its peak, and the largest allocations.

    Args:
        mode: forward alone (without gradients), forward and backward, or a whole step.
        snapshot: where to write the step's memory snapshot, if anywhere.
    """
    case, environment = case_columns(source, config) | {"mode": mode}, describe(resolve_device(config.device))
    found = attempt(partial(record_step, source, config, mode))
    if isinstance(found, Failure):
        yield failed_row(MemoryTimelineRow, case, found, environment)
        return
    extra: dict[str, Scalar] = {"uncompiled": True} if found.is_uncompiled else {}
    if found.allocator_peak is not None:
        extra["allocator_gib"] = found.allocator_peak / GIB
    if snapshot is not None:
        write_snapshot(found.snapshot, snapshot)
        extra["snapshot"] = snapshot.name
    own = {**case, "environment": environment}
    yield from timeline_rows(found.timeline, groups_by_owner(found.timeline), own, extra)


def imported_records(path: Path) -> Iterator[Row]:
    """The same of anyone's snapshot, one device after the other; owners are its categories, or lines of code.

    Raises:
        UsageError: as `imported_timelines`.
    """
    for device, timeline in imported_timelines(path).items():
        yield from timeline_rows(timeline, groups_by_size(timeline), {"workload": path.name, "device": device}, {})
