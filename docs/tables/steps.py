"""Tables of single steps: sizes, warm-up, repeated passes, the ladder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables.source import SIZE, plain, results, where
from trainstep.kinds import RungRow, StepRow
from trainstep.phases import PHASES
from trainstep.report.columns import Column, case_column, mean_column, median_column, value_column
from trainstep.report.compare import comparison_table, repeatability
from trainstep.report.tables import Table, tabulate

MEANS = tuple(mean_column(f"{name} (ms)", name) for name in (*PHASES, "step"))
RATES = (value_column("TFLOP/s", "achieved_tflops"), value_column("utilisation (%)", "utilisation", 100))


def sizes(precision: str, compiled: str) -> Table:
    """Phases of every size in one precision, eager or compiled."""
    every = results("h200-step-sizes", StepRow)
    rows = [row for row in every if (row.precision, row.compile) == (precision, compiled)]
    form = "eager" if compiled == "off" else "blocks compiled"
    caption = f"{precision}, {form}: mean ± std of 10 steps after 5; {where(rows)}"
    return tabulate("sizes", caption, (SIZE, *MEANS, *RATES, value_column("peak (GiB)", "peak_gib")), rows)


def warmup() -> Table:
    """The same ten steps' mean with 0, 1, 2 and 5 steps left out before."""
    rows = [row for size in ("small", "large", "2.7B") for row in results(f"h200-warmup-{size}", StepRow)]
    columns = (SIZE, case_column("warm-up", "warmup"), *MEANS, median_column("step, median [95 %]", "step"),
               value_column("first step (ms)", "first_step_ms"))  # fmt: skip
    return tabulate("warmup", f"fp32, eager, each size in a fresh process; {where(rows)}", columns, rows)


def repeat() -> Table:
    """Passes over the same cases, which must not be told apart."""
    rows = results("h200-repeat", StepRow)
    return comparison_table(repeatability(rows), f"Three passes over the same cases in one run; {where(rows)}")


def limits(size: str) -> Table:
    """The phases of the ladder's first and last kept rungs."""
    kept = [row for row in results(f"h200-analyze-{size}", RungRow) if row.kept]
    columns = (
        Column("rung", lambda row: str(row.case["rung"])),
        *(value_column(f"{name} (ms)", f"{name}_ms") for name in ("forward", "backward", "optimizer", "step")),
        *RATES,
    )
    return tabulate("limits", f"{size}; {where(kept)}", columns, [kept[0], kept[-1]])


TABLES: Mapping[str, Callable[[], Table]] = {
    "sizes-fp32": lambda: sizes("fp32", "off"),
    "sizes-bf16": lambda: sizes("bf16", "off"),
    "sizes-fp32-compiled": lambda: sizes("fp32", "blocks"),
    "sizes-bf16-compiled": lambda: sizes("bf16", "blocks"),
    "warmup": warmup,
    "repeat": repeat,
    "limits-large": lambda: limits("large"),
    **{f"ladder-{size}": partial(plain, f"h200-analyze-{size}", RungRow) for size in ("small", "large", "2.7B")},
}
