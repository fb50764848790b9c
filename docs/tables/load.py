"""Tables of ladders that were climbed alone and beside other work: what was claimed there, and what is true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tables import results, where
from trainstep.base.stats import Interval, Ratio, verdict
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
    pairs = all_pairs()
    lines = []
    for pair in pairs:
        alone, beside = (claim(rows) for rows in (pair.alone, pair.beside))
        tops = [_climb(rows).accepted[-1:] for rows in (pair.alone, pair.beside)]
        same = "yes" if tops[0] and tops[1] and _change(tops[0][0]) == _change(tops[1][0]) else "no"
        lines.append((pair.model, alone, beside, same, _unpaired(pair.beside)))
    wanted = ("model", "alone", "beside other work", "same top", "by times one after the other")
    caption = f"Speed-up of the ladder's top over its baseline; {_where(pairs)}"
    return text_table("load", caption, wanted, lines)


def _where(pairs: Sequence[Pair]) -> str:
    return where([row for pair in pairs for row in (*pair.alone, *pair.beside)])


def claim(rows: Sequence[ChangeRow]) -> str:
    """`1.31× [1.25–1.40]`, or that nothing is claimed."""
    climb = _climb(rows)
    if not climb.accepted:
        return f"no baseline ({climb.first.status})"
    if climb.is_disputed:
        return "withheld"
    return ratio_cell(climb.accepted[-1], "speedup").plain if len(climb.accepted) > 1 else "nothing accepted"


def _climb(rows: Sequence[ChangeRow]) -> Climb:
    return climbs(rows)[0]


def _change(row: ChangeRow) -> dict[str, object]:
    return {name: row.case.get(name) for name in ("precision", "attention", "optimizer", "compile", "loss")}


def _unpaired(rows: Sequence[ChangeRow]) -> str:
    """What two runs one after the other would have said: the baseline's median over the top's, each as it was tried."""
    accepted = _climb(rows).accepted
    if len(accepted) < 2 or not (accepted[0].step_ms and accepted[-1].step_ms):
        return NONE
    return f"{number(accepted[0].step_ms / accepted[-1].step_ms, 3)}×"


@dataclass(frozen=True)
class Change:
    """One change that both ladders tried on the same step."""

    model: str
    name: str
    alone: Ratio
    beside: Ratio
    unpaired: float
    """Medians of two runs one after the other, beside other work."""


def changes_of(pairs: Sequence[Pair]) -> Iterator[Change]:
    """The changes that both ladders of a model tried on the same step and timed."""
    for pair in pairs:
        alone, beside = dict(_tried(pair.alone)), dict(_tried(pair.beside))
        for key in alone.keys() & beside.keys():
            (_, quiet), (before, busy) = alone[key], beside[key]
            if before.step_ms and busy.step_ms:
                yield Change(pair.model, busy.change, _gain(quiet), _gain(busy), before.step_ms / busy.step_ms)


def _tried(rows: Sequence[ChangeRow]) -> Iterator[tuple[tuple[object, ...], tuple[ChangeRow, ChangeRow]]]:
    """What tells a try apart, its step and the one it was tried on → what was accepted before it, and its own row."""
    before: ChangeRow | None = None
    for row in _climb(rows).rows:
        if before is not None and row.gain_low is not None:
            yield (*_change(before).values(), *_change(row).values()), (before, row)
        before = row if row.accepted else before


def _gain(row: ChangeRow) -> Ratio:
    assert row.gain is not None
    assert row.gain_low is not None
    assert row.gain_high is not None
    return Ratio(row.gain, Interval(row.gain_low, row.gain_high))


def changes() -> Table:
    """How changes beside other work agree with the same ones alone: in turns, and one after the other."""
    pairs = all_pairs()
    found = list(changes_of(pairs))
    lines = []
    for name in ("in turns", "one after the other"):
        ratios = [each.beside if name == "in turns" else Ratio(each.unpaired, None) for each in found]
        off = [abs(math.log(ratio.value / each.alone.value)) for ratio, each in zip(ratios, found, strict=True)]
        opposite = [
            {verdict(each.alone), "faster" if ratio.value > 1 else "slower"} == {"faster", "slower"}
            and (ratio.interval is None or verdict(ratio) != "inconclusive")
            for ratio, each in zip(ratios, found, strict=True)
        ]
        share = [f"{sum(each > math.log(1 + part) for each in off)}" for part in (0.1, 0.2, 0.5)]
        worst = max(zip(off, found, strict=True), key=lambda each: each[0], default=None)
        told = NONE if worst is None else f"{number(math.exp(worst[0]), 3)}× ({worst[1].model}, {worst[1].name})"
        lines.append((name, str(len(found)), *share, str(sum(opposite)), told))
    apart = [each for each in found if are_apart(each.alone, each.beside)]
    wanted = (
        "gains beside other work",
        "changes",
        "off by over 10 %",
        "over 20 %",
        "over 50 %",
        "the opposite",
        "worst",
    )
    caption = "Gains beside other work against those alone; intervals of "
    caption += f"{len(apart)} of {len(found)} changes in turns have nothing in common with those alone; {_where(pairs)}"
    return text_table("load changes", caption, wanted, lines)


def are_apart(one: Ratio, other: Ratio) -> bool:
    """Whether two intervals have nothing in common."""
    assert one.interval is not None
    assert other.interval is not None
    return one.interval.high < other.interval.low or other.interval.high < one.interval.low


TABLES = {"load": speedups, "load-changes": changes}
