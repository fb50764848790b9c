"""Subjects of the report: a file has the TABLES, the RULES and the SECTIONS of its rows.

To show a new kind of row, write its table, and what there is to find and to draw, in a file here and name it in
`SUBJECTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainstep.report.blocks import Section
from trainstep.report.findings import TOPICS, Finding
from trainstep.report.subjects import (
    collectives,
    fit,
    kernels,
    ladder,
    memory,
    noise,
    operators,
    parallel,
    plan,
    precision,
    ratios,
    run,
    steps,
    sweep,
    training,
    workload,
)
from trainstep.report.tables import Definition, Place, Table, make_table
from trainstep.rows import KINDS, SweepRow
from trainstep.rows.records import Row, of_kind

SUBJECTS = (
    run, steps, ratios, kernels, ladder, operators, collectives, parallel, training, memory, fit,
    precision, plan, sweep, workload, noise,
)  # fmt: skip
"""In the order of the page."""


def _all(name: str) -> list[Any]:
    return [each for subject in SUBJECTS for each in getattr(subject, name, ())]


_BY_KIND: Mapping[type[Row], Definition] = {each.kind: each for each in _all("TABLES")}
TABLES = {kind: _BY_KIND[kind] for kind in KINDS.values() if kind in _BY_KIND}
"""The table of every kind of row that has one, in the order of `KINDS`."""
RULES: Sequence[Callable[[Sequence[Row]], Iterable[Finding]]] = _all("RULES")
"""Each looks at all rows and finds something worth a sentence, or nothing."""
SECTIONS: Sequence[Callable[[Sequence[Row]], Section | None]] = _all("SECTIONS")
"""Parts of the page, in its order; each is None where there are no rows for it."""
DERIVED: Sequence[Callable[[Sequence[Row]], list[Table]]] = _all("DERIVED")  # Tables that are made of several rows each


def make_tables(records: Sequence[Row], place: Place = "files") -> list[Table]:
    """A table per kind of row that has columns, and those that are made of several rows each."""
    ordered = [row for row in records if not isinstance(row, SweepRow)] + sweep.in_order(of_kind(records, SweepRow))
    found = [make_table(each, rows, place) for kind, each in TABLES.items() if (rows := of_kind(ordered, kind))]
    return found + [table for derived in DERIVED for table in derived(records)]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Findings of the rules of all subjects, by topic."""
    return sorted((each for rule in RULES for each in rule(rows)), key=lambda each: list(TOPICS).index(each.topic))
