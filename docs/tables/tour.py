"""Tables of docs/tour.md: the ladders of the slow and the fast form, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables.source import results, where
from trainstep.kinds import RungRow, StepRow
from trainstep.report.columns import Column, median_column, value_column
from trainstep.report.compare import compare, comparison_table
from trainstep.report.tables import Table, tabulate

ACROSS = ("workload", "precision", "compile", "attention", "optimizer")


def ladder(name: str, form: str) -> Table:
    """The rungs of one form."""
    rows = [row for row in results(f"{name}-tour", RungRow) if row.workload == f"examples.tour.{form}:workload"]
    columns = (
        Column("rung", lambda row: str(row.case["rung"])),
        median_column("step (ms) [95 %]", "step"),
        value_column("speed-up", "speedup"),
        value_column("peak (GiB)", "peak_gib"),
        value_column("gradients off by", "gradient_error", digits=2),
        value_column("allowed", "error_budget", digits=2),
        value_column("verdict", "verdict"),
    )
    return tabulate("tour", f"{form}.py; {where(rows)}", columns, rows)


def compared(name: str) -> Table:
    """slow.py as it is against fast.py with the recommended settings."""
    rows = results(f"{name}-tour", StepRow)
    before, after = (
        [row for row in rows if row.workload == f"examples.tour.{form}:workload"] for form in ("slow", "fast")
    )
    return comparison_table(compare(before, after, across=ACROSS), f"slow.py → fast.py; {where(rows)}")


TABLES: Mapping[str, Callable[[], Table]] = {
    f"tour-{what}-{name}": partial(table, name)
    for name in ("cpu", "h200")
    for what, table in (
        ("slow", partial(ladder, form="slow")),
        ("fast", partial(ladder, form="fast")),
        ("compare", compared),
    )
}
