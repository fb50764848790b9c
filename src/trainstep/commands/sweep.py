"""`trainstep sweep`: a command that measures, over a grid from a file, each case in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from trainstep.base.errors import UsageError, say
from trainstep.commands.bench import Bench
from trainstep.commands.memory import Memory
from trainstep.commands.options import Common, parse_as
from trainstep.commands.output import run_and_report
from trainstep.commands.plan import Plan
from trainstep.commands.profile import Analyze, Profile

if TYPE_CHECKING:
    from trainstep.bench.sweep.cases import Case
    from trainstep.rows.records import Row, Status

ENDING_S = 3.0  # what the case of a sweep that was just killed takes to end
SWEPT: Any = Analyze | Bench | Memory | Plan | Profile
"""The commands that a sweep's file may name."""


@dataclass(frozen=True, kw_only=True)
class Sweep(Common):
    """Run a grid from a TOML file, each case in a process of its own; run it again to resume."""

    file: Positional[Path]
    """TOML file: command = "bench step", [fixed] with one value per flag, [axes] with a list of values per flag."""
    timeout: float | None = None
    """Seconds after which a case is ended; by default the file's, else none."""
    retry: Literal["failed"] | None = None
    """failed: run the cases again that failed or ran out of memory. Without it every case that has ended is left."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Check the file and print what would run."""
    out: Path | None = None
    """Folder for results.jsonl, tables/, report.html and cases/; by default results/sweep-NAME of NAME.toml."""

    def run(self) -> int:
        from trainstep.base.guards import StopSignals, held_folder
        from trainstep.bench.sweep.cases import load_grid
        from trainstep.bench.sweep.rows import RETRIED, sweep_records
        from trainstep.bench.sweep.run import run_here

        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout is {self.timeout:g}; expected seconds above 0")
        out = self.out or Path("results") / f"sweep-{self.file.stem}"
        grid = load_grid(self.file, lambda words: parse_as(SWEPT, words), out)
        retried = RETRIED if self.retry == "failed" else ()
        cases = grid.cases
        if self.dry_run:
            for case in cases:
                say(f"{'finished' if case.is_finished(retried) else 'to run'}  {shlex.join(case.words)}")
            say(_count(cases, retried))
            return 0
        timeout_s = self.timeout if self.timeout is not None else grid.timeout_s
        with held_folder(out, "trainstep sweep", wait_s=ENDING_S) as lock, StopSignals(raises=True):
            say(_count(cases, retried))
            execute = functools.partial(run_here, timeout_s=timeout_s, lock=lock)
            with contextlib.closing(sweep_records(cases, execute, retried)) as records:
                told = _told(records, grid.axes, len(cases))
                return run_and_report(told, out, f"sweep {self.file.name}", total=len(cases))


def _count(cases: Sequence[Case], retried: Sequence[Status]) -> str:
    finished = sum(case.is_finished(retried) for case in cases)
    to_run = f"{len(cases) - finished} to run" if finished < len(cases) else "nothing to run"
    return f"{len(cases)} cases of {cases[0].command}: {finished} finished before, {to_run}"


def _told(records: Iterator[Row], axes: Sequence[str], total: int) -> Iterator[Row]:
    """The rows, each said in a line where no progress bar is shown, as in the log of a long run."""
    from trainstep.report.subjects.sweep import named

    for record in records:
        if not sys.stdout.isatty():
            point = {name: record.case[name] for name in (*axes, "row") if record.case.get(name) is not None}
            say(f"{record.values['number']}/{total} {named(point)}: {record.status}")
        yield record
