"""Operators case by case: cases of one problem are checked first and then timed in turns, so that drift reaches all.

A case that fails, or is wrong, is a row without a time. Compiled code is kept until all are timed. Before every pass a
cache's worth of memory is overwritten, which also keeps the device busy while the host launches the pass; where one
time is too short for that, several times. Compilation is timed apart, and one during the timed passes is counted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trainstep.base.config import PhaseContext
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.stats import in_rounds, ratio_of_rounds, summarize
from trainstep.check.verdict import Verdict
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.outcome import Failure, attempt, caught, failed_row, release_memory
from trainstep.measure.timing import Sample, Timing, device_clock, time_steps
from trainstep.rows.records import Scalar, make_row
from trainstep.step.workload import resolve_device

Case = TypeVar("Case", bound=Hashable)
Pass = Callable[[PhaseContext], object]

PHASES = ("forward", "backward")

FLUSH_BYTES = {"cuda": 512 * 2**20, "cpu": 0}
"""Written before each pass: several times any L2, and a tenth of a millisecond of device time. Nothing on a CPU."""
MOST_FLUSHES = 32
"""Before one pass: some four milliseconds. A pass that the host takes longer to launch, or within which it waits for
the device, is not covered to its end: it has some of the host's time in its own, and an `issue_ms` of more than these.
"""


@dataclass
class Checked:
    """A case that is right: what is known of it besides its times, and the passes timed so far."""

    implementation: Any
    values: dict[str, Scalar]
    passes: list[Sample] = field(default_factory=list)
    recompilations: int = 0

    @property
    def is_timed(self) -> bool:
        """True if it is timed once it is checked."""
        return self.values.get("not_timed") is None


IN_INTERPRETER = "checked in Triton's interpreter, no time"


def require_interpretable(dtype: str) -> None:
    """Raise UnsupportedError for what Triton's interpreter gets wrong."""
    if dtype == "bf16":
        raise UnsupportedError("Triton's interpreter rounds to bfloat16 as no GPU does; choose --dtype fp32,fp16 there")


def time_passes(step: Pass, flush: Tensor, warmup: int, passes: int) -> Timing:
    """Time so many passes of the phases `PHASES` after `warmup` others, on the device of `flush`."""
    clock = device_clock(flush.device)
    return time_steps(step, device=clock, warmup=warmup, steps=passes, cover=flush.zero_, most_covers=MOST_FLUSHES)


def pass_columns(passes: Sequence[Sample]) -> tuple[dict[str, list[float]], dict[str, Scalar]]:
    """The samples of each phase and of both, in milliseconds, and what else a row says of all passes."""
    samples = {name: [each.laps[name].ms for each in passes] for name in PHASES}
    values: dict[str, Scalar] = {"n": len(passes)}
    if passes[0].device_ms is None:
        samples["both"] = [sum(pair) for pair in zip(*samples.values(), strict=True)]
    else:
        samples["both"] = [each.ms for each in passes]  # with the gap between them
        values["issue_ms"] = median(each.issue_ms for each in passes)
    return samples, values


def compilations() -> int:
    """Graphs that torch.compile has compiled so far in this process."""
    return int(counters["stats"]["unique_graphs"])


class Turns(Generic[Case]):
    """An operator's experiment on a device; `run` yields the rows of each problem when they are known."""

    row: ClassVar[type[Any]]
    ratio: ClassVar[type[Any]]
    ours: ClassVar[str]
    """Implementation that ratios hold against each other one."""

    def __init__(self, device: str) -> None:
        self.device = resolve_device(device)

    def problem(self, case: Case) -> Hashable:
        """Settings that a case shares with those that it is measured beside."""
        raise NotImplementedError

    def columns(self, case: Case) -> Mapping[str, Scalar]:
        """The case as its row has it."""
        raise NotImplementedError

    def implementation(self, case: Case) -> Any:
        """The function that the case runs; UnsupportedError where it does not run here."""
        raise NotImplementedError

    def verdict(self, case: Case, implementation: Any) -> Verdict:
        """Errors of the implementation against the oracle."""
        raise NotImplementedError

    def errors(self, verdict: Verdict) -> dict[str, Scalar]:
        """Errors that a row has."""
        return {"error_share": verdict.nearest.share, "error_nearest": verdict.nearest.name}

    def wrong(self, verdict: Verdict) -> tuple[Mapping[str, Scalar], str]:
        """Values and reason of the row of a wrong case."""
        return self.errors(verdict), str(verdict)

    def values(self, case: Case, implementation: Any) -> Mapping[str, Scalar]:
        """Values of a right case besides its errors and times, such as its memory."""
        raise NotImplementedError

    def predicted(self, case: Case) -> Mapping[str, Scalar]:
        """Values that are known without a measurement."""
        return {}

    def rates(self, case: Case, name: str, milliseconds: float) -> Mapping[str, Scalar]:
        """Values that follow from the median of a phase."""
        return {}

    def step(self, case: Case, implementation: Any) -> Pass:
        """A pass, forward and backward, over inputs that are made here."""
        raise NotImplementedError

    def around(self, case: Case) -> AbstractContextManager[None]:
        """Settings of torch under which the passes of a case are timed."""
        return nullcontext()

    def run(self, cases: Iterable[Case], *, warmup: int, passes: int, rounds: int = 1) -> Iterator[Any]:
        """Measure problem by problem; no memory is held from one to the next.

        Args:
            warmup: passes before the timed ones, in each round.
            passes: timed passes of a case, divided among the rounds.
            rounds: turns that the implementations of one problem take, each round in an order drawn anew.

        Raises:
            UsageError: no pass, no round, or no pass before the timed ones.
        """
        if warmup < 1 or passes < 1 or rounds < 1:
            raise UsageError(f"warmup is {warmup}, passes {passes} and rounds {rounds}; expected at least one of each")
        problems: dict[Hashable, list[Case]] = {}
        for case in cases:
            problems.setdefault(self.problem(case), []).append(case)
        for alike in problems.values():
            try:
                rows = self._in_turns(alike, warmup, passes, min(rounds, passes))
            finally:
                release_memory()
            yield from rows
            yield from self.ratios(rows)

    def ratios(self, rows: Sequence[Any]) -> Iterator[Any]:
        """Our implementation over each other one, for rows of one problem and run."""
        timed = [row for row in rows if row.status == "ok" and row.not_timed is None]
        for ours, theirs in ((a, b) for a in timed for b in timed if a.impl == self.ours != b.impl):
            values: dict[str, Scalar] = {"rounds": ours.rounds}
            for name in ours.samples:
                ratio = ratio_of_rounds(*(in_rounds(row.samples[name], row.rounds) for row in (ours, theirs)))
                values[name] = ratio.value
                if ratio.interval is not None:
                    values |= {f"{name}_low": ratio.interval.low, f"{name}_high": ratio.interval.high}
            yield make_row(self.ratio, {**ours.case, "peer": theirs.impl}, values, environment=ours.environment)

    def _in_turns(self, cases: Sequence[Case], warmup: int, passes: int, rounds: int) -> list[Any]:
        found = {case: attempt(partial(self._check, case), drop_compiled=False) for case in cases}
        flush, draw = torch.empty(FLUSH_BYTES[self.device.type], dtype=torch.int8, device=self.device), random.Random(0)
        for part in in_rounds(range(passes), rounds):
            ready = [(case, each) for case, each in found.items() if isinstance(each, Checked) and each.is_timed]
            for case, checked in draw.sample(ready, len(ready)):
                failed = caught(partial(self._time_round, checked, case, flush, warmup, len(part)))
                if isinstance(failed, Failure):
                    found[case] = failed
                    release_memory(drop_compiled=False)  # not after every round: to look for garbage takes longer
        return [self._row(case, result, rounds) for case, result in found.items()]

    def _check(self, case: Case) -> Checked | Verdict:
        before, start = compilations(), time.perf_counter()
        implementation = self.implementation(case)
        verdict = self.verdict(case, implementation)
        check_s = time.perf_counter() - start
        if not verdict.is_right:
            return verdict
        values = {**self.values(case, implementation), **self.errors(verdict), "check_s": check_s}
        return Checked(implementation, values | {"compilations": compilations() - before})

    def _time_round(self, checked: Checked, case: Case, flush: Tensor, warmup: int, passes: int) -> None:
        before = compilations()
        with self.around(case):
            checked.passes += time_passes(self.step(case, checked.implementation), flush, warmup, passes).samples
        checked.recompilations += compilations() - before
        checked.values |= gpu_state(self.device)

    def _row(self, case: Case, result: Checked | Verdict | Failure, rounds: int) -> Any:
        columns, environment, predicted = self.columns(case), describe(self.device), self.predicted(case)
        row = partial(make_row, self.row, columns, environment=environment)
        if isinstance(result, Failure):  # a case that did not fit is shown beside what it would have needed
            return failed_row(self.row, columns, result, environment, predicted)
        if isinstance(result, Verdict):
            values, reason = self.wrong(result)
            return row(values, status="wrong", reason=reason)
        if not result.is_timed:
            return row({**result.values, **predicted})
        samples, values = pass_columns(result.passes)
        values |= {"rounds": rounds, "recompilations_timed": result.recompilations}
        for name, milliseconds in samples.items():
            summary = summarize(milliseconds)
            values |= {**summary.columns(name), **self.rates(case, name, summary.median)}
        return row({**values, **result.values, **predicted}, samples=samples)
