"""Scripts that a ladder climbed beside what an expert wrote by hand, in whole and as README.md shows them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from tables import in_times, times_as_long
from tables.attention import by_shape
from tables.run import scripts_of
from trainstep.report.numbers import NONE
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


def headline() -> Table:
    """Each script's three times, and attention beside flash-attn 4, as shares of an expert's speed."""
    table = experts()
    lines = [tuple(texts[place] for place in (0, 1, 2, 3, 5, 7)) for texts in table.texts()]
    every = [times_as_long(*found["flash-attn"]).partition(" ")[0] for found in by_shape()]
    kernels = f"attention in bf16, {len(every)} shapes; by hand: flash-attn 4"
    lines.append((kernels, "H200", *[NONE] * 3, f"{min(every).rstrip('×')}–{max(every)}"))
    wanted = ("workload", "GPU", "as written (ms)", "by trainstep (ms)", "by hand (ms)", "of an expert's speed [95 %]")
    return text_table("readme-results", table.caption, wanted, lines)


TABLES = {"experts": experts, "readme-results": headline}
