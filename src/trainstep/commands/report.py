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
        with collection_paused():
            found = [[history(path)] if (path / METRICS).exists() else read_records(path) for path in self.runs]
            write_html([row for rows in found for row in rows], folder / PAGE)
        console_for_output().print(f"written to {folder / PAGE}")
        return 0
