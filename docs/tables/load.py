"""Tables of ladders that were climbed alone and beside other work: what was claimed there, and what is true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tables import results, where
from trainstep.base.stats import Interval, Ratio
from trainstep.report.columns import ratio_cell
from trainstep.report.numbers import NONE, number
from trainstep.report.subjects.climbs import Climb, climbs
from trainstep.report.tables import Table, text_table
from trainstep.rows import ChangeRow


@dataclass(frozen=True)
class Pair:
    """The ladder of one model, climbed alone and beside other work."""

    model: str
    alone: Sequence[ChangeRow]
    beside: Sequence[ChangeRow]


def all_pairs() -> list[Pair]:
    """The ladders of docs/results/cpu-load.jsonl by model."""
    found: dict[str, tuple[list[ChangeRow], list[ChangeRow]]] = {}
    for row in results("cpu-load", ChangeRow):
        name = str(row.case["workload"]).rpartition(":")[2]
        found.setdefault(name, ([], []))[row.environment["beside"] != 0].append(row)
    return [Pair(name, *both) for name, both in found.items()]


def speedups() -> Table:
    """What each ladder claims in all."""
    lines = []
    for pair in all_pairs():
        both = alone, beside = [climbs(rows)[0] for rows in (pair.alone, pair.beside)]
        tops = [[_settings(row) for row in climb.accepted[-1:]] for climb in both]
        same = "yes" if tops[0] == tops[1] != [] else "no"
        lines.append((pair.model, claim(alone), claim(beside), same, _unpaired(beside)))
    wanted = ("model", "alone", "beside other work", "same top", "by times one after the other")
    caption = f"Speed-up of the ladder's top over its baseline; {where(results('cpu-load', ChangeRow))}"
    return text_table("load", caption, wanted, lines)


def claim(climb: Climb) -> str:
    """`1.31× [1.25–1.40]`, or that nothing is claimed."""
    if not climb.accepted:
        return f"no baseline ({climb.first.status})"
    if climb.is_disputed:
        return "withheld"
    return ratio_cell(climb.accepted[-1], "speedup").plain if len(climb.accepted) > 1 else "nothing accepted"


def _settings(row: ChangeRow) -> dict[str, object]:
    return {name: row.case.get(name) for name in ("precision", "attention", "optimizer", "compile", "loss")}


def _unpaired(climb: Climb) -> str:
    """What two runs one after the other would have said: the baseline's median over the top's, each as it was tried."""
    accepted = climb.accepted
    if len(accepted) < 2 or not (accepted[0].step_ms and accepted[-1].step_ms):
        return NONE
    return f"{number(accepted[0].step_ms / accepted[-1].step_ms, 3)}×"


@dataclass(frozen=True)
class Change:
    """One change that both ladders tried on the same step."""

    alone: Ratio
    beside: Ratio


def changes_of(pairs: Sequence[Pair]) -> Iterator[Change]:
    """The changes that both ladders of a model tried on the same step and timed."""
    for pair in pairs:
        alone, beside = dict(_tried(pair.alone)), dict(_tried(pair.beside))
        for key in alone.keys() & beside.keys():
            if beside[key].step_ms:
                yield Change(_gain(alone[key]), _gain(beside[key]))


def _tried(rows: Sequence[ChangeRow]) -> Iterator[tuple[tuple[object, ...], ChangeRow]]:
    """What tells a try apart, its step and the one it was tried on → its row."""
    before: ChangeRow | None = None
    for row in climbs(rows)[0].rows:
        if before is not None and row.gain_low is not None:
            yield (*_settings(before).values(), *_settings(row).values()), row
        before = row if row.accepted else before


def _gain(row: ChangeRow) -> Ratio:
    assert row.gain is not None
    assert row.gain_low is not None
    assert row.gain_high is not None
    return Ratio(row.gain, Interval(row.gain_low, row.gain_high))


def are_apart(one: Ratio, other: Ratio) -> bool:
    """Whether two intervals have nothing in common."""
    assert one.interval is not None
    assert other.interval is not None
    return one.interval.high < other.interval.low or other.interval.high < one.interval.low


TABLES = {"load": speedups}
