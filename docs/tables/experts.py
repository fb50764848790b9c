"""The table of scripts that a ladder climbed, beside what an expert wrote by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from tables import in_times
from tables.run import scripts_of
from trainstep.report.tables import Table, text_table
from trainstep.rows import FINAL

TITLES = (
    *("script", "GPU", "as it is (ms)", "ladder's top (ms)", "accepted", "by hand (ms)", "has by hand"),
    "of its speed [95 %]",
)


def experts() -> Table:
    """Milliseconds of a step as it is, of the ladder's top and of the expert's script: medians of runs' medians."""
    where, found = scripts_of("experts.json")
    return text_table("experts", where, TITLES, [_line(cell) for cell in found.values()])


def _line(cell: Mapping[str, Any]) -> tuple[str, ...]:
    baseline, *tried = cell["changes"]
    built_on = [row["change"] for row in tried if row["accepted"] and row["change"] != FINAL]
    ended = "" if cell["is_whole"] else f" (interrupted after {cell['climbed_s'] / 60:.0f} minutes)"
    low = cell["of_expert_low"]
    return (
        cell["what"],
        cell["device"].removeprefix("NVIDIA ").split()[0],
        f"{baseline['step_ms']:.1f}",
        f"{statistics.median(cell['top_ms']):.1f}",
        (", then ".join(built_on) or "nothing") + ended,
        f"{statistics.median(map(statistics.median, cell['expert_ms'])):.1f}",
        cell["by_hand"],
        in_times(cell["of_expert"], low, cell["of_expert_high"]) + (", within this run" if low is None else ""),
    )


TABLES = {"experts": experts}
