"""A sweep's rows by axis: one line of values over the axis for every combination of all that else differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainstep.records import Row, Scalar
from trainstep.report.numbers import NONE, as_float, number

NOT_AXES = ("command", "row")
"""Columns of a sweep's case that are no flag: what was run, and which of the case's several rows this is."""


@dataclass(frozen=True)
class Measure:
    """What a sweep's rows are compared by."""

    title: str
    value: str
    """Its name in the record, ending in its unit."""
    low: str = ""
    high: str = ""
    unit: str = "ms"

    def text(self, row: Row | None) -> str:
        """The row's value with its interval; why there is none; a dash where there is no row."""
        if row is None:
            return NONE
        if row.status != "ok":
            return row.status
        value, low, high = (row.values.get(name) for name in (self.value, self.low, self.high))
        return number(value) if low is None or high is None else f"{number(value)} [{number(low)}–{number(high)}]"


_TIMES = (("step", "step"), ("both", "forward and backward"), ("time", "call"))


@dataclass(frozen=True)
class Line:
    """The rows over an axis, all else equal."""

    settings: Mapping[str, Scalar]
    """All else that differs within the sweep; empty where nothing does."""
    rows: Mapping[Scalar, Row]
    """Value on the axis → row."""

    @property
    def name(self) -> str:
        """`size small, batch 4`."""
        return named(self.settings) or "all cases"


@dataclass(frozen=True)
class Axis:
    """One axis of a sweep."""

    name: str
    values: Sequence[Scalar]
    """Numbers ascending, names as the sweep's file has them."""
    lines: Sequence[Line]

    @property
    def is_numeric(self) -> bool:
        """Whether its values are numbers."""
        return all(as_float(value) is not None for value in self.values)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows as the sweep's file orders its cases, whichever ended first."""
    return sorted(rows, key=lambda row: as_float(row.values.get("number")) or 0)


def settings_of(rows: Sequence[Row]) -> list[str]:
    """The flags that the sweep's file sets, fixed ones too."""
    return [name for name in dict.fromkeys(name for row in rows for name in row.case) if name not in NOT_AXES]


def measures_of(rows: Sequence[Row]) -> list[Measure]:
    """What these rows have: a time, and peak memory."""
    predicted = "predicted " if is_predicted(rows) else ""
    found = [
        Measure(f"{predicted}{title}", f"{phase}_ms", f"{phase}_low_ms", f"{phase}_high_ms")
        for phase, title in _TIMES
        if any(as_float(row.values.get(f"{phase}_ms")) is not None for row in rows)
    ][:1]
    if any(as_float(row.values.get("peak_gib")) is not None for row in rows):
        found.append(Measure(f"{predicted}peak memory", "peak_gib", unit="GiB"))
    return found


def is_predicted(rows: Sequence[Row]) -> bool:
    """Whether the rows are a plan's, which measured nothing."""
    return any(row.case.get("command") == "plan" for row in rows)


def axes_of(rows: Sequence[Row]) -> list[Axis]:
    """Every flag with more than one value."""
    ordered = in_order(rows)
    names = [name for name in settings_of(ordered) if len({row.case.get(name) for row in ordered}) > 1]
    return [_axis(name, [*(other for other in names if other != name), "row"], ordered) for name in names]


def _axis(name: str, others: Sequence[str], rows: Sequence[Row]) -> Axis:
    values = list(dict.fromkeys(row.case.get(name) for row in rows))
    if all(as_float(value) is not None for value in values):
        values.sort(key=lambda value: as_float(value) or 0)
    lines: dict[tuple[Scalar, ...], dict[Scalar, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row.case.get(other) for other in others), {})[row.case.get(name)] = row
    return Axis(
        name,
        values,
        [
            Line({other: value for other, value in zip(others, key, strict=True) if value is not None}, points)
            for key, points in lines.items()
        ],
    )


def named(settings: Mapping[str, Scalar]) -> str:
    """Settings in words; which row of its case it is goes without the word."""
    return ", ".join(
        shown(value) if name == "row" else f"{name.replace('_', ' ')} {shown(value)}"
        for name, value in settings.items()
    )


def shown(value: Scalar) -> str:
    """A setting as the user wrote it."""
    return f"{value:g}" if isinstance(value, float) else number(value)
