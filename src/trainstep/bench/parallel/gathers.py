"""`bench parallel --gathers`: whether a sharded scheme's gathers are over when forward and backward need them.

Two functions of a group are marked while `Gathers` watches, of ours and of torch's FSDP2 alike: the one that starts its
gather, and the one that waits for it. A gather is needed when what computes comes to the call that waits; it is late by
as much as it ends after that. On a CPU the host's clock tells both, on a GPU events: one in the stream that computes,
the other in a stream that only waits for the gather. A call that waits for its own gather (FSDP2's over Gloo) needs it
at once. Over Gloo our ranks agree before each gather, and wait for that as well: that is no part of these figures.

The steps are taken once without a profiler and once under it: it makes every launch longer, so gathers start later, and
some are late for no other reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.trace import WARMUP
from trainstep.bench.parallel.waits import Function, Phases, replaced
from trainstep.measure.outcome import Failure, attempt_on_all_ranks, failed_row
from trainstep.measure.profile.ranges import record_steps
from trainstep.measure.timing import device_clock, time_steps
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.fsdp.schedule import Schedule
from trainstep.parallel.gloo import when_over
from trainstep.parallel.process import Process
from trainstep.rows import ParallelGatherRow, ParallelRow
from trainstep.step.training_step import TrainingStep

STEPS = 5
"""Number of steps of which the median one is reported, without the profiler and under it."""
REST = "what is outside of blocks"

_MARKED: Sequence[tuple[type, str, str]] = (
    (GatherGroup, "gather", "wait"),
    (FSDPParamGroup, "unshard", "wait_for_unshard"),
)
"""Kinds of groups, with what starts a gather of one and what waits for it."""

Key = tuple[str, str, int]
"""The phase that needs a gather, the block that is gathered, and how often it was in that phase before."""


@dataclass
class Gather:
    """A gather of a group, as marks."""

    block: str
    started: Any
    ended: Any = None
    needed: Any = None
    phase: str = ""


@dataclass(frozen=True)
class GatherTimes:
    """In milliseconds from the step's beginning."""

    started: float
    ended: float
    needed: float
    exposed: float
    """By how much the gather ended after it was needed; 0 where it did not."""


def total_exposed(times: Mapping[Key, GatherTimes]) -> float:
    """Time that a step waits for all of its gathers."""
    return sum(each.exposed for each in times.values())


class Gathers(Phases):
    """The gathers of the steps that are taken inside `watching`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._steps: list[tuple[Any, list[Gather]]] = []  # of each, when it began
        self._open: dict[object, Gather] = {}  # by group, those that nobody has waited for
        self._called: dict[object, Any] = {}  # by group, when a call that needs it began

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, start, wait in _MARKED:
                stack.enter_context(replaced(owner, start, self._starting))
                stack.enter_context(replaced(owner, wait, self._waiting))
            stack.enter_context(replaced(Schedule, "gather", self._calling))
            yield

    def begin(self) -> None:
        super().begin()
        self._steps.append((self.began, []))
        self._open.clear()
        self._called.clear()

    def times(self, steps: int) -> dict[Key, GatherTimes]:
        """Times of the gathers, as they are needed, in the step that waits a median time for them."""
        taken = [self._times_of(*each) for each in self._steps[-steps:]]
        return sorted(taken, key=total_exposed)[len(taken) // 2]

    def _times_of(self, began: Any, gathers: Sequence[Gather]) -> dict[Key, GatherTimes]:
        found: dict[Key, GatherTimes] = {}
        for each in gathers:
            started, ended, needed = (self.marks.ms(began, mark) for mark in (each.started, each.ended, each.needed))
            before = sum(key[:2] == (each.phase, each.block) for key in found)
            found[each.phase, each.block, before] = GatherTimes(started, ended, needed, max(0.0, ended - needed))
        return found

    def _starting(self, start: Function) -> Function:
        def starting(group: Any, *args: Any, **kwargs: Any) -> Any:
            before, started = _under_way(group), self.marks.now()
            result = start(group, *args, **kwargs)
            if self.phase is not None and before is None and (pending := _under_way(group)) is not None:
                self._open[group] = gather = Gather(_block(group), started)
                self._watch_end(gather, *pending)
            return result

        return starting

    def _calling(self, gather: Function) -> Function:
        """Ours begins by starting gathers of what follows."""

        def calling(schedule: Schedule, groups: Sequence[GatherGroup], *ahead: Any) -> None:
            self._called |= dict.fromkeys(groups, self.marks.now())
            gather(schedule, groups, *ahead)

        return calling

    def _watch_end(self, gather: Gather, event: Any, work: Any) -> None:
        if self.marks.stream is not None:
            wait = work.wait if event is None else lambda: torch.cuda.current_stream().wait_event(event)
            gather.ended = self.marks.after(wait)
        elif work is None:
            gather.ended, gather.needed = self.marks.now(), gather.started
        else:
            when_over(work, lambda: setattr(gather, "ended", self.marks.now()))

    def _waiting(self, wait: Function) -> Function:
        def waiting(group: Any) -> Any:
            gather = self._open.pop(group, None)
            if gather is not None:
                gather.phase = str(self.phase)
                gather.needed = gather.needed or self._called.get(group) or self.marks.now()
                self._steps[-1][1].append(gather)
            return wait(group)

        return waiting


def _under_way(group: Any) -> tuple[Any, Any] | None:
    """Marks of the end of a group's gather: an event of a GPU's stream, and the work of a call; None while there is
    none."""
    if isinstance(group, GatherGroup):
        pending = group.under_way if group.communicates else None
        return None if pending is None else (pending.event, pending.work)
    result = group._all_gather_result
    return None if result is None else (result.all_gather_event, result.all_gather_work)


def _block(group: Any) -> str:
    return group.name if isinstance(group, GatherGroup) else group._module_fqn or REST


def gather_times(build: Callable[[], TrainingStep], process: Process, *, profiled: bool) -> dict[Key, GatherTimes]:
    """Build a step, warm it up, and take a few with marks. All ranks call it."""
    step = build()
    batch = step.next_batch()
    for _ in range(WARMUP):
        step(batch)
    gathers, device = Gathers(process.device), device_clock(process.device)
    take = gathers.around(lambda phase: step(batch, phase=phase))
    with gathers.watching(), tempfile.TemporaryDirectory() as folder:
        if profiled:
            settings: Mapping[str, Any] = {"on_gpu": process.device.type == "cuda", "prepare_next": lambda: None}
            trace = Path(folder) / "trace.json.gz"
            record_steps(take, module=None, device=device, steps=STEPS, trace=trace, **settings)
        else:
            time_steps(take, device=device, warmup=1, steps=STEPS)
    return gathers.times(STEPS)


def gather_rows(
    cases: Sequence[ParallelCase],
    rows: Mapping[ParallelCase, ParallelRow],
    process: Process,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[ParallelGatherRow]:
    """Rows of every case's gathers, of the rank that waits longest for them; rank 0 gets them. All ranks iterate.

    `rows` are those of the cases. No step without the profiler follows one under it.
    """
    found: dict[tuple[ParallelCase, bool], Sequence[dict[Key, GatherTimes]] | Failure] = {}
    for profiled in (False, True):
        for case in cases:
            on_part(f"{case.label}: gathers are marked{', under the profiler' if profiled else ''}")
            taken = partial(gather_times, partial(case.build, process), process, profiled=profiled)
            found[case, profiled] = attempt_on_all_ranks(taken, process)
    if process.rank == 0:
        for case in cases:
            yield from _rows(rows[case], found[case, False], found[case, True])


def _rows(
    row: ParallelRow,
    plain: Sequence[dict[Key, GatherTimes]] | Failure,
    profiled: Sequence[dict[Key, GatherTimes]] | Failure,
) -> Iterator[ParallelGatherRow]:
    if isinstance(plain, Failure):
        case = {**row.case, "phase": "forward", "block": "all", "place": 0}
        yield failed_row(ParallelGatherRow, case, plain, row.environment)
        return
    rank, longest = max(enumerate(plain), key=lambda each: total_exposed(each[1]))
    beside = {} if isinstance(profiled, Failure) else profiled[rank]
    for place, (key, times) in enumerate(longest.items()):
        under = beside.get(key)
        yield ParallelGatherRow(
            **{**row.case, "phase": key[0], "block": key[1], "place": place},  # type: ignore[arg-type]
            rank=rank,
            steps=STEPS,
            started_ms=times.started,
            ended_ms=times.ended,
            needed_ms=times.needed,
            exposed_ms=times.exposed,
            profiled_exposed_ms=None if under is None else under.exposed,
            step_ms=row.step_ms,
            environment=row.environment,
        )
