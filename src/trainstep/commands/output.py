"""Output of commands: progress, tables, findings, and the files of a run."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainstep.base.cores import busy, cores, load
from trainstep.base.errors import UsageError, printable, say
from trainstep.base.files import aside
from trainstep.base.guards import StopSignals, code_of

if TYPE_CHECKING:
    import rich.console

    from trainstep.report.answer import Launch
    from trainstep.report.findings import Finding
    from trainstep.report.tables import Table
    from trainstep.rows.records import Row, SoFar

CASE_FAILED = 1
"""Exit code when a case failed or computed wrong, when none could be measured, or when `compare` found one lost."""
BAD_INPUT = 2
"""Exit code of a mistake that the user can mend, a disk or an output that takes no more among them."""
STOPPED = "Stopped"
"""First word of the line on what a signal left."""
WIDTH, LEAST_WIDTH = 80, 40
"""Characters of a line where the output is no terminal and COLUMNS is not set, and of a line at least."""
How = Literal["", "verbose", "json", "quiet"]
HOW: ContextVar[How] = ContextVar("HOW", default="")
"""Output that a flag asks for, in place of the answer alone. The command line sets it around a command."""
PLAIN = {"×": "x", "–": "-", "·": "-", "•": "*", "…": "...", "→": "->", "’": "'", "µ": "u", "✓": "+", "█": "#"}
"""Characters of ours in ASCII. Parts of a bar are left out, and all others are `?`."""


def plain(error: UnicodeError) -> tuple[str, int]:
    """Text in ASCII for what an encoding lacks, as a handler of `codecs`."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join("" if "▉" <= each <= "▏" else PLAIN.get(each, "?") for each in lacking), error.end


def has_c_locale() -> bool:
    """True if the environment asks for the C locale, under which Python writes UTF-8 all the same."""
    named = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next(filter(None, named), "") in ("C", "POSIX")


class SteadyOutput:
    """Standard output that ends no run when it fails, as where `head` has read enough: what follows is dropped.

    What the terminal's encoding lacks is printed in ASCII, as all is in the C locale.
    """

    def __init__(self, stream: Any) -> None:
        self.failure: OSError | None = None
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            codecs.register_error("plain", plain)
            stream.reconfigure(encoding="ascii" if has_c_locale() else None, errors="plain")

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            self.failure = self.failure or error
            with contextlib.suppress(OSError):  # what is left in the buffer, and what child processes write, goes there
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextlib.contextmanager
def steady_outputs() -> Iterator[SteadyOutput]:
    """Standard output and error as `SteadyOutput`, also where they were closed before the start; yields the first."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: else the next file would have it
    before = sys.stdout, sys.stderr
    out, err = (SteadyOutput(stream or open(os.devnull, "w")) for stream in before)  # noqa: SIM115
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def output_failed(out: SteadyOutput) -> str | None:
    """Message for an output that took no more; None where all went well, or its reader has gone."""
    if out.failure is None or out.failure.errno == errno.EPIPE:
        return None
    return f"cannot write to standard output: {out.failure.strerror}; what was measured is in files"


OnPart = Callable[[str], object]
"""Told what is measured next."""


@contextlib.contextmanager
def memory_as_mistake() -> Iterator[None]:
    """Raise `UsageError` where the block runs out of memory outside of any case, which would be a row."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        from trainstep.measure.outcome import classify

        found = classify(error)
        if found.status != "out of memory":
            raise
        raise UsageError(
            f"out of memory: {found.reason}. A smaller model or --batch, --checkpointing every-1, or --scheme fsdp on "
            "more processes takes less"
        ) from error


def run_and_report(
    records: Iterable[Row | SoFar] | Callable[[OnPart], Iterable[Row | SoFar]],
    out: Path,
    title: str,
    total: int | None = None,
) -> int:
    """Write each record as it comes, with progress on standard error; write the report; then print the answer.

    Ctrl-C, SIGTERM and SIGHUP end the measurements; what there is by then is reported. So it is where a mistake of the
    user's, found in the middle, ends them.

    Args:
        records: or a function that gives them, which tells the one that it is given what it measures next.

    Raises:
        UsageError: the rows or the report cannot be written, or what the records raised. What was measured is printed
            even then.
    """
    from trainstep.report.answer import Launch
    from trainstep.rows.records import RecordWriter

    console, progress = console_for_output(), console_for_output(to_stderr=True)
    writer = RecordWriter(out / "results.jsonl")
    machine = busy(load(), cores()).strip(" ()")
    stopped: UsageError | None = None
    code = 0
    signals = StopSignals(raises=True)
    try:
        with signals, memory_as_mistake():
            for record in _with_progress(records, progress, title, total):
                writer.write(record)
                if signals.received:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        code = code_of(signals.received)
    except Exception as error:
        if signals.received is not None:  # the error is the signal's, which ended other ranks or processes too
            code = code_of(signals.received)
        elif isinstance(error, UsageError) and writer.rows:
            stopped = error
        else:
            raise
    finally:
        writer.close()
    launch, early = Launch(title, machine=machine), STOPPED if code else "An error ended this" if stopped else ""
    try:
        failed = show_report(writer.rows, out, console, launch, early=early)
    except UsageError as error:
        stopped = error if stopped is None else UsageError(f"{stopped}; {error}")
    if stopped is not None:
        raise stopped
    return code or (CASE_FAILED if failed else 0)


def show_report(
    rows: Sequence[Row],
    out: Path,
    console: rich.console.Console,
    launch: Launch,
    *,
    early: str = "",
    kinds: tuple[type[Row], ...] = (),
) -> bool:
    """Write the report of rows and its summary, and print the answer, with -v tables and all findings below it; with
    --json the summary alone, on standard output. True if a case or a ladder's baseline failed.

    Args:
        rows, out: results, and the report's folder.
        console: where to print.
        launch: what the rows are of.
        early: words on how it ended before its end, if it did.
        kinds: of which rows -v prints tables; by default of all.

    Raises:
        UsageError: the report cannot be written. What was measured is printed even then.
    """
    from trainstep.report.answer import answer, cases_of
    from trainstep.report.as_json import as_json
    from trainstep.report.page import Report
    from trainstep.report.subjects.climbs import failed_baselines

    report, how = Report(rows, launch.title), HOW.get()
    found, is_shown = report.findings, how in ("", "verbose")
    files = {"report": "report.html", "results": "results.jsonl", "tables": "tables/", "summary": "summary.json"}
    named = ("trace", "snapshot")  # values that name a file written beside the rows
    files |= {f"{name} {each}": str(each) for row in rows for name in named if (each := row.values.get(name))}
    summary = json.dumps(as_json(rows, found, launch, files, is_stopped=bool(early)))
    unwritten: Exception | None = None
    try:
        if rows:
            with aside(out / files["summary"]) as draft:
                draft.write_text(f"{summary}\n")
            report.write(out)
    except Exception as error:  # also of a drawing, beside which the tables stand
        unwritten = error
    if early:
        say(f"{early}. {len(rows)} rows measured so far are kept.", to_stderr=console.stderr or not is_shown)
    without = failed_baselines(rows)
    for row in without:
        why = f"The baseline failed. {row.workload}: {row.status}: {row.reason}"
        say(why, to_stderr=console.stderr or not is_shown)
    written = f"Written to {out}: {', '.join(files.values())}" if rows and unwritten is None else ""
    launch = replace(launch, written=written, is_brief=how != "verbose")
    for line in answer(rows, found, launch, console.width) if rows and is_shown else ():
        console.print(line)
    if how == "verbose":
        _show_tables(rows, found, console, kinds)
    if how == "json":
        say(summary)
    if unwritten is not None:
        raise unwritten
    cases = cases_of(rows)
    if cases and all(row.status != "ok" for row in cases):
        return True
    tried = [row for row in cases if row.kind != "change"]  # a change that fails is one that a ladder rejects
    return bool(without) or any(row.status in ("failed", "wrong") for row in tried)


def _show_tables(
    rows: Sequence[Row], found: Sequence[Finding], console: rich.console.Console, kinds: tuple[type[Row], ...]
) -> None:
    from trainstep.report.compare import comparison_table, repeatability
    from trainstep.report.subjects import make_tables

    tables = make_tables([row for row in rows if not kinds or isinstance(row, kinds)], "terminal")
    if passes := repeatability(rows):
        tables.append(comparison_table(passes, "Later passes against the first: the interval should contain 1"))
    for table in tables:
        show_table(console, table)
    for finding in found:
        console.print(f"• {finding.sentence}")


def _with_progress(
    records: Iterable[Row | SoFar] | Callable[[OnPart], Iterable[Row | SoFar]],
    console: rich.console.Console,
    title: str,
    total: int | None,
) -> Iterator[Row | SoFar]:
    from rich.console import Group
    from rich.live import Live
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    from trainstep.rows.records import SoFar

    times = (TimeElapsedColumn(), "left:", TimeRemainingColumn())
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), *times)
    parts = Progress("  {task.description}", TimeElapsedColumn(), console=console, transient=True)
    start = time.monotonic()

    def on_part(part: str) -> None:
        """Shown below with its own time; where there is no terminal, which shows nothing meanwhile, as a line."""
        for each in list(parts.task_ids):
            parts.remove_task(each)
        parts.add_task(escape(printable(part)), total=None)
        if not console.is_terminal:
            console.print(f"{time.monotonic() - start:4.0f} s  {part}")

    whole = Progress(*columns, console=console, transient=True)
    with Live(Group(whole, parts), console=console, transient=True, refresh_per_second=4):
        task = whole.add_task(escape(printable(title)), total=total)
        for record in records(on_part) if callable(records) else records:
            if isinstance(record, SoFar):
                yield record
                continue
            what = " ".join(str(value) for value in record.case.values() if value is not None)
            whole.update(task, advance=1, description=escape(printable(f"{title}: {what[:60]}")))
            yield record


LONGEST_DRAWN = 1000
"""Rows of a table that is drawn; of a longer one, which takes a minute to draw, the rows are comma-separated values."""


def show_table(console: rich.console.Console, table: Table) -> None:
    """Print a table whole."""
    from trainstep.report.formats import to_csv
    from trainstep.report.terminal import to_terminal

    if len(table.rows) <= LONGEST_DRAWN:
        console.print(to_terminal(table, console.width))
        return
    console.print(f"{table.caption} ({len(table.rows):,} rows, as comma-separated values)")
    say(to_csv(table), end="")


def console_for_output(*, to_stderr: bool = False) -> rich.console.Console:
    """Console that prints text as it is, and obeys no name in it. Its width is COLUMNS, the terminal's, or else 80."""
    import rich.console

    class Console(rich.console.Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)

    stream = sys.stderr if to_stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    width = max(int(columns), LEAST_WIDTH) if columns.isdecimal() and int(columns) else None
    width = width or (None if stream.isatty() else WIDTH)
    is_quiet = HOW.get() == "quiet" or (HOW.get() == "json" and not to_stderr)
    return Console(stderr=to_stderr, width=width, markup=False, highlight=False, quiet=is_quiet)
