"""What every table and sentence of the documents is made from: rows of docs/results/, and where they were measured."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainstep.base.stats import Ratio, in_rounds, ratio_of_rounds
from trainstep.base.tolerance import FLOAT32_LOSES
from trainstep.report.subjects import TABLES
from trainstep.report.subjects.workload import where as where
from trainstep.report.tables import Table, make_table
from trainstep.rows import AttentionRow, ChangeRow
from trainstep.rows.records import AnyRow, Row, Scalar, of_kind, read_records

RESULTS = Path(__file__).parents[1] / "results"
DECLARED = tomllib.loads(Path(__file__).parents[1].joinpath("tables.toml").read_text("utf-8"))
WORDS: Mapping[str, Mapping[str, str]] = DECLARED["words"]
"""Table → its names for keys of the results, in the table's order."""

FLOAT32_LOST = 4.0
"""Value of `FLOAT32_LOSES` until 2026-11-23."""
KEPT_THOUGH_DIRTY = frozenset({"0ebe030279+"})
"""Of files measured before this was refused; each goes when its file is measured again."""


def results(name: str, kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of one kind in docs/results/NAME.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        raise NotMeasuredError(path.name)
    rows = read_records(path)
    refuse_dirty(path.name, rows)
    return of_kind([as_checked_today(row) for row in rows], kind)


def as_checked_today(row: Row) -> Row:
    """A change that an earlier float32 check rejected within today's tolerance, as not tried; others as they are."""
    told = re.fullmatch(r"in float32, \S+ off by ([\d.e-]+) of ([\d.e-]+)", row.reason)
    if not isinstance(row, ChangeRow) or told is None or str(row.environment["date"]) > "2026-11-23":
        return row
    error, allowed = map(float, told.groups())
    if error > (today := allowed * FLOAT32_LOSES / FLOAT32_LOST):
        return row
    reason = f"failed the float32 check of that day ({error:.2g}, tolerance {allowed:.2g}, today's {today:.2g})"
    return dataclasses.replace(row, status="unsupported", verdict="not tried", reason=reason)


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


def kept(name: str) -> Any:
    """The contents of docs/results/NAME.

    Raises:
        NotMeasuredError: nothing was measured yet.
        DirtyError: a part of it is of a commit with changes.
    """
    path = RESULTS / name
    if not path.exists():
        raise NotMeasuredError(name)
    text = path.read_text(encoding="utf-8")
    if dirty := re.findall(r'"commit": "(\w+\+)"', text):
        raise DirtyError(f"docs/results/{name} is of {dirty[0]}, a commit with changes (+): commit, and measure again")
    return json.loads(text)


def origin(cells: Iterable[Mapping[str, Any]]) -> str:
    """Torch, date and commit of cells that were measured in parts."""
    return "; ".join(sorted({f"torch {each['torch']}, {each['date']}, commit {each['commit']}" for each in cells}))


def beginning(text: str, longest: int) -> str:
    """The first words of a text, where it is longer than so many characters."""
    return text if len(text) <= longest else f"{text[: longest - 3].rsplit(' ', 1)[0]} …"


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
    return as_times(ratio)


def as_times(ratio: Ratio) -> str:
    """`1.55× [1.52–1.58]`, without the interval where there is none."""
    return in_times(ratio.value, ratio.interval and ratio.interval.low, ratio.interval and ratio.interval.high)


def in_times(value: float, low: float | None, high: float | None) -> str:
    """The same of a ratio's figures."""
    return f"{value:.2f}×" + (f" [{low:.2f}–{high:.2f}]" if low is not None else "")


def plain(name: str, kind: type[AnyRow], *, brief: bool = True) -> Table:
    """All rows of one kind in docs/results/NAME.jsonl, as the files have them."""
    rows = results(name, kind)
    table = make_table(TABLES[kind], rows, "terminal" if brief else "files")
    return dataclasses.replace(table, caption=f"{table.caption}; {where(rows)}")
