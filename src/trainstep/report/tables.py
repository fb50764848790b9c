"""Records → tables: formatted cells under the columns that `columns` names for each kind of record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainstep.records import Record, of_kind
from trainstep.report.columns import COLUMNS, Column
from trainstep.report.kernel_columns import BRIEF_ROWS, KERNEL_COLUMNS
from trainstep.report.memory_columns import MEMORY_COLUMNS
from trainstep.report.parallel_columns import PARALLEL_COLUMNS
from trainstep.report.plan_columns import PLAN_COLUMNS
from trainstep.report.sweep_axes import Axis, Measure, axes_of, in_order, measures_of, shown
from trainstep.report.sweep_columns import CAPTION, sweep_columns
from trainstep.report.train_columns import TRAIN_COLUMNS

if TYPE_CHECKING:
    import pandas

ALL_COLUMNS = {**COLUMNS, **PARALLEL_COLUMNS, **KERNEL_COLUMNS, **MEMORY_COLUMNS, **PLAN_COLUMNS, **TRAIN_COLUMNS}


@dataclass(frozen=True)
class Table:
    """A titled table of formatted cells."""

    name: str
    """File name without ending."""
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def frame(self) -> pandas.DataFrame:
        """As a pandas frame of strings."""
        import pandas

        return pandas.DataFrame(list(self.rows), columns=list(self.columns))


def make_tables(records: Sequence[Record], *, brief: bool = False) -> list[Table]:
    """One table per kind of record that has columns here, and per axis of a sweep; `brief` for the terminal."""
    kinds = [kind for kind in ALL_COLUMNS if of_kind(records, kind)]
    tables = [make_table(kind, of_kind(records, kind), brief=brief) for kind in kinds]
    swept = in_order(of_kind(records, "sweep"))
    tables += [make_table("sweep", swept, brief=brief)] if swept else []
    return tables + [axis_table(axis, measure) for axis in axes_of(swept) for measure in measures_of(swept)[:1]]


def make_table(kind: str, rows: Sequence[Record], *, brief: bool = False) -> Table:
    """The table of records of one kind, with the columns of that kind."""
    caption, columns = (CAPTION, sweep_columns(rows)) if kind == "sweep" else ALL_COLUMNS[kind]
    table = tabulate(
        kind.replace(" ", "-"), caption, [column for column in columns if column.brief or not brief], rows, brief=brief
    )
    longest = BRIEF_ROWS.get(kind, len(rows))
    if not brief or len(rows) <= longest:
        return table
    caption = f"{table.caption}; the first {longest} of {len(rows)} rows, the others in tables/{table.name}.csv"
    return replace(table, caption=caption, rows=table.rows[:longest])


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
    return Table(
        name=f"sweep-by-{axis.name.replace('_', '-')}",
        caption=f"{measure.title[:1].upper()}{measure.title[1:]} by {name}, {measure.unit}{interval}",
        columns=tuple(columns),
        rows=tuple(tuple(row) for row in rows),
    )


def tabulate(
    name: str, caption: str, columns: Sequence[Column], rows: Sequence[Record], *, brief: bool = False
) -> Table:
    """The rows' cells under the given columns, without the empty ones; shared settings move to the caption.

    The settings of a single row are columns in a file, where they are looked for. In a terminal (`brief`) they would
    leave too little width for what was measured: only the first stays, and the outcome of a row that failed.
    """
    shown = {column: cells for column in columns if set(cells := [column.cell(row) for row in rows]) - {"–", ""}}
    common = {column: cells[0] for column, cells in shown.items() if column.setting and len(set(cells)) == 1}
    if len(rows) == 1:
        is_ok = rows[0].status == "ok"
        common = {column: text for column, text in list(common.items())[1:] if column.title != "outcome" or is_ok}
        common = common if brief else {}
    kept = {column: cells for column, cells in shown.items() if column not in common}
    stated = ", ".join(f"{column.title} {text}" for column, text in common.items() if text != "ok")
    return Table(
        name=name,
        caption=f"{caption} ({stated})" if stated else caption,
        columns=tuple(column.title for column in kept),
        rows=tuple(zip(*kept.values(), strict=True)),
    )
