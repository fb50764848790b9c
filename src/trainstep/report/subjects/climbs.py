"""Results of ladders, of workloads and of scripts, as other parts of the report ask for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.base.config import FORM, settings_with
from trainstep.base.stats import Interval, Ratio, product
from trainstep.report.blocks import told_apart
from trainstep.report.findings import listed, literal
from trainstep.report.numbers import numeric
from trainstep.rows import BASELINE, FINAL, PATCHED, ChangeRow
from trainstep.rows.records import Row, Scalar, of_kind

SETTINGS = settings_with(FORM)  # what changes set, and flags
GAIN = "gain of "
"""Begins the figure of a finding that says what a ladder measured of a change."""


@dataclass(frozen=True)
class Climb:
    """Results of one ladder."""

    name: str
    """Name that tells it apart from others of its kind; empty where it is alone."""
    rows: Sequence[ChangeRow]
    """Rows of its changes, the first what it began with."""
    final: ChangeRow | None
    """All that was accepted, against the first; None where that was not measured."""
    patched: ChangeRow | None

    @property
    def first(self) -> ChangeRow:
        """Row that it began with."""
        return self.rows[0]

    @property
    def is_script(self) -> bool:
        """True if it is of a script."""
        return self.first.between_runs

    @property
    def whose(self) -> str:
        """Name of the ladder, as a sentence begins with it."""
        return f"{literal(self.name)}: " if self.name else ""

    @property
    def accepted(self) -> list[ChangeRow]:
        """Accepted changes, the first that ran before all others."""
        return [row for row in self.rows if row.accepted]

    @property
    def is_disputed(self) -> bool:
        """True if the final configuration, in turns with the first, has another speed-up than the product of its gains:
        the intervals have nothing in common."""
        if self.final is None or self.is_script or len(self.accepted) < 2:
            return False
        top = self.accepted[-1]
        known = (self.final.speedup_low, self.final.speedup_high, top.speedup_low, top.speedup_high)
        if None in known:
            return False
        low, high, claimed_low, claimed_high = map(numeric, known)
        return high < claimed_low or claimed_high < low

    @property
    def top(self) -> ChangeRow | None:
        """All of a script that was accepted, together: measured once more, or else the last; None where nothing was."""
        accepted = self.accepted if self.first.status == "ok" else []
        return (self.final or accepted[-1]) if len(accepted) > 1 else None

    @property
    def there(self) -> list[ChangeRow]:
        """The accepted changes that are there at the top, not those that a later one took the place of.

        TF32 is not among them where bf16 came after it. A change of none of `SETTINGS` counts.
        """
        if self.is_script:
            lines = self.final.lines if self.final is not None else ""
            return [row for row in self.accepted[1:] if not lines or not row.lines or row.lines in lines]
        top = self.accepted[-1].case if self.accepted else {}
        every = zip(self.accepted[1:], self.settings, strict=True)
        return [row for row, names in every if not names or any(top.get(each) == row.case.get(each) for each in names)]

    @property
    def settings(self) -> list[list[str]]:
        """Settings that each accepted change set."""
        pairs = itertools.pairwise(self.accepted)
        return [[name for name in SETTINGS if row.case.get(name) != before.case.get(name)] for before, row in pairs]


def climbs(rows: Sequence[Row]) -> list[Climb]:
    """Every ladder, which begins with a baseline."""
    every: list[list[ChangeRow]] = []
    for row in of_kind(rows, ChangeRow):
        if not every or row.change == BASELINE:
            every.append([])
        every[-1].append(row)
    made: list[Climb] = []
    for own in every:
        ends = {row.change: row for row in own if row.change in (FINAL, PATCHED)}
        changes = [row for row in own if row.change not in ends]
        alike = [each[0] for each in every if each[0].between_runs == own[0].between_runs]
        name = told_apart(own[0], alike) if len(alike) > 1 else ""
        if name and name in (each.name for each in made):
            name += f", ladder {len(made) + 1}"
        made += [Climb(name, changes, ends.get(FINAL), ends.get(PATCHED))] if changes else []
    return made


def of_steps(rows: Sequence[Row]) -> list[Climb]:
    """The ladders of workloads' steps."""
    return [climb for climb in climbs(rows) if not climb.is_script]


def of_script(rows: Sequence[Row]) -> Climb | None:
    """The ladder of a script, if there is one."""
    return next((climb for climb in climbs(rows) if climb.is_script), None)


def changes(rows: Sequence[Row]) -> list[ChangeRow]:
    """Changes that ladders of workloads' steps tried, baselines included."""
    return [row for climb in of_steps(rows) for row in climb.rows]


def recommended_flags(rows: Sequence[Row]) -> str:
    """The settings of the first ladder's top that differ from its baseline's, as flags to paste; or empty.

    None of a ladder whose speed-up is disputed.
    """
    climb = next(iter(of_steps(rows)), None)
    return "" if climb is None else flags_of(climb)


def flags_of(climb: Climb) -> str:
    """`recommended_flags` of one ladder."""
    if not climb.accepted or climb.is_disputed:
        return ""
    start, end = climb.first.case, climb.accepted[-1].case
    return " ".join(f"--{name} {end[name]}" for name in SETTINGS if end.get(name) != start.get(name))


def tried(rows: Sequence[Row], id: str, workload: str | None) -> tuple[str, dict[str, Scalar]]:
    """Results of this workload's ladders for the changes that answer a finding, in words and as `gain of CHANGE`; empty
    where none did.

    A ladder whose speed-up is disputed says nothing.
    """
    told, gains = [], dict[str, Scalar]()
    own = [
        row
        for climb in of_steps(rows)
        if not climb.is_disputed
        for row in climb.rows
        if id in (row.answers or ()) and row.workload in (None, workload)
    ]
    for name, row in {row.names[0]: row for row in own}.items():  # the last try of each
        if row.status != "ok":
            told.append(f"{row.change} could not be used ({row.status})")
        elif row.verdict in ("faster", "slower") and row.gain is not None:
            factor = row.gain if row.verdict == "faster" else 1 / row.gain
            told.append(f"{row.change} made the step {factor:.2f}× {row.verdict}")
            gains[GAIN + name] = row.gain
        elif row.verdict == "inconclusive":
            told.append(f"{row.change} made no difference that the samples can show")
    return literal(f" On the ladder, {listed(told)}." if told else ""), gains


def advised(advice: str, rows: Sequence[Row], id: str, workload: str | None) -> tuple[str, dict[str, Scalar]]:
    """The end of a sentence: the advice, or where ladders tried what answers the finding, their result instead."""
    result, gains = tried(rows, id, workload)
    return (f".{result}", gains) if result else (advice, {})


def failed_baselines(rows: Sequence[Row]) -> list[ChangeRow]:
    """First rows of ladders that could not be climbed. One that is too large is not among them."""
    return [climb.first for climb in of_steps(rows) if climb.first.status not in ("ok", "out of memory")]


def times_agree(climb: Climb) -> bool:
    """True if the first step's time over the last's is within the interval of the speed-up.

    Changes are timed at different moments, and the speed-up is of pairs: where the machine changed in between, the two
    times beside it would belie it.
    """
    first, last = climb.accepted[0], climb.accepted[-1]
    if not (first.step_ms and last.step_ms):
        return True
    return (last.speedup_low or 0.0) <= first.step_ms / last.step_ms <= (last.speedup_high or math.inf)


def after_precision(climb: Climb) -> dict[str, Scalar] | None:
    """Gain after the last change of precision, as the product of gains; None where nothing followed."""
    accepted, there = climb.accepted, {id(row) for row in climb.there}
    pairs = zip(accepted[1:], climb.settings, strict=True)
    lower = next((row for row, names in reversed(list(pairs)) if "precision" in names and id(row) in there), None)
    if lower is None or lower is accepted[-1] or not (lower.step_ms and accepted[-1].step_ms):
        return None
    return {"precision_change": lower.change, "after_precision": after(lower, accepted).value}


def after(row: ChangeRow, accepted: Sequence[ChangeRow]) -> Ratio:
    """The speed-up of what was accepted after one of them: the product of the gains."""
    later = itertools.islice(itertools.dropwhile(lambda each: each is not row, accepted), 1, None)
    return product([_gain_of(each) for each in later])


def credited(climb: Climb) -> list[tuple[ChangeRow, ChangeRow, Ratio]]:
    """Credit of each change that is there at the top: what was accepted before it, its own row, and what it brought.

    The gain of a change that another took the place of, as bf16 does of TF32, counts to that other.
    """
    steps = list(zip(itertools.pairwise(climb.accepted), map(set, climb.settings), strict=True))
    there = {id(row) for row in climb.there}
    gone = [(row, names) for (_, row), names in steps if id(row) not in there]
    return [
        (before, row, product([_gain_of(each) for each in (*(each for each, own in gone if own & names), row)]))
        for (before, row), names in steps
        if id(row) in there
    ]


def _gain_of(row: ChangeRow) -> Ratio:
    known = row.gain_low is not None and row.gain_high is not None
    return Ratio(numeric(row.gain), Interval(numeric(row.gain_low), numeric(row.gain_high)) if known else None)
