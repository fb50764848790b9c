"""Rows of analyses that never ran: the same on every machine, and with every outcome that a report must show.

`cpu_analysis()` is what a laptop gives: two changes accepted, two inconclusive, one slower. `h200_analysis()` is what a
GPU gives, with a wrong change, a slower one, one that does not fit, one that is unsupported, one with too few samples
for an interval, and a GPU that was throttled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.report.changes import carried
from trainstep.rows import ChangeRow
from trainstep.rows.records import Row, Scalar, read_records

CPU: Mapping[str, Scalar] = {"date": "2026-01-02", "device": "A CPU with 2 cores", "torch": "2.13.0+cpu"}


def cpu_analysis(workload: str = "tiny") -> list[Row]:
    """A whole analysis of a small model on a CPU."""
    return _read("cpu", workload)


def h200_analysis(workload: str = "large") -> list[Row]:
    """A whole analysis of a large model on a GPU."""
    return _read("h200", workload)


def _read(name: str, workload: str) -> list[Row]:
    rows = read_records(Path(__file__).with_name("rows") / f"{name}.jsonl")
    rows = [replace(row, workload=workload) if "workload" in row.case else row for row in rows]
    # A change's line and what it answers are those of this version, as a ladder writes them today.
    return [replace(row, **carried(row.change)) if isinstance(row, ChangeRow) else row for row in rows]
