"""What the report says, subject by subject: each file has the tables, the findings and the sections of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainstep.kinds import KINDS, SweepRow
from trainstep.records import Row, of_kind
from trainstep.report.columns import Column
from trainstep.report.parallel_columns import PARALLEL_COLUMNS
from trainstep.report.plan_columns import PLAN_COLUMNS
from trainstep.report.step_columns import COLUMNS
from trainstep.report.subjects import kernels, memory
from trainstep.report.sweep_axes import Axis, Measure, axes_of, in_order, measures_of, shown
from trainstep.report.sweep_columns import CAPTION, sweep_columns
from trainstep.report.tables import Definition, Place, Table, make_table, text_table
from trainstep.report.train_columns import TRAIN_COLUMNS


def _defined(columns: Mapping[str, tuple[str, Sequence[Column]]]) -> dict[type[Row], Definition]:
    return {KINDS[kind]: Definition(KINDS[kind], caption, own) for kind, (caption, own) in columns.items()}


TABLES: Mapping[type[Row], Definition] = {
    **_defined({**COLUMNS, **PARALLEL_COLUMNS}),
    **{each.kind: each for each in (*kernels.TABLES, *memory.TABLES)},
    **_defined({**PLAN_COLUMNS, **TRAIN_COLUMNS}),
    SweepRow: Definition(SweepRow, CAPTION, sweep_columns),
}
"""The table of every kind of row that has one, in the order in which they are shown."""


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
