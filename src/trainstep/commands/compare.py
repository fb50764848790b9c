"""`trainstep compare`: two result files, row by row."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from trainstep.base.errors import UsageError
from trainstep.base.stats import RUN_SPREAD
from trainstep.commands.options import Common, commas
from trainstep.commands.output import CASE_FAILED, console_for_output, show_table


@dataclass(frozen=True, kw_only=True)
class Compare(Common):
    """Compare the results of two runs: a ratio with its interval per matching row, and a verdict where it is due.

    The exit code is 1 where a case that the first file has times of went wrong, or failed, in the second.
    """

    old: Positional[Path]
    """Folder of the run before, such as results/run/01-train, or its results.jsonl."""
    new: Positional[Path]
    """Folder of the run after, or its results.jsonl."""
    spread: float = RUN_SPREAD
    """Relative difference by which intervals are widened where a file has one run of a case; where both have several,
    as `bench ab` writes them, the interval holds between runs and needs no widening."""
    across: commas(str) = ()  # type: ignore[valid-type]
    """Columns in which the rows may differ: workload,precision compares a model with its rewritten form in bf16."""

    def run(self) -> int:
        from trainstep.report.compare import compare, comparison_table, other_conditions, unmatched
        from trainstep.rows.records import collection_paused, read_records

        if not 0 <= self.spread < math.inf:
            raise UsageError(f"spread is {self.spread}; expected a share of 0 or more, as 0.03 for 3 %")
        console = console_for_output()
        with collection_paused():
            with console.status(f"reading {self.old} and {self.new}"):
                old, new = read_records(self.old), read_records(self.new)
                comparisons = compare(old, new, self.spread, self.across)
            show_table(console, comparison_table(comparisons, f"{self.old} → {self.new}"))
            if conditions := other_conditions(old, new):
                console.print(f"• Not measured under the same conditions: {'; '.join(conditions)}.")
            left_out = unmatched(old, new, self.across)
            for each in left_out:
                console.print(f"• Left out: {each}.")
            gc.freeze()  # nor one at the end
        return CASE_FAILED if any(each.is_lost for each in left_out) else 0
