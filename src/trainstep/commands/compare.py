"""`trainstep compare`: two result files, row by row."""

from __future__ import annotations

import gc
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from trainstep.base.errors import UsageError
from trainstep.base.stats import RUN_SPREAD
from trainstep.commands.options import Common, commas
from trainstep.commands.output import CASE_FAILED, HOW, console_for_output, show_table

if TYPE_CHECKING:
    from trainstep.rows.records import Row

MOST_SHOWN, MOST_LEFT = 12, 3
"""Cases that are listed without -v: those of both files, and those that one has not."""


@dataclass(frozen=True, kw_only=True)
class Compare(Common):
    """Compare the results of two runs: a speed-up with its interval per matching row, and a verdict where it is due.

    Exits with 1 if a case that succeeded in OLD failed in NEW, or with --fail-if-slower is slower there.
    """

    has_summary = False

    old: Positional[Path]
    """Folder of the run before, such as results/run/01-train, or its results.jsonl; or a folder of several such runs,
    from which intervals hold between runs."""
    new: Positional[Path]
    """Folder of the run after, or of several; or its results.jsonl."""
    fail_if_slower: str | None = None
    """Exit with 1 if the same work certainly takes this much longer, as 5%: the whole interval is beyond it."""
    spread: float = RUN_SPREAD
    """Relative difference by which intervals are widened where a file has one run of a case; where both have several,
    as `bench ab` writes them, the interval holds between runs and needs no widening."""
    across: commas(str) = ()  # type: ignore[valid-type]
    """Columns in which the rows may differ: workload,precision compares a model with its rewritten form in bf16."""

    out: Path = Path("results/compare")
    """Folder for report.html. The default has a new folder for each launch."""

    def run(self) -> int:
        from trainstep.report import compare as of
        from trainstep.report.page import write_html
        from trainstep.rows.records import collection_paused

        most = None if self.fail_if_slower is None else _share(self.fail_if_slower)
        if not 0 <= self.spread < math.inf:
            raise UsageError(f"spread is {self.spread}; expected a share of 0 or more, as 0.03 for 3 %")
        console = console_for_output()
        with collection_paused():
            with console.status(f"reading {self.old} and {self.new}"):
                old, new = _runs(self.old), _runs(self.new)
                comparisons = of.compare(old, new, self.spread, self.across)
            left_out, is_verbose = of.unmatched(old, new, self.across), HOW.get() == "verbose"
            gate = Counter(each.is_slower_by(most) for each in comparisons if most is not None)
            files = f"{self.old} → {self.new}"
            console.print(f" trainstep compare · {files}\n\n {of.overall(comparisons)}\n")
            if is_verbose:
                show_table(console, of.comparison_table(comparisons, files))
            for each in () if is_verbose else comparisons[:MOST_SHOWN]:
                console.print(f"   {each}")
            conditions = of.other_conditions(old, new)
            notes = [f"Not measured under the same conditions: {'; '.join(conditions)}."] if conditions else []
            left_out.sort(key=lambda each: not each.is_lost)
            for left in left_out if is_verbose else left_out[:MOST_LEFT]:
                what, then = ("Failed", " Run that again, or leave it out.") if left.is_lost else ("Left out", "")
                notes.append(f"{what}: {left}.{then}")
            if gate[True]:
                notes.append(f"Failed: {gate[True]} take over {self.fail_if_slower} longer.")
            elif gate[None]:
                among = f"within {gate[None]} of {len(comparisons)} intervals"
                notes.append(f"Not failed: {self.fail_if_slower} longer is {among}. More runs a side decide.")
            for note in notes:
                console.print(f"• {note}")
            sections = of.before_and_after(comparisons, old, new, notes, files)
            with self.in_folder() as own:
                write_html([*old, *new], own.out / "report.html", f"trainstep compare · {files}", sections)
                console.print(f"Written to {own.out}: report.html")
            gc.freeze()  # nor one at the end
        return CASE_FAILED if gate[True] or any(each.is_lost for each in left_out) else 0


def _share(text: str) -> float:
    if not re.fullmatch(r"(\d+(?:\.\d+)?%|0(?:\.\d+)?)", text):  # 5 alone would be a share of 500 %
        raise UsageError(f"--fail-if-slower is {text}; expected a share of 0 or more, as 5% or 0.05")
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def _runs(path: Path) -> list[Row]:
    """Rows of a run; of a folder that has folders of runs, and nothing newest among them, the rows of each, which say
    in whose folder a run failed."""
    from trainstep.rows import ScriptRow, StepRow
    from trainstep.rows.records import read_records

    if (path / "results.jsonl").exists() or (path / "latest").exists():
        return read_records(path)
    files = sorted(path.glob("*/results.jsonl"))
    if len(files) < 2:
        return read_records(files[0] if files else path)
    found: list[Row] = []
    for at, file in enumerate(files):
        for row in read_records(file):
            if isinstance(row, StepRow | ScriptRow):
                row = replace(row, run=at, reason=f"in {file.parent}: {row.reason}" * (row.status != "ok"))
            found.append(row)
    return found
