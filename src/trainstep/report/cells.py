"""Old names of what is in `columns`, `numbers` and `facts` now (interim)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trainstep.records import Row, Scalar
from trainstep.report import numbers
from trainstep.report.columns import Cell, median_cell, ratio_cell
from trainstep.report.facts import fact, label, span, told_apart
from trainstep.report.numbers import NONE, as_float, count, gib, number


def get(row: Row, name: str) -> float | None:
    """A record's value if it is a number."""
    return as_float(row.values.get(name))


def times(value: float | None) -> str:
    """A ratio: `1.34×`."""
    return NONE if value is None else f"{value:.2f}×"


def cell_of(row: Row, name: str, text: Callable[[Scalar], str] = number, note: str = "") -> Cell:
    """A record's value."""
    value = row.values.get(name)
    return Cell(text(value), value, name, note=note)


median_of, ratio_of = median_cell, ratio_cell

__all__ = ["cell_of", "count", "dataclasses", "fact", "get", "gib", "label", "median_of", "number", "numbers",
           "ratio_of", "span", "times", "told_apart"]  # fmt: skip
