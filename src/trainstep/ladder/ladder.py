"""The ladder: from a step as it is upwards, one change at a time, each checked before it is timed.

A runner runs changes on top of those that were accepted before, checks that they compute the same, and times both in
turns, A B B A: a gain is a ratio of times that had the same moment. `StepRunner` has a workload's step in this process,
`ScriptRunner` runs a script anew each time. A change that is faster is accepted, and one that needs less memory if it
is certainly not much slower (`NO_SLOWER`). The speed-up is the product of the gains of what was accepted. At the end
the final configuration and the first take turns once more: what this does not confirm is not claimed.

Changes may bring more where a step is shorter. Where a try costs seconds, each that was rejected is tried once more on
the top; where it costs minutes, all may be tried together first (`at_once`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainstep.base.stats import RUN_SPREAD, Interval, Ratio, product, verdict
from trainstep.ladder.budget import UNLIMITED, Budget, OutOfTime
from trainstep.ladder.change import Change
from trainstep.rows import AT_ONCE, BASELINE, FINAL, FIRST_THAT_FITS, ON_TOP, ChangeRow
from trainstep.rows.records import Status

NO_SLOWER = 0.98
"""A change that saves memory is accepted where the whole interval of its gain is above this."""
WIDE = 0.08
"""More turns are taken while a gain's interval is wider than this part of it, unless it decides all the same."""
MAKES_ROOM: Mapping[str, Any] = {"attention": "sdpa"}
"""Tried first where the baseline is too large: the memory of attention as it is written grows with length squared."""


def is_open(gain: Ratio) -> bool:
    """True if more turns may find a difference; a narrow interval around 1 says that there is none."""
    found = gain.interval
    return found is not None and verdict(gain) == "inconclusive" and found.high - found.low > WIDE * gain.value


def ratio_fields(name: str, ratio: Ratio) -> dict[str, float | None]:
    """A ratio with its interval, as fields of that name."""
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}


def _lines(made: Sequence[Change]) -> dict[str, str | None]:
    """Lines to write for these changes, as fields."""
    if len(made) == 1:
        return {"code": made[0].line.code, "where": made[0].line.where or None}
    return {"code": "; ".join(each.line.text for each in made)} if made else {}


def _together(changes: Iterable[Change]) -> str:
    """Name of changes that are tried together."""
    return AT_ONCE.join(each.name for each in changes)


@dataclass(kw_only=True)
class Tried:
    """Changes that ran and are right, in turns with what was accepted before."""

    changes: list[Change]
    """All that it has."""
    made: list[Change]
    """Changes that are new, with the places that they found."""
    values: dict[str, Any]
    """Values of its row."""
    gain: Ratio = field(default_factory=lambda: Ratio(1.0, None))
    speedup: Ratio = field(default_factory=lambda: Ratio(1.0, Interval(1.0, 1.0)))
    """Over the first."""
    peak: float | None = None
    """The most memory, in whichever unit; None where unknown."""

    def is_smaller(self, than: Tried) -> bool:
        """True if both peaks are known and its own is lower by more than runs differ."""
        return self.peak is not None and than.peak is not None and self.peak < (1 - RUN_SPREAD) * than.peak

    @property
    def names(self) -> frozenset[str]:
        """Names of its changes."""
        return frozenset(each.name for each in self.changes)


class Refused(Exception):
    """Changes that get no time: they failed, are wrong, or nothing can be told of them."""

    def __init__(self, status: Status, reason: str, verdict: str | None = None, **values: Any) -> None:
        self.status = status
        self.values = {**values, "status": status, "reason": reason, "verdict": verdict or status}


class Runner(Protocol):
    """Functions that a ladder needs of whoever runs changes."""

    tries_all_again: bool
    """True if all that was rejected is tried again on the top, however slow it was: where a try costs seconds."""

    def skipped(self, change: Change) -> str:
        """Reason why a change is not tried; empty where it is."""

    def gain(self, change: Change) -> float:
        """The factor that a change may bring, from what the baseline's step shows."""

    def cost_s(self, made: Sequence[Change], top: Tried | None) -> float:
        """Seconds that these changes take at least on the top, with what must follow if they are accepted."""

    def excludes(self, change: Change, other: Change) -> bool:
        """True if a change takes the other's place."""

    def measure(self, name: str, made: Sequence[Change], top: Tried | None) -> Tried:
        """Run these changes on top of what was accepted, check and time them; `Refused` where they get no time."""

    def row(self, name: str, values: Mapping[str, Any]) -> ChangeRow:
        """The row of something that was tried."""

    def proof(self, first: Tried, top: Tried, accepted: int) -> ChangeRow | None:
        """The final configuration in turns with the first; None where so few acceptances need no further proof."""


class Ladder:
    """Climbs, and remembers what was accepted.

    Args:
        changes: to try, those from which the runner expects most first.
        runner: runs, checks and times them.
        at_once: whether all of them are tried together first, and one by one only where that is not accepted.
        budget: the time for all of it. What does not fit is not tried.
        on_part: called with a name and its changes before they run.
    """

    def __init__(
        self,
        changes: Sequence[Change],
        runner: Runner,
        *,
        at_once: bool = False,
        budget: Budget = UNLIMITED,
        on_part: Callable[[str, Sequence[Change]], object] = lambda name, changes: None,
    ) -> None:
        self.changes, self.runner, self.at_once, self.on_part = list(changes), runner, at_once, on_part
        self.budget = budget
        self.first: Tried | None = None
        self.top: Tried | None = None
        self._left: dict[str, frozenset[str]] = {}
        """Change that may be tried again → names of all that it was tried on."""
        self._times_accepted = 0

    @property
    def accepted(self) -> list[Change]:
        """The changes of the top."""
        return self.top.changes if self.top is not None else []

    def climb(self) -> Iterator[ChangeRow]:
        """A row for what everything is compared with, one for each try, and one of the final configuration.

        A baseline that fails is the only row, unless it is too large: then the first change that fits is what others
        are compared with.
        """
        row = self._try(BASELINE, [])
        yield row
        changes = sorted(self.changes, key=lambda each: -self.runner.gain(each))
        if self.top is None:
            if row.status != "out of memory":
                return
            changes = sorted(changes, key=lambda each: each.step != MAKES_ROOM)
        singly = changes
        every = self._compatible(each for each in singly if not self.runner.skipped(each)) if self.at_once else []
        if len(every) > 1:
            yield (row := self._try(_together(every), every))
            if row.accepted:
                yield from map(self._left_out, (each for each in singly if each.name not in self._names))
                singly = []
            singly = [each for each in singly if each.name != row.change]  # the only one that found its place
        for change in singly:
            yield self._try(change.name, [change])
        for change in singly:
            if self._is_worth_another_try(change) and self._fits([change]):
                yield self._try(change.name + ON_TOP, [change])
        if self.top is None:
            return
        assert self.first is not None, "something ran"
        self.on_part(FINAL, self.top.changes)
        if (proof := self.runner.proof(self.first, self.top, self._times_accepted)) is not None:
            yield proof

    @property
    def _names(self) -> frozenset[str]:
        return self.top.names if self.top is not None else frozenset()

    def _try(self, name: str, made: Sequence[Change]) -> ChangeRow:
        """Run changes on the top, and accept them if they are worth it."""
        answers = {"answers": tuple(dict.fromkeys(answer for each in made for answer in each.answers)) or None}
        why = self.runner.skipped(made[0]) if len(made) == 1 else ""
        if made and not why and not self._fits(made):
            why = self._does_not_fit(made)
        if why:
            return self.runner.row(name, answers | Refused("unsupported", why, "not tried").values)
        self.on_part(name, made)
        try:
            tried = self.runner.measure(name, made, self.top)
        except OutOfTime:
            short = Refused("failed", f"the budget of {self.budget} is too short for the baseline; give --budget more")
            refused = Refused("unsupported", self._does_not_fit(made), "not tried") if made else short
            return self.runner.row(name, answers | refused.values)
        except Refused as refused:
            if refused.status == "out of memory" and self.runner.tries_all_again:
                self._left |= {each.name: self._names for each in made}
            return self.runner.row(name, answers | refused.values)
        if len(made) > 1:
            name = _together(tried.made)  # some may have found no place
        return self.runner.row(name, answers | self._judged(tried) | tried.values)

    def _fits(self, made: Sequence[Change]) -> bool:
        """True if the budget has time for these changes."""
        return self.budget.left_s >= self.runner.cost_s(made, self.top)

    def _does_not_fit(self, made: Sequence[Change]) -> str:
        """Say that the budget has no time for these changes, and what they might have brought."""
        return f"the budget of {self.budget} has no time for it; up to {max(map(self.runner.gain, made)):.2f}× expected"

    def _judged(self, tried: Tried) -> dict[str, Any]:
        """Gain of a change, as fields; it becomes the top if it is faster, or smaller and certainly not slower."""
        top, fields = self.top, _lines(tried.made)
        if top is None:
            self.first = self.top = tried
            return {**fields, "verdict": FIRST_THAT_FITS if tried.made else BASELINE, "accepted": True}
        tried.speedup, called, interval = product([top.speedup, tried.gain]), verdict(tried.gain), tried.gain.interval
        no_slower = interval is not None and interval.low >= NO_SLOWER
        accepted = called == "faster" or (no_slower and tried.is_smaller(top))
        if accepted:
            self.top = tried
            self._times_accepted += 1
            for each in tried.made:
                self._left.pop(each.name, None)
        elif self.runner.tries_all_again:
            self._left |= {each.name: top.names for each in tried.made}
        ratios = ratio_fields("gain", tried.gain) | ratio_fields("speedup", tried.speedup)
        return {**fields, **ratios, "verdict": called, "accepted": accepted}

    def _compatible(self, changes: Iterable[Change]) -> list[Change]:
        """Changes that go together: of two of which one takes the other's place, that one."""
        found: list[Change] = []
        for change in changes:
            if not any(self.runner.excludes(each, change) for each in found):
                found = [*(each for each in found if not self.runner.excludes(change, each)), change]
        return found

    def _left_out(self, change: Change) -> ChangeRow:
        """The row of a change that is not among those that were accepted at once."""
        why = self.runner.skipped(change)
        if instead := [each.name for each in self.accepted if self.runner.excludes(each, change)]:
            why = why or f"{instead[0]} takes its place"
        return self.runner.row(change.name, Refused("unsupported", why or change.nothing, "not tried").values)

    def _is_worth_another_try(self, change: Change) -> bool:
        """True if something that is not of its kind was accepted since it was tried."""
        tried_on = self._left.get(change.name, self._names)
        since = [each for each in self.accepted if each.name not in tried_on]
        are_others = (self.runner.excludes(change, each) or self.runner.excludes(each, change) for each in since)
        return tried_on != self._names and not any(are_others)
