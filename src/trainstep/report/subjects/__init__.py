"""What the report says, subject by subject: each file has the tables, the rules and the sections of its rows.

A new kind of row is shown by adding its table, and what there is to say and draw, to a file here that is in `SUBJECTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trainstep.kinds import KINDS, SweepRow
from trainstep.records import Row, of_kind
from trainstep.report.blocks import Section
from trainstep.report.finding import Finding
from trainstep.report.subjects import formulas, kernels, ladder, memory, noise, precision, steps, workload
from trainstep.report.subjects.interim import attention, plan, sweep
from trainstep.report.sweep_axes import Axis, Measure, axes_of, in_order, measures_of, shown
from trainstep.report.tables import Definition, Place, Table, make_table, text_table

Rule = Callable[[Sequence[Row]], list[Finding]]
SectionOf = Callable[[Sequence[Row]], Section | None]


class Subject(Protocol):
    """What a file here has."""

    @property
    def TABLES(self) -> Sequence[Definition]:
        """The table of each kind of row, wherever it is shown."""

    @property
    def RULES(self) -> Sequence[Rule]:
        """Each looks at all rows and finds something worth a sentence, or nothing."""

    @property
    def SECTIONS(self) -> Sequence[SectionOf]:
        """Parts of the page, each None where there are no rows for it."""


SUBJECTS: Sequence[Subject] = (
    steps,
    formulas,
    kernels,
    ladder,
    attention,
    memory,
    precision,
    plan,
    sweep,
    workload,
    noise,
)
"""In the order of the page."""

_BY_KIND = {each.kind: each for subject in SUBJECTS for each in subject.TABLES}
TABLES: Mapping[type[Row], Definition] = {kind: _BY_KIND[kind] for kind in KINDS.values() if kind in _BY_KIND}
"""The table of every kind of row that has one, in the order of `KINDS`."""
RULES = tuple(rule for subject in SUBJECTS for rule in subject.RULES)
SECTIONS = tuple(section for subject in SUBJECTS for section in subject.SECTIONS)


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
