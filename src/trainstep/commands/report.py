"""`trainstep report`: the page of training runs, finished or not, or of any command's results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from trainstep.base.errors import UsageError
from trainstep.commands.options import Common
from trainstep.commands.output import console_for_output

PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Report(Common):
    """Write report.html of training runs as far as they have come, or of the results of other commands."""

    has_summary = False

    runs: Positional[tuple[Path, ...]]
    """Folders of training runs, which may be under way or have been killed, or of other commands' launches, such as
    results/run/01-train or results/run/latest; or a results.jsonl."""
    out: Path | None = None
    """Folder for report.html; by default that of the run, where one is named."""

    def run(self) -> int:
        from trainstep.report.page import write_html
        from trainstep.rows.records import collection_paused, read_records
        from trainstep.train.history import METRICS, history

        if not self.runs:
            raise UsageError("nothing to report: name a run's folder, such as results/run/latest, or its results.jsonl")
        if self.out is None and len(self.runs) > 1:
            raise UsageError(f"{len(self.runs)} runs are named, which has no folder of its own; say where with --out")
        first = self.runs[0]
        folder = self.out or (first if first.is_dir() else first.parent)
        console, named = console_for_output(), ", ".join(map(str, self.runs))
        with collection_paused(), console.status(f"reading {named}") as status:
            found = [[history(path)] if (path / METRICS).exists() else read_records(path) for path in self.runs]
            rows = [row for each in found for row in each]
            status.update(f"drawing the page of {len(rows):,} rows")
            try:
                write_html(rows, folder / PAGE)
            except (ArithmeticError, LookupError, TypeError, AttributeError) as error:
                if self.debug:
                    raise
                raise UsageError(
                    f"no page can be made of {named}: its rows do not go together ({type(error).__name__}: {error}); "
                    "expected rows as a trainstep command wrote them. --debug shows where"
                ) from error
        console.print(f"written to {folder / PAGE}")
        return 0
