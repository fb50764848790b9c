"""A step of a scheme under the profiler: what rank 0 computes and communicates, and how much of it at once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainstep.measure.outcome import Failure, failed_row
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import Kernel, KernelProfile, profile_of
from trainstep.measure.profile.overlap import Span, length, overlap_of
from trainstep.measure.profile.ranges import record_steps
from trainstep.measure.profile.rows import UNKNOWN, timeline_values
from trainstep.measure.profile.trace import Trace
from trainstep.measure.timing import device_clock
from trainstep.parallel.process import Process
from trainstep.rows import ParallelFamilyRow, ParallelRow, ParallelTraceRow
from trainstep.rows.records import Scalar, make_row
from trainstep.step.training_step import TrainingStep

WARMUP = 3
"""Steps before the profiler starts: schemes learn the order of gradients, and allocate, in the first ones."""
LONGEST = 1_500
"""Bars of one scheme's timeline: a page draws those of many schemes below one another."""
SHORTEST_SHARE = 1 / 2000
"""Exposed communication is drawn from this share of the step on; the sums have all of it."""


@dataclass(frozen=True)
class TracedStep:
    """Record that rank 0 made of one step."""

    profile: KernelProfile
    phases: Mapping[str, Span]
    """Phase → when it began and ended, in microseconds of the profile's clock."""
    wall_ms: float
    """By the host's clock, the profiler's own cost included."""


def traced_step(build: Callable[[], TrainingStep], process: Process, file: Path) -> TracedStep | None:
    """Build the step anew, warm it up and record one into `file` (`.json.gz`); what rank 0 recorded, None elsewhere.

    All ranks run the profiler, so that none waits for another's. Modules and shapes are left out, which keeps its cost
    small.
    """
    step = build()
    batch = step.next_batch()
    for _ in range(WARMUP):
        step(batch)
    with tempfile.TemporaryDirectory() as folder:
        trace = file if process.rank == 0 else Path(folder) / "trace.json.gz"
        timing = record_steps(lambda phase: step(batch, phase=phase), device_clock(process.device), 1, trace)
    if process.rank != 0:
        return None
    read = read_chrome_trace(file)
    profile = profile_of(read)
    return TracedStep(profile, phases_of(read, profile), timing.samples[-1].wall_ms)


def phases_of(trace: Trace, profile: KernelProfile) -> dict[str, Span]:
    """Spans of each phase on the device.

    On a CPU that is when the host was in it. On a GPU, from the first to the last kernel that was launched in it,
    without communication, which runs on into later phases; only what "communication" launches counts in full.
    """
    if profile.is_cpu:
        return {each.name: (each.start, each.end) for each in trace.ranges if each.kind == "phase"}
    found: dict[str, Span] = {}
    for each in profile.kernels:
        if each.phase is not None and (each.lane != "communication" or each.phase == "communication"):
            first, last = found.get(each.phase, (each.start_us, each.end_us))
            found[each.phase] = (min(first, each.start_us), max(last, each.end_us))
    return found


def trace_rows(
    row: ParallelRow, found: Sequence[TracedStep | None] | Failure, *, trace: str
) -> Iterator[ParallelTraceRow | ParallelFamilyRow]:
    """All rows of a traced step, or the one of why there is none."""
    yield trace_row(row, found, trace=trace)
    yield from family_rows(row, found)


def trace_row(row: ParallelRow, found: Sequence[TracedStep | None] | Failure, *, trace: str) -> ParallelTraceRow:
    """The row of a traced step: its overlap in milliseconds, and its bars as series.

    `row` is of the same scheme, timed without the profiler; of what the ranks recorded, rank 0's is shown.
    """
    if isinstance(found, Failure):
        return failed_row(ParallelTraceRow, row.case, found, row.environment)
    shown = found[0]
    assert shown is not None, "rank 0 records"
    profile = shown.profile
    overlap = overlap_of(profile.kernels)
    communication = length(overlap.communication)
    drawn, series = timeline_values(profile, next(iter(profile.by_step), None), LONGEST)
    kept = {name: column for name, column in series.items() if not name.startswith("module")}
    start = min((each.start_us for each in profile.kernels), default=0.0)
    shortest = overlap.span_us * SHORTEST_SHARE
    kept |= _spans("exposed", [(first, last) for first, last in overlap.exposed if last - first >= shortest], start)
    kept |= _spans("phase_span", list(shown.phases.values()), start) | {"phase_span_names": list(shown.phases)}
    values: dict[str, Scalar] = drawn | {
        "on_cpu": profile.is_cpu,
        "step_ms": row.times["step"].median,
        "profiled_step_ms": shown.wall_ms,
        "span_ms": overlap.span_us / 1e3,
        "computation_ms": length(overlap.computation) / 1e3,
        "communication_ms": communication / 1e3,
        "hidden_communication_ms": length(overlap.hidden) / 1e3,
        "exposed_communication_ms": length(overlap.exposed) / 1e3,
        "hidden_share": length(overlap.hidden) / communication if communication else None,
        "idle_ms": overlap.idle_us / 1e3,
        "trace": trace,
        "exposed_from_us": shortest,
    }
    return make_row(ParallelTraceRow, row.case, values, series=kept, environment=row.environment)


def family_rows(row: ParallelRow, found: Sequence[TracedStep | None] | Failure) -> Iterator[ParallelFamilyRow]:
    """Rows of the traced step's kernel time by phase and family, the most first; none of a failure."""
    if isinstance(found, Failure) or found[0] is None:
        return
    computing = [each for each in found[0].profile.kernels if each.lane == "compute"]
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for each in computing:
        groups.setdefault((each.phase or UNKNOWN, each.family), []).append(each)
    whole = sum(each.duration_us for each in computing)
    took = {place: sum(each.duration_us for each in group) for place, group in groups.items()}
    for (phase, family), us in sorted(took.items(), key=lambda item: -item[1]):
        values: dict[str, Scalar] = {"kernels": len(groups[phase, family]), "ms": us / 1e3, "share": us / whole}
        case = {**row.case, "phase": phase, "family": family}
        yield make_row(ParallelFamilyRow, case, values, environment=row.environment)


def _spans(name: str, intervals: Sequence[Span], start: float) -> dict[str, Sequence[Scalar]]:
    """Intervals in nanoseconds from the step's first kernel; what was before it (of a phase of the host) is cut off."""
    cut = [(max(0.0, first - start), max(0.0, last - start)) for first, last in intervals]
    return {
        f"{name}_start_ns": [round(first * 1e3) for first, _ in cut],
        f"{name}_duration_ns": [round((last - first) * 1e3) for first, last in cut],
    }
