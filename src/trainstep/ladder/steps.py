"""The ladder of a workload's step, in this process.

Every step is rebuilt from the same seed and compared with the plain step (`check.step`): in float32, in its own
precision, with initial and with trained weights, and by its updates. Only what is right is timed: alone, which gives
its memory and how it trains on the same batches as all others, and then in turns with what was accepted before, both
built in one process. A gain is the median of the pairs' ratios: what slows the machine for a while is in both of a
pair.

Two steps that do not fit into memory together are timed one after the other instead, both anew, and the row says so.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.stats import Ratio, ratio_of_medians, ratio_of_pairs, verdict
from trainstep.check.step import StepCheck, plain_form
from trainstep.check.verdict import Verdict
from trainstep.ladder.change import Change, changes_of_step
from trainstep.ladder.ladder import Ladder, Refused, Tried, is_open, ratio_fields
from trainstep.measure.environment import describe, why_no_half
from trainstep.measure.outcome import Failure, attempt
from trainstep.measure.step import (
    BatchedStep,
    StepMeasurement,
    case_columns,
    measure_training_step,
    measured_fields,
    phase_samples,
)
from trainstep.measure.timing import Sample, Timing, device_clock, time_in_turns
from trainstep.rows import FINAL, ChangeRow
from trainstep.step.training_step import TrainingStep, build_step
from trainstep.step.workload import WorkloadSource, resolve_device

MOST_TURNS = 4
"""Times the steps asked for, at most."""


@dataclass(frozen=True)
class Turns:
    """Two steps in turns."""

    before: Sequence[Sample]
    """Samples of what was accepted before."""
    own: Sequence[Sample]
    attempts: int
    """Number of times that turns were taken."""

    @property
    def gain(self) -> Ratio:
        """The first's time over the second's."""
        return ratio_of_pairs([each.wall_ms for each in self.before], [each.wall_ms for each in self.own])


@dataclass
class Found:
    """Findings on a step."""

    check: Verdict
    check_s: float
    """Seconds of the check, compilation included."""
    alone: list[StepMeasurement] = field(default_factory=list)
    """Measured by itself, when it was checked and where it was measured again."""
    turns: Turns | None = None
    """None for the first, and where both together do not fit into memory."""


@dataclass(kw_only=True)
class TriedStep(Tried):
    """A step that is right."""

    name: str
    config: StepConfig
    found: Found

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Samples of its timed steps: in turns, or else alone."""
        if self.found.turns is not None:
            return tuple(self.found.turns.own)
        return tuple(sample for run in self.found.alone for sample in run.timing.samples)

    def take(self, measured: StepMeasurement) -> None:
        """Take one more measurement, whose memory counts from then on."""
        self.found.alone.append(measured)
        self.peak = measured.memory.peak if measured.memory is not None else None


class StepRunner:
    """Runs steps of one workload.

    Args:
        source: builds it.
        base: what changes start from.
        judge: one that has checked steps of this workload; it is taken where its reference is this plain step.
        warmup, steps: of each measurement, at least 0 and 1.
        is_named: whether somebody asked for the changes: they are tried even where what was measured speaks against
            them.

    Raises:
        UsageError: no step to time, or a warm-up below 0.
    """

    tries_all_again = True

    def __init__(
        self, source: WorkloadSource, base: StepConfig, judge: StepCheck | None, warmup: int, steps: int, is_named: bool
    ) -> None:
        if steps < 1 or warmup < 0:
            raise UsageError(
                f"steps is {steps} and warmup {warmup}; expected at least one step and a warm-up of 0 or more"
            )
        # A judge from elsewhere saves its reference's time, but only if that reference is this plain step itself.
        plain = plain_form(base)
        if judge is None or judge.plain != plain or judge.is_stood_in_for:
            judge = StepCheck(source, plain)
        self.source, self.base, self.judge, self.device = source, base, judge, resolve_device(base.device)
        self.warmup, self.steps, self.is_named = warmup, steps, is_named
        self.shares: Mapping[str, float] = {}
        """Shares of the baseline's step by phase, once it was measured."""

    def skipped(self, change: Change) -> str:
        """Reason why it cannot bring enough. What does not apply to the workload is not among its changes."""
        why = why_no_half(self.device) if change.precision == "bf16" and not self.is_named else ""
        return why or ("" if self.is_named else change.why_too_little(self.shares))

    def gain(self, change: Change) -> float:
        """The factor to expect of it on this step."""
        return change.gain("cuda" if self.device.type == "cuda" else "cpu", self.shares)

    def cost_s(self, made: Sequence[Change], top: Tried | None) -> float:
        """Nothing that is known: a ladder of steps has no budget."""
        return 0.0

    def excludes(self, change: Change, other: Change) -> bool:
        """True if both set the same field."""
        return not change.step.keys().isdisjoint(other.step)

    def row(self, name: str, values: Mapping[str, Any]) -> ChangeRow:
        """Row of the change."""
        return ChangeRow(**{"change": name, "environment": describe(self.device), **values})

    def measure(self, name: str, made: Sequence[Change], top: Tried | None) -> TriedStep:
        """Build the step, check it, and time it alone and in turns."""
        assert top is None or isinstance(top, TriedStep)
        config, changes = (top.config, top.changes) if top is not None else (self.base, [])
        for each in made:
            # A change that sets the same fields anew replaces the one before, which then counts no more.
            config = dataclasses.replace(config, **each.step)
            changes = [*(other for other in changes if not other.step.keys() <= each.step.keys()), each]
        case = case_columns(self.source, config)
        found = attempt(partial(self._checked, config, top))
        if isinstance(found, Failure):
            raise Refused(found.status, found.reason, **case)
        case |= found.check.columns()
        if why := found.check.not_told:
            raise Refused("unsupported", why, "unsupported", **case)
        if not found.check.is_right:
            raise Refused("wrong", str(found.check), **case)
        tried = TriedStep(changes=changes, made=list(made), values=case, name=name, config=config, found=found)
        tried.take(found.alone.pop())
        tried.values |= self._compare(tried, top)
        measured = measured_fields(found.alone[-1], Timing(tried.samples, 0), config.precision)
        measured["first_step_ms"] = found.alone[0].timing.first.wall_ms
        if top is None:
            whole = measured["times"]["step"].median
            self.shares = {name: each.median / whole for name, each in measured["times"].items()}
        tried.values |= {**measured, "check_s": found.check_s, "samples": _samples(tried)}
        return tried

    def _compare(self, tried: TriedStep, top: TriedStep | None) -> dict[str, Any]:
        """Set its gain over the top; what was compared, as fields."""
        if top is None:
            one = Ratio(1.0, None)
            return {**ratio_fields("speedup", one), **ratio_fields("gain", one), "attempts": 1}
        turns = tried.found.turns
        tried.gain = turns.gain if turns is not None else self._one_after_the_other(top, tried)
        attempts = turns.attempts if turns is not None else len(tried.found.alone)
        return {"attempts": attempts, "in_turns": turns is not None}

    def _checked(self, config: StepConfig, top: TriedStep | None) -> Found:
        start = time.perf_counter()
        step, check = self.judge.start(config)
        found = Found(check, time.perf_counter() - start)
        if check.is_right:
            found.alone.append(measure_training_step(step, self.source, "step", self.warmup, self.steps))
            start = time.perf_counter()
            found.check = self.judge.end(step, check)
            found.check_s += time.perf_counter() - start
        if found.check.is_right and top is not None:
            turns = attempt(partial(self._in_turns, top.config, step), drop_compiled=False)
            found.turns = turns if isinstance(turns, Turns) else None
        return found

    def _in_turns(self, before: StepConfig, own: StepConfig | TrainingStep) -> Turns:
        # Both steps are in memory at once and take turns, so that a machine that slows down slows both.
        steps = [build_step(self.source, each) if isinstance(each, StepConfig) else each for each in (before, own)]
        runners = [BatchedStep(step) for step in steps]
        taken: list[list[Sample]] = [[], []]
        number = 0
        # Only a gain that the samples leave open is worth more of them, and only the first turns need a warm-up.
        while number < MOST_TURNS and (number == 0 or is_open(Turns(taken[0], taken[1], number).gain)):
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

    def _one_after_the_other(self, top: TriedStep, tried: TriedStep) -> Ratio:
        """The gain where both together do not fit: each is measured once more, and all that each took alone counts."""
        for each in (top, tried):
            again = attempt(partial(self._timed, each.config))
            if not isinstance(again, Failure):
                each.take(again)
        every = ([sample for run in each.found.alone for sample in run.timing.samples] for each in (top, tried))
        over, under = ([sample.wall_ms for sample in samples] for samples in every)
        return ratio_of_medians(over, under)

    def proof(self, first: Tried, top: Tried, accepted: int) -> ChangeRow:
        """The final configuration and the first once more: in turns, or each alone where that does not fit."""
        assert isinstance(first, TriedStep)
        assert isinstance(top, TriedStep)
        values: dict[str, Any] = case_columns(self.source, top.config) | {"accepted": True, "samples": {}}
        again = attempt(partial(self._in_turns, first.config, top.config)) if top is not first else None
        if isinstance(again, Turns):
            values |= ratio_fields("speedup", again.gain) | {"verdict": verdict(again.gain)}
        for place, (end, tried) in enumerate({"first": first, "top": top}.items()):
            # Without any accepted change the top is the first step: one measurement tells of both.
            if place and top is first:
                continue
            alone = again if isinstance(again, Turns) else attempt(partial(self._timed, tried.config))
            values[end] = tried.name
            if isinstance(alone, Failure):
                values |= {"status": alone.status, "reason": alone.reason, "accepted": False}
                continue
            samples = (alone.before, alone.own)[place] if isinstance(alone, Turns) else alone.timing.samples
            before, now = ([sample.wall_ms for sample in each] for each in (tried.samples, samples))
            values["samples"][f"{end}_again"] = now
            values |= {f"{end}_ms": statistics.median(before), f"{end}_again_ms": statistics.median(now)}
            values |= ratio_fields(f"{end}_drift", ratio_of_medians(now, before))
        return self.row(FINAL, values)


def climb(
    source: WorkloadSource,
    base: StepConfig,
    *,
    warmup: int = 3,
    steps: int = 10,
    changes: Sequence[Change] | None = None,
    judge: StepCheck | None = None,
    is_named: bool = False,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[ChangeRow]:
    """Climb from `base`, and yield a row for every step that was tried, the first included.

    Args:
        warmup, steps, judge, is_named: as `StepRunner` has them.
        changes: what is tried, in this order; by default all that may help.
        on_part: called with what begins, in words.
    """
    runner = StepRunner(source, base, judge, warmup, steps, is_named)
    if changes is None:
        changes = changes_of_step(source, runner.device.type, base)

    def begin(name: str, made: Sequence[Change]) -> None:
        work = "compiled, checked and timed" if any("compile" in each.step for each in made) else "checked and timed"
        on_part("ladder: the first and the final configuration again" if name == FINAL else f"ladder: {name}, {work}")

    return Ladder(changes, runner, on_part=begin).climb()


def _samples(tried: TriedStep) -> dict[str, Sequence[float]]:
    """Phases of its timed steps, the steps they took turns with, and the losses it trained with alone."""
    found: dict[str, Sequence[float]] = dict(phase_samples(Timing(tried.samples, 0)))
    if tried.found.turns is not None:
        found["step_before"] = [sample.wall_ms for sample in tried.found.turns.before]
    return found | {"training_loss": tried.found.alone[0].losses}
