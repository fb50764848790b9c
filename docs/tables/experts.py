"""The table of scripts that a ladder climbed, beside what an expert wrote by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from tables.run import kept
from trainstep.report.tables import Table, text_table
from trainstep.rows import FINAL

TITLES = (
    "script",
    "GPU",
    "as it is (ms)",
    "ladder's top (ms)",
    "accepted",
    "by hand (ms)",
    "has by hand",
    "of its speed [95 %]",
)


def experts() -> Table:
    """Milliseconds of a step as it is, of the ladder's top and of the expert's script: medians of runs' medians."""
    where, found = kept("experts.json")
    return text_table("experts", where, TITLES, [_line(cell) for cell in found.values()])


def _line(cell: Mapping[str, Any]) -> tuple[str, ...]:
    baseline, *tried = cell["changes"]
    built_on = [row["change"] for row in tried if row["accepted"] and row["change"] != FINAL]
    ended = "" if cell["is_whole"] else f" (interrupted after {cell['climbed_s'] / 60:.0f} minutes)"
    low, high = cell["of_expert_low"], cell["of_expert_high"]
    return (
        cell["what"],
        cell["device"].removeprefix("NVIDIA ").split()[0],
        f"{baseline['step_ms']:.1f}",
        f"{statistics.median(cell['top_ms']):.1f}",
        (", then ".join(built_on) or "nothing") + ended,
        f"{statistics.median(map(statistics.median, cell['expert_ms'])):.1f}",
        cell["by_hand"],
        f"{cell['of_expert']:.2f}×" + (f" [{low:.2f}–{high:.2f}]" if low is not None else ", within this run"),
    )


TABLES = {"experts": experts}
