"""What commands show and keep: progress, tables, findings, and the files of a run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.errors import printable
from trainstep.guards import StopSignals

if TYPE_CHECKING:
    import rich.console

    from trainstep.records import Row

NOTHING_RAN, INTERRUPTED = 1, 130
"""Exit codes when every case failed (there are rows, and they only say why), and after Ctrl-C, as shells have it."""


def run_and_report(records: Iterable[Row], out: Path, title: str, total: int | None = None) -> int:
    """Write each record as it comes, with progress; then print the tables and findings and write the report."""
    from trainstep.records import RecordWriter
    from trainstep.report.compare import comparison_table, repeatability
    from trainstep.report.formats import to_terminal
    from trainstep.report.page import Report
    from trainstep.report.subjects import make_tables

    console = console_for_output()
    writer = RecordWriter(out / "results.jsonl")
    console.print(f"trainstep {title} → {out}")
    taken: list[Row] = []
    code = 0
    try:
        with StopSignals(signal.SIGINT, raises=True) as signals:
            for record in _with_progress(records, console, title, total):
                writer.write(record)
                taken.append(record)
                if signals.received:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        console.print(f"[bold]Stopped.[/bold] {len(taken)} rows measured so far are kept.", markup=True)
        code = INTERRUPTED
    finally:
        writer.close()
    report = Report(taken)
    tables = make_tables(taken, "terminal")
    if passes := repeatability(taken):
        tables.append(comparison_table(passes, "Later passes against the first: the interval should contain 1"))
    for table in tables:
        console.print(to_terminal(table))
    for finding in report.findings:
        console.print(f"• {finding.sentence}")
    if report.recommended_flags:
        console.print(f"\nRecommended: {report.recommended_flags}")
    if taken:
        report.write(out)
        files = ("trace", "snapshot")  # values that name a file written beside the rows
        beside = "".join(f", {each}" for row in taken for name in files if (each := row.values.get(name)))
        console.print(f"\nWritten to {out}: results.jsonl, report.html, tables/{beside}")
    cases = [row for row in taken if row.kind not in ("workload", "ceiling")]  # which are there whatever fails
    if cases and all(row.status != "ok" for row in cases):
        reasons = "The reason:" if len(cases) == 1 else f"The first of {len(cases)} reasons:"
        console.print("[bold]Nothing could be measured.[/bold]", reasons, markup=True)
        console.print(f"{cases[0].status}: {cases[0].reason}")
        return code or NOTHING_RAN
    return code


def _with_progress(
    records: Iterable[Row], console: rich.console.Console, title: str, total: int | None
) -> Iterator[Row]:
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), "left:", TimeRemainingColumn())
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(escape(printable(title)), total=total)
        for record in records:
            what = " ".join(str(value) for value in record.case.values() if value is not None)
            progress.update(task, advance=1, description=escape(printable(f"{title}: {what[:60]}")))
            yield record


def console_for_output() -> rich.console.Console:
    """Prints text as it is, on lines of 160 characters where the output is no terminal; no name in it is obeyed."""
    import rich.console

    class Console(rich.console.Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)

    return Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
