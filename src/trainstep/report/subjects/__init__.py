"""What the report says, subject by subject: each file has the tables, the findings and the sections of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainstep.kinds import KINDS, SweepRow
from trainstep.records import Row, of_kind
from trainstep.report.kernel_columns import BRIEF_ROWS, KERNEL_COLUMNS
from trainstep.report.memory_columns import MEMORY_COLUMNS
from trainstep.report.step_columns import COLUMNS
from trainstep.report.subjects import attention, parallel, plan, sweep
from trainstep.report.tables import Definition, Place, Table, make_table

ALL_COLUMNS = {**COLUMNS, **KERNEL_COLUMNS, **MEMORY_COLUMNS}

TABLES: Mapping[type[Row], Definition] = {
    **{
        KINDS[kind]: Definition(KINDS[kind], caption, columns, longest=BRIEF_ROWS.get(kind))
        for kind, (caption, columns) in ALL_COLUMNS.items()
    },
    **{each.kind: each for subject in (attention, parallel, plan, sweep) for each in subject.TABLES},
}
"""The table of every kind of row that has one, in the order in which they are shown."""

DERIVED = (*plan.DERIVED, *sweep.DERIVED)
"""What makes further tables of the rows of several cases."""


def make_tables(records: Sequence[Row], place: Place = "files") -> list[Table]:
    """One table per kind of row that has columns, and those that are made of several rows each."""
    found = [make_table(each, rows, place) for kind, each in TABLES.items() if (rows := _rows(records, kind))]
    return found + [table for derived in DERIVED for table in derived(records)]


def _rows(records: Sequence[Row], kind: type[Row]) -> Sequence[Row]:
    """The rows of a kind as their table has them."""
    return sweep.in_order(of_kind(records, SweepRow)) if kind is SweepRow else of_kind(records, kind)
