"""Rows of two files that belong together, rows without a counterpart, and what they were measured under."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainstep.base.config import CASE, settings_with
from trainstep.report.numbers import number
from trainstep.rows.records import Row, Scalar

ACROSS = (
    "workload",
    *settings_with(CASE, without=("seed",)),
    "mode",
    "warmup",
    "timing",
)  # The columns in which compared rows may be allowed to differ
MATCHED_BY = {"step": ACROSS, "change": ("workload", "batch", "context", "change"), "sweep": ()}
"""The kinds of records that carry a step's samples, and the columns by which their rows are matched; none: all."""
CONDITIONS = ("device", "torch", "threads")
"""Columns of the environment that a ratio of times is a ratio of, too."""

CaseKey = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True)
class Unmatched:
    """A case that was not compared."""

    case: CaseKey
    old: str
    """State of the case in the first file: `measured`, `no row`, or a status with its reason."""
    new: str
    """The same of the second file."""
    is_lost: bool
    """True if the first file has its times and the second has a row without any: it went wrong, or failed."""

    def __str__(self) -> str:
        return f"{told(self.case)}: {self.old} in the first file, {self.new} in the second"


def key_of(row: Row) -> CaseKey:
    """The kind of a row and the settings by which it is matched; its kind is one of `MATCHED_BY`."""
    names = MATCHED_BY[row.kind] or sorted(row.case)
    return (("kind", row.kind), *zip(names, map(row.case.get, names), strict=True))


def without(key: CaseKey, across: Collection[str]) -> CaseKey:
    """The key without the columns in which rows may differ."""
    return tuple((name, value) for name, value in key if name not in across)


def told(key: CaseKey) -> str:
    """A key in words; settings that are not set are left out."""
    return ", ".join(f"{name} {number(value)}" for name, value in key if value is not None)


def is_measured(row: Row) -> bool:
    """True if a row has times of a step."""
    return row.kind in MATCHED_BY and row.status == "ok" and bool(row.samples.get("step"))


def unmatched(old: Sequence[Row], new: Sequence[Row], across: Collection[str] = ()) -> list[Unmatched]:
    """The cases of either file of which not both have times, in order, and those of which a row went wrong."""
    before, after = _states(old, across), _states(new, across)
    found = []
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key, "no row"), after.get(key, "no row")
        if (was, now) != ("measured", "measured"):
            found.append(Unmatched(key, was, now, was == "measured" and now not in ("measured", "no row")))
    return found


def other_conditions(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """In which of `CONDITIONS` the measured rows of both files differ, as `device A → B`."""
    found = []
    for name in CONDITIONS:
        before, after = ({row.environment.get(name) for row in rows if is_measured(row)} for rows in (old, new))
        if before != after:
            found.append(f"{name} {_listed(before)} → {_listed(after)}")
    return found


def _listed(values: Collection[Scalar]) -> str:
    return " and ".join(sorted(map(number, values)))


def _states(rows: Sequence[Row], across: Collection[str]) -> Mapping[CaseKey, str]:
    """State of each case: `measured`, or why one of its rows was not."""
    found: dict[CaseKey, str] = {}
    for row in rows:
        if row.kind in MATCHED_BY:
            key = without(key_of(row), across)
            state = "measured" if is_measured(row) else _failed(row)
            if found.get(key, "measured") == "measured":
                found[key] = state
    return found


def _failed(row: Row) -> str:
    return "no times" if row.status == "ok" else f"{row.status} ({row.reason})" if row.reason else row.status
