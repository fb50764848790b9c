"""A case's process → rows: those that it wrote, and one that says why where it did not end well."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from trainstep.base.errors import OUT_OF_MEMORY, UsageError
from trainstep.bench.sweep.cases import ROW_KINDS, Case
from trainstep.rows import FINAL, SweepRow
from trainstep.rows.records import Row, Scalar, Status, make_row, of_kind, read_records

CASE_FAILED = 1  # exit code of a command that has a row which says why it has no result; also after a traceback
_ERROR = re.compile(r"(trainstep: |Fatal Python error|terminate called|[\w.]*(Error|Exception)\b)")
_RANK = re.compile(r"^\[(rank|default)\d+\]: ?")
_LONGEST, _END = 240, 2**16  # characters of a reason, and bytes of an output that are looked at


def rows_of(case: Case, code: int | None, seconds: float, timeout_s: float | None = None) -> list[SweepRow]:
    """The rows of a case whose process has ended, having written results.jsonl, stdout.txt and stderr.txt.

    Args:
        code: its exit code, below 0 for a signal; None where it was ended for lasting longer than `timeout_s`.
        seconds: how long it ran.
    """
    found = _written(case)
    values: dict[str, Scalar] = {"case_s": seconds, "folder": case.folder.name}
    rows = []
    for row, told in zip(found, _told_apart(found), strict=True):
        same = {"samples": row.samples, "status": row.status, "reason": row.reason, "environment": row.environment}
        rows.append(make_row(SweepRow, case.columns() | {"row": told}, {**row.values, **values}, **same))
    is_told = code == CASE_FAILED and any(row.status != "ok" for row in rows)
    last, has_error = _said(case.folder / "stderr.txt")
    if not rows or (code != 0 and (has_error or not is_told)):
        status, reason = _failure(code, last.removeprefix("trainstep: "), timeout_s)
        failed = make_row(SweepRow, case.columns(), values, status=status, reason=reason)
        rows.append(replace(failed, row="end") if rows else failed)
    return rows


def _written(case: Case) -> list[Row]:
    try:
        records = read_records(case.folder / "results.jsonl")
    except UsageError:
        return []  # none, or cut short by a crash: the failure's row tells
    kinds = [kind for kind in ROW_KINDS[case.command] if of_kind(records, kind)]
    return [row for row in of_kind(records, kinds[0]) if row.case.get("change") != FINAL] if kinds else []


def _told_apart(rows: Sequence[Row]) -> list[str | None]:
    """Words that tell each row of one case from the others; nothing where there is one."""
    if len(rows) < 2:
        return [None] * len(rows)
    names = [name for name in rows[0].case if len({row.case.get(name) for row in rows}) > 1]
    naming = ("change", "scheme", "strategy")  # of which each implies all else that differs
    short = [name for name in names if name in naming] or names
    return [", ".join(str(row.case.get(name)) for name in short) or str(index) for index, row in enumerate(rows)]


def _failure(code: int | None, last: str, timeout_s: float | None) -> tuple[Status, str]:
    if code is None:
        return "failed", f"not done after {timeout_s:g} s, and ended"
    if code == 0:
        return "failed", "wrote no row that a sweep shows; see its results.jsonl"
    if OUT_OF_MEMORY.search(last):
        return "out of memory", last
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (often the kernel, for want of memory)" if name == "SIGKILL" else ""
        return "failed", f"killed by {name}{hint}" + (f": {last}" if last else "")
    return "failed", last or f"ended with exit code {code} and no word"


def _said(path: Path) -> tuple[str, bool]:
    """The line of standard error that says what happened, or its last line; and whether it tells of an error."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _END))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return "", False
    lines = [_RANK.sub("", line).strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    last = (errors or lines or [""])[-1]
    return last if len(last) <= _LONGEST else f"{last[: _LONGEST - 1]}…", bool(errors)


Execute = Callable[[Sequence[Case]], Generator[Case, None, None]]
"""Runs cases and yields each when it has ended and its rows are kept."""

RETRIED: tuple[Status, ...] = ("failed", "out of memory")


def sweep_records(
    cases: Sequence[Case], execute: Execute, retried: Sequence[Status] = ()
) -> Generator[Row, None, None]:
    """The rows of finished cases, then those of the others as they end, each with its case's number from 1."""
    numbers = {case.identity: number for number, case in enumerate(cases, start=1)}
    pending = [case for case in cases if not case.is_finished(retried)]
    with contextlib.closing(execute(pending)) as ended:
        for case in itertools.chain((case for case in cases if case not in pending), ended):
            for row in case.finished() or ():
                yield replace(row, number=numbers[case.identity])
