"""What the report says, subject by subject: a file has the TABLES, the RULES and the SECTIONS of its rows.

To show a new kind of row, write its table, and what there is to find and to draw, in a file here and name it in
`SUBJECTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.kinds import KINDS, SweepRow
from trainstep.records import Row, of_kind
from trainstep.report.blocks import Section
from trainstep.report.finding import Finding
from trainstep.report.subjects import formulas, kernels, ladder, memory, noise, precision, steps, workload
from trainstep.report.subjects.interim import attention, plan, sweep
from trainstep.report.sweep_axes import Axis, Measure, axes_of, in_order, measures_of, shown
from trainstep.report.tables import Definition, Place, Table, make_table, text_table

SUBJECTS = (steps, formulas, kernels, ladder, attention, memory, precision, plan, sweep, workload, noise)
"""In the order of the page."""


def _all(name: str) -> list[Any]:
    return [each for subject in SUBJECTS for each in getattr(subject, name, ())]


_BY_KIND: Mapping[type[Row], Definition] = {each.kind: each for each in _all("TABLES")}
TABLES = {kind: _BY_KIND[kind] for kind in KINDS.values() if kind in _BY_KIND}
"""The table of every kind of row that has one, in the order of `KINDS`."""
RULES: Sequence[Callable[[Sequence[Row]], list[Finding]]] = _all("RULES")
"""Each looks at all rows and finds something worth a sentence, or nothing."""
SECTIONS: Sequence[Callable[[Sequence[Row]], Section | None]] = _all("SECTIONS")
"""Parts of the page, in its order; each is None where there are no rows for it."""


def make_tables(records: Sequence[Row], place: Place = "files") -> list[Table]:
    """One table per kind of row that has columns, and per axis of a sweep."""
    found = [make_table(each, rows, place) for kind, each in TABLES.items() if (rows := in_order_of(records, kind))]
    swept = in_order(of_kind(records, SweepRow))
    return found + [axis_table(axis, measure) for axis in axes_of(swept) for measure in measures_of(swept)[:1]]


def in_order_of(records: Sequence[Row], kind: type[Row]) -> Sequence[Row]:
    """The rows of a kind as their table has them."""
    rows = of_kind(records, kind)
    return in_order(rows) if kind is SweepRow else rows


def axis_table(axis: Axis, measure: Measure) -> Table:
    """A sweep's measured values over one axis: a line per combination of all else, a column where those are few."""
    name = axis.name.replace("_", " ")
    values = [shown(value) for value in axis.values]
    cells = [[measure.text(line.rows.get(value)) for value in axis.values] for line in axis.lines]
    lines = [line.name for line in axis.lines]
    if len(values) > len(lines):
        rows = [[value, *row] for value, row in zip(values, zip(*cells, strict=True), strict=True)]
        columns = [name, *lines]
    else:
        rows = [[line, *row] for line, row in zip(lines, cells, strict=True)]
        columns = ["", *(f"{name} {value}" for value in values)]
    interval = " [95 %]" if measure.low else ""
    return text_table(
        f"sweep-by-{axis.name.replace('_', '-')}",
        f"{measure.title[:1].upper()}{measure.title[1:]} by {name}, {measure.unit}{interval}",
        columns,
        rows,
    )
