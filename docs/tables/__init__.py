"""What every table and sentence of the documents is made from: rows of docs/results/, and where they were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainstep.base.stats import in_rounds, ratio_of_rounds
from trainstep.report import columns
from trainstep.report.columns import Column
from trainstep.report.subjects import TABLES
from trainstep.report.subjects.workload import where as where
from trainstep.report.tables import Table, make_table, tabulate
from trainstep.rows import AttentionRow
from trainstep.rows.records import AnyRow, Row, Scalar, of_kind, read_records

RESULTS = Path(__file__).parents[1] / "results"

KEPT_THOUGH_DIRTY = frozenset({"0ebe030279+"})
"""Of files measured before this was refused; each goes when its file is measured again."""

SIZE = Column("size", columns.case("size", "workload").cell)
CHANGE = Column("change", lambda row: str(row.case["change"]))
OUTCOME = Column("outcome", lambda row: row.status)


def results(name: str, kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind in docs/results/NAME.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        raise NotMeasuredError(path.name)
    rows = read_records(path)
    refuse_dirty(path.name, rows)
    return of_kind(rows, kind)


def refuse_dirty(name: str, rows: Sequence[Row]) -> None:
    """No figure is kept whose code no commit has.

    Raises:
        DirtyError: rows of a commit with changes.
    """
    commits = {str(row.environment.get("commit", "")) for row in rows}
    if dirty := sorted(commit for commit in commits - KEPT_THOUGH_DIRTY if commit.endswith("+")):
        raise DirtyError(
            f"docs/results/{name} has rows of {', '.join(dirty)}, a commit with changes (+): nobody can run that code "
            "again. Commit, measure again and keep those rows"
        )


def one(name: str, kind: type[AnyRow], without: Sequence[str] = (), /, **case: Scalar) -> AnyRow:
    """The only row of docs/results/NAME.jsonl with these settings and none of those in `without`."""
    rows = [row for row in results(name, kind) if case.items() <= row.case.items() and not row.case.keys() & without]
    assert len(rows) == 1, f"{len(rows)} rows of kind {kind} in {name} have {case}"
    return rows[0]


class NotMeasuredError(Exception):
    """The results that a table or sentence is made from are not there."""


class DirtyError(Exception):
    """Results of code that is in no commit."""


def setting(rows: Sequence[Row]) -> str:
    """`2.7B, context 512, batch 4 per GPU, bf16 autocast`: what all rows of data parallel training have in common."""
    names = ("workload", "context", "batch", "precision")
    ((size, context, batch, precision),) = {tuple(row.case[name] for name in names) for row in rows}
    autocast = " autocast" if precision in ("bf16", "fp16") else ""
    return f"{size}, context {context}, batch {batch} per GPU, {precision}{autocast}"


def times_as_long(over: AttentionRow, under: AttentionRow, phase: str = "both") -> str:
    """`1.55× [1.52–1.58]`: one time over another of the same run, by rounds where there were several."""
    both = [in_rounds(row.samples[phase], row.rounds or 1) for row in (over, under)]
    ratio = ratio_of_rounds(*both)
    within = "" if ratio.interval is None else f" [{ratio.interval.low:.2f}–{ratio.interval.high:.2f}]"
    return f"{ratio.value:.2f}×{within}"


def of_rows(
    files: str | Sequence[str],
    kind: type[AnyRow],
    *wanted: Column,
    caption: str = "",
    only: Callable[[AnyRow], bool] | None = None,
    key: Callable[[AnyRow], Any] | None = None,
) -> Table:
    """These columns of the rows of one kind in docs/results/: those for which `only` is true, in the order of `key`."""
    files = [files] if isinstance(files, str) else files
    rows = [row for name in files for row in results(name, kind) if only is None or only(row)]
    rows = rows if key is None else sorted(rows, key=key)
    return tabulate("rows", f"{caption}; {where(rows)}" if caption else where(rows), wanted, rows)


def plain(name: str, kind: type[AnyRow], *, brief: bool = True) -> Table:
    """All rows of one kind in docs/results/NAME.jsonl, as the files have them."""
    rows = results(name, kind)
    table = make_table(TABLES[kind], rows, "terminal" if brief else "files")
    return dataclasses.replace(table, caption=f"{table.caption}; {where(rows)}")
