"""The ladder: from the plain step upwards, one change per rung, each rung checked before it is timed.

Every rung is rebuilt from the same seed and judged beside the plain step (`check.step`): in float32, in its own
precision, with initial and with trained weights, and by its updates. Only what is right is timed: alone, which gives
its memory and how it trains on the same batches as all others, and then in turns with the rung kept before, A B B A,
both built in one process. A rung's gain is the median of the pairs' ratios: what slows the machine for a while is in
both of a pair. Where the ratios scatter too much to tell, more turns are taken. A rung that is faster is built upon,
and one that is smaller if it is certainly not much slower (`NO_SLOWER`). The speed-up over the first rung is the
product of the gains of what was kept.

Two steps that do not fit into memory together are timed one after the other instead, both anew, and the row says so. A
rung that was not kept is tried once more on the top, where it may bring what it did not bring below, or have the memory
that it had not. Last, the first rung and the top are measured again, as controls, in turns too: a speed-up that this
does not find is not claimed.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from trainstep.base.advice import Line
from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.stats import RUN_SPREAD, Interval, Ratio, product, ratio_of_medians, ratio_of_pairs, verdict
from trainstep.bench.step import (
    StepMeasurement,
    StepRunner,
    case_columns,
    measure_training_step,
    measured_fields,
    phase_samples,
)
from trainstep.check.step import StepCheck, Verdict, plain_form
from trainstep.ladder.change import Change, changes_of_step
from trainstep.measure.environment import describe
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.timing import Sample, Timing, device_clock, time_in_turns
from trainstep.rows import FIRST_THAT_FITS, ON_TOP, ControlRow, RungRow
from trainstep.rows.records import Status
from trainstep.step.training_step import TrainingStep, build_step
from trainstep.step.workload import WorkloadSource, resolve_device

NO_SLOWER = 0.98
"""A change that saves memory is kept where the whole interval of its gain is above this."""

WIDE = 0.08
"""More turns are taken while a gain's interval is wider than this part of it, unless it decides all the same."""
MOST_TURNS = 4
"""Times the steps asked for, at most."""


MAKES_ROOM: Mapping[str, Any] = {"attention": "sdpa"}
"""Tried first where the baseline is too large: the memory of attention as it is written grows with length squared."""


@dataclass(frozen=True)
class Turns:
    """Two rungs in turns."""

    before: Sequence[Sample]
    """Of the rung that was kept before."""
    own: Sequence[Sample]
    attempts: int
    """How often turns were taken."""

    @property
    def gain(self) -> Ratio:
        """The first's time over the second's."""
        return ratio_of_pairs([each.wall_ms for each in self.before], [each.wall_ms for each in self.own])


@dataclass
class Climbed:
    """One rung that was judged, and timed if it is right."""

    config: StepConfig
    check: Verdict
    check_s: float
    """Seconds of the check, compilation included."""
    alone: list[StepMeasurement] = field(default_factory=list)
    """Measured by itself, when it was checked and where it was measured again."""
    turns: Turns | None = None
    """In turns with the rung kept before: None for the first, and where both together do not fit into memory."""
    speedup: Ratio = field(default_factory=lambda: Ratio(1.0, Interval(1.0, 1.0)))
    """Over the first rung."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Its timed steps: in turns, or else alone."""
        if self.turns is not None:
            return tuple(self.turns.own)
        return tuple(sample for run in self.alone for sample in run.timing.samples)

    @property
    def wall_ms(self) -> list[float]:
        """Milliseconds of the timed steps."""
        return [sample.wall_ms for sample in self.samples]


def climb(
    source: WorkloadSource,
    base: StepConfig,
    *,
    warmup: int = 3,
    steps: int = 10,
    changes: Sequence[Change] | None = None,
    judge: StepCheck | None = None,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[RungRow | ControlRow]:
    """Climb from `base` and yield a row of kind "rung" for every rung, the first included.

    A baseline that fails is the only row, unless it is too large: then the first rung that fits is what others are
    compared with.

    Last come rows of kind "control": the first rung and the top measured once more. Their ratios to themselves should
    contain 1; if they do not, the machine changed during the climb, and the report says so.

    Args:
        warmup, steps: of each measurement, at least 0 and 1.
        changes: what is tried, in this order; by default all that may help.
        judge: one that has judged steps of this workload; it is taken where its reference is this plain step.
        on_part: called with the name of each rung before it is built, compiled, checked and timed.

    Raises:
        UsageError: no step to time, or a warm-up below 0.
    """
    if steps < 1 or warmup < 0:
        raise UsageError(f"steps is {steps} and warmup {warmup}; expected at least one step and a warm-up of 0 or more")
    device = resolve_device(base.device)
    plain = plain_form(base)
    if judge is None or judge.plain != plain or judge.is_stood_in_for:
        judge = StepCheck(source, plain)
    ladder = _Ladder(source, base, judge, device, warmup, steps)
    rungs = changes_of_step(source, device.type, base) if changes is None else list(changes)
    first = Change("baseline", Line(""))
    on_part(_part(first.name, first))
    baseline = ladder.try_rung(first)
    yield baseline
    if baseline.status not in ("ok", "out of memory"):
        return  # there is nothing to compare with; what is too large may fit in another form
    if baseline.status == "out of memory":
        rungs = sorted(rungs, key=lambda rung: rung.step != MAKES_ROOM)  # what makes room for the others
    for rung in rungs:
        on_part(_part(rung.name, rung))
        yield ladder.try_rung(rung)
    for rung in rungs:
        if ladder.is_worth_another_try(rung):
            on_part(_part(rung.name + ON_TOP, rung))
            yield ladder.try_rung(rung, is_on_top=True)
    on_part("ladder: the first rung and the top again")
    yield from ladder.controls()


def _part(name: str, rung: Change) -> str:
    work = "compiled, checked and timed" if "compile" in rung.step else "checked and timed"
    return f"ladder: {name}, {work}"


class _Ladder:
    """What the climb remembers: what is right, the best rung so far, and what each change was tried on."""

    def __init__(
        self, source: WorkloadSource, base: StepConfig, judge: StepCheck, device: torch.device, warmup: int, steps: int
    ) -> None:
        self.source, self.base, self.judge, self.device = source, base, judge, device
        self.warmup, self.steps = warmup, steps
        self.first: Climbed | None = None
        self.kept: Climbed | None = None
        self._left: dict[str, StepConfig] = {}
        """Rungs that ran and were not kept, or were too large, with the configuration they were tried on."""

    def try_rung(self, rung: Change, *, is_on_top: bool = False) -> RungRow:
        before = self.kept.config if self.kept else self.base
        config = dataclasses.replace(before, **rung.step)
        case = {"rung": rung.name + ON_TOP * is_on_top} | case_columns(self.source, config)
        environment = describe(self.device)
        result = attempt(partial(self._checked, config))
        row = partial(RungRow, **case, environment=environment)
        if isinstance(result, Failure):
            if result.status == "out of memory":
                self._left[rung.name] = before
            return dataclasses.replace(failed_row(RungRow, case, result, environment), verdict=result.status)
        if why := result.check.not_told:
            status: Status = "unsupported"
            return row(**result.check.columns(), verdict=status, kept=False, status=status, reason=why)
        if not result.check.is_right:
            return row(**result.check.columns(), verdict="wrong", kept=False, status="wrong", reason=str(result.check))
        judged = self._compare(result, "baseline" if config == self.base else FIRST_THAT_FITS)
        if not judged["kept"]:
            self._left[rung.name] = before
        return row(
            **result.check.columns(),
            **measured_fields(result.alone[-1], Timing(result.samples, 0), config.precision)
            | {"first_step_ms": result.alone[0].timing.first.wall_ms},
            **judged,
            check_s=result.check_s,
            samples=_samples(result),
        )

    def is_worth_another_try(self, rung: Change) -> bool:
        """Whether it was left, and something else was kept since that it would not undo."""
        if self.kept is None or rung.name not in self._left:
            return False
        before, now = self._left[rung.name], self.kept.config
        return before != now and all(getattr(before, name) == getattr(now, name) for name in rung.step)

    def controls(self) -> Iterator[ControlRow]:
        """The first rung and the top again, at the end of the climb: in turns, or alone where that does not fit."""
        if self.first is None or self.kept is None:
            return
        every = [self.first] if self.kept is self.first else [self.first, self.kept]
        found = attempt(partial(self._in_turns, self.first.config, self.kept.config)) if len(every) > 1 else None
        for place, rung in enumerate(every):
            if isinstance(found, Turns):
                row = self._control(rung, (found.before, found.own)[place])
                yield dataclasses.replace(row, **_ratio_fields("speedup", found.gain)) if place else row
            else:
                again = attempt(partial(self._timed, rung.config))
                yield self._control(rung, again if isinstance(again, Failure) else again.timing.samples)

    def _control(self, rung: Climbed, again: Sequence[Sample] | Failure) -> ControlRow:
        case, environment = case_columns(self.source, rung.config), describe(self.device)
        if isinstance(again, Failure):
            return failed_row(ControlRow, case, again, environment)
        samples = [sample.wall_ms for sample in again]
        return ControlRow(
            **case,
            first_ms=statistics.median(rung.wall_ms),
            again_ms=statistics.median(samples),
            **_ratio_fields("ratio", ratio_of_medians(samples, rung.wall_ms)),
            samples={"step": samples},
            environment=environment,
        )

    def _checked(self, config: StepConfig) -> Climbed:
        start = time.perf_counter()
        step, check = self.judge.start(config)
        found = Climbed(config, check, time.perf_counter() - start)
        if check.is_right:
            found.alone.append(measure_training_step(step, self.source, "step", self.warmup, self.steps))
            start = time.perf_counter()
            found.check = self.judge.end(step, check)
            found.check_s += time.perf_counter() - start
        if found.check.is_right and self.kept is not None:
            turns = attempt(partial(self._in_turns, self.kept.config, step), drop_compiled=False)
            found.turns = turns if isinstance(turns, Turns) else None
        return found

    def _in_turns(self, before: StepConfig, own: StepConfig | TrainingStep) -> Turns:
        steps = [build_step(self.source, each) if isinstance(each, StepConfig) else each for each in (before, own)]
        runners = [StepRunner(step) for step in steps]
        taken: list[list[Sample]] = [[], []]
        number = 0
        while number < MOST_TURNS and (number == 0 or _is_open(Turns(taken[0], taken[1], number).gain)):
            number += 1
            more = time_in_turns(
                [runner.run for runner in runners],
                device=device_clock(self.device),
                warmup=self.warmup if number == 1 else 0,
                rounds=self.steps,
                after_step=[runner.prepare_next for runner in runners],
            )
            taken = [[*known, *new] for known, new in zip(taken, more, strict=True)]
        return Turns(taken[0], taken[1], number)

    def _timed(self, config: StepConfig) -> StepMeasurement:
        return measure_training_step(build_step(self.source, config), self.source, "step", self.warmup, self.steps)

    def _compare(self, rung: Climbed, first: str) -> dict[str, Any]:
        """What it brings; it becomes the rung to build upon if it is faster, or smaller and certainly not slower.

        `first` is what a rung is called that has none before it.
        """
        if self.kept is None:
            self.first = self.kept = rung
            one = Ratio(1.0, None)
            known = _ratio_fields("speedup", one) | _ratio_fields("gain", one)
            return {**known, "verdict": first, "kept": True, "attempts": 1}
        gain = rung.turns.gain if rung.turns is not None else self._one_after_the_other(self.kept, rung)
        rung.speedup, called = product([self.kept.speedup, gain]), verdict(gain)
        no_slower = gain.interval is not None and gain.interval.low >= NO_SLOWER
        keep = called == "faster" or (no_slower and _is_smaller(rung, self.kept))
        if keep:
            self.kept = rung
        known = _ratio_fields("speedup", rung.speedup) | _ratio_fields("gain", gain)
        attempts = rung.turns.attempts if rung.turns is not None else len(rung.alone)
        return {**known, "verdict": called, "kept": keep, "attempts": attempts, "in_turns": rung.turns is not None}

    def _one_after_the_other(self, kept: Climbed, rung: Climbed) -> Ratio:
        """The gain where both together do not fit: each is measured once more, and all that each took alone counts."""
        for each in (kept, rung):
            again = attempt(partial(self._timed, each.config))
            if not isinstance(again, Failure):
                each.alone.append(again)
        over, under = ([sample.wall_ms for run in each.alone for sample in run.timing.samples] for each in (kept, rung))
        return ratio_of_medians(over, under)


def _is_open(gain: Ratio) -> bool:
    """Whether more turns may find a difference; a narrow interval around 1 says that there is none."""
    found = gain.interval
    return found is not None and verdict(gain) == "inconclusive" and found.high - found.low > WIDE * gain.value


def _is_smaller(rung: Climbed, than: Climbed) -> bool:
    """Whether the rung's peak is known and lower by more than runs differ; of steps measured again, the last one's."""
    own, other = rung.alone[-1].memory, than.alone[-1].memory
    return own is not None and other is not None and own.peak < (1 - RUN_SPREAD) * other.peak


def _samples(rung: Climbed) -> dict[str, Sequence[float]]:
    """Phases of its timed steps, the steps they took turns with, and the losses it trained with alone."""
    found: dict[str, Sequence[float]] = dict(phase_samples(Timing(rung.samples, 0)))
    if rung.turns is not None:
        found["step_before"] = [sample.wall_ms for sample in rung.turns.before]
    return found | {"training_loss": rung.alone[0].losses}


def _ratio_fields(name: str, ratio: Ratio) -> dict[str, Any]:
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}
