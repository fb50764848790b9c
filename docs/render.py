"""Fill the tables of README.md and docs/*.md from docs/results/, so that no figure in them is typed by hand.

A block between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the table called NAME here. Run as `make docs`;
a test fails when a committed page differs from what this makes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from trainstep.report.compare import comparison_table, repeatability
from trainstep.report.records import Record, of_kind, read_records
from trainstep.report.tables import (
    Column,
    Table,
    case_column,
    make_table,
    mean_column,
    median_column,
    tabulate,
    to_markdown,
    value_column,
)

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

PHASES = tuple(mean_column(f"{name} (ms)", name) for name in ("forward", "loss", "backward", "optimizer", "step"))
SIZE = Column("size", lambda row: str(row.case["workload"]))


def results(name: str, kind: str = "step") -> list[Record]:
    """The records of one kind in docs/results/NAME.jsonl."""
    return of_kind(read_records(DOCS / "results" / f"{name}.jsonl"), kind)


def where(rows: list[Record]) -> str:
    """Hardware, versions, date and commit of the rows."""
    environment = rows[0].environment
    return (
        f"{environment['device']}, torch {environment['torch']}, triton {environment['triton']}, "
        f"{environment['date']}, commit {environment['commit']}"
    )


def sizes(precision: str, compiled: str) -> Table:
    """Phases of every size in one precision, eager or compiled."""
    rows = [
        row
        for row in results("h200-step-sizes")
        if row.case["precision"] == precision and row.case["compile"] == compiled
    ]
    columns = (
        SIZE,
        *PHASES,
        value_column("TFLOP/s", "achieved_tflops"),
        value_column("utilisation (%)", "utilisation", 100),
        value_column("peak (GiB)", "peak_gib"),
    )
    form = "eager" if compiled == "off" else "blocks compiled"
    return tabulate("sizes", f"{precision}, {form}: mean ± std of 10 steps after 5; {where(rows)}", columns, rows)


def warmup() -> Table:
    """The same ten steps' mean with 0, 1, 2 and 5 steps left out before."""
    rows = [row for size in ("small", "large", "2.7B") for row in results(f"h200-warmup-{size}")]
    columns = (SIZE, case_column("warm-up", "warmup"), *PHASES, median_column("step, median [95 %]", "step"),
               value_column("first step (ms)", "first_step_ms"))  # fmt: skip
    return tabulate("warmup", f"fp32, eager, each size in a fresh process; {where(rows)}", columns, rows)


def repeat() -> Table:
    """Passes over the same cases, which must not be told apart."""
    rows = results("h200-repeat")
    return comparison_table(repeatability(rows), f"Three passes over the same cases in one run; {where(rows)}")


def ladder(size: str) -> Table:
    """The rungs of one size."""
    rows = results(f"h200-analyze-{size}", "rung")
    table = make_table("rung", rows, brief=True)
    return dataclasses.replace(table, caption=f"{table.caption}; {where(rows)}")


TABLES: Mapping[str, Callable[[], Table]] = {
    "sizes-fp32": lambda: sizes("fp32", "off"),
    "sizes-bf16": lambda: sizes("bf16", "off"),
    "sizes-fp32-compiled": lambda: sizes("fp32", "blocks"),
    "sizes-bf16-compiled": lambda: sizes("bf16", "blocks"),
    "warmup": warmup,
    "repeat": repeat,
    "ladder-small": lambda: ladder("small"),
    "ladder-large": lambda: ladder("large"),
    "ladder-2.7B": lambda: ladder("2.7B"),
}


def render(text: str) -> str:
    """`text` with every block filled anew."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise SystemExit(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{to_markdown(TABLES[name]())}{match[3]}"

    return BLOCK.sub(fill, text)


def main() -> None:
    """Rewrite the pages in place, or with --check only say which differ."""
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (made := render(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(made, encoding="utf-8")
    print(f"changed: {', '.join(stale)}" if stale else "all tables are up to date")
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
