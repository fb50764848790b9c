"""The columns of a sweep's table: the flags that its file sets, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.records import Row
from trainstep.report.columns import OUTCOME, Column, case_column, median_column, value_column
from trainstep.report.numbers import count
from trainstep.report.sweep_axes import is_predicted, settings_of, shown

CAPTION = "The sweep: one row per case, or per row of a case that measures several"


def sweep_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """The columns for these rows."""
    step = "predicted step (ms)" if is_predicted(rows) else "step (ms) [95 %]"
    return (
        Column("case", lambda row: count(row.values.get("number"))),
        case_column("command", "command"),
        *(_setting(name) for name in settings_of(rows)),
        Column("row", lambda row: str(row.case.get("row") or "")),
        Column("n", lambda row: count(row.values.get("n")), setting=True, brief=False),
        median_column(step, "step"),
        median_column("forward and backward (ms) [95 %]", "both"),
        median_column("call (ms) [95 %]", "time"),
        value_column("tokens/s", "tokens_per_s"),
        value_column("peak (GiB)", "peak_gib"),
        value_column("case took (s)", "case_s", brief=False),
        Column("folder in cases/", lambda row: str(row.values.get("folder", "")), brief=False),
        OUTCOME,
    )


def _setting(name: str) -> Column:
    return Column(name.replace("_", " "), lambda row: shown(row.case.get(name)), setting=True)
