"""A step's allocations, stacked over its events: by group here, one by one by the page's script.

The script (`allocations.js`) stacks them anew whenever the reader asks for more or less detail, so the page carries the
allocations themselves, a few numbers each. Without it, in mail for instance, the groups remain.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from trainstep.report.charts import Plot, Scale, twice
from trainstep.report.numbers import numeric
from trainstep.rows import MemoryTimelineRow

HEIGHT = 420
SHOWN = 400  # Allocations drawn one by one before the reader moves the slider
_ROLES: Mapping[str, str] = {
    "parameters": "kind-1",
    "optimizer state": "kind-6",
    "gradients": "kind-3",
    "temporaries": "kind-8",
    **dict.fromkeys(("batch", "unknown", "others"), "neutral"),
    "activations of other modules": "series-2",
}
_OTHER_ROLES = ("kind-2", "kind-5", "kind-4", "kind-7", "kind-1", "kind-3", "kind-6")
_NARROWEST_LABEL = 0.05  # A phase that takes less than this share of the width has no label


def roles(groups: Sequence[str]) -> list[str]:
    """A colour's role for each group: owners have theirs, the others get what is left in order."""
    left = iter(_OTHER_ROLES)
    return [_ROLES[name] if name in _ROLES else next(left, "neutral") for name in groups]


def allocation_chart(row: MemoryTimelineRow, unit: str, scale: float) -> str:
    """The chart of a timeline, its groups stacked; the page's script puts the allocations in their place.

    Args:
        unit, scale: the unit of its axis, and how many of it a GiB has.
    """
    series, events, peak = row.series, row.events or 0, (row.peak_gib or 0.0) * scale
    plot = Plot(Scale(0, events + 1), Scale(0, 1.12 * peak or 1.0), HEIGHT)
    plot.x_axis("allocations and releases, in order", plot.x.ticks())
    plot.y_axis(unit, plot.y.ticks(6))
    edges = [numeric(edge) for edge in series["edges"]]
    plot.stack(edges, [(role, [size / 2**30 * scale for size in held]) for role, held in _stacked(row, edges)])
    plot.line(twice(edges)[1:-1], [size / 2**30 * scale for size in twice(map(numeric, series["total"]))], "ink", 1)
    for name, *ends in zip(*(series[key] for key in ("phases", "phase_start", "phase_end")), strict=True):
        start, end = map(numeric, ends)
        plot.across(start, "neutral dotted")
        if end - start >= _NARROWEST_LABEL * events:
            plot.text((start + end) / 2, 1.06 * peak, str(name), "muted")
    plot.across(row.peak_state or 0, "warn dashed")
    return plot.svg("xy")


def _stacked(row: MemoryTimelineRow, edges: Sequence[float]) -> list[tuple[str, list[float]]]:
    """Colour and bytes in each stretch between two edges, of every group, from below."""
    series, groups = row.series, [str(name) for name in row.series["groups"]]
    grown = [[0.0] * len(edges) for _ in groups]
    for start, end, size, group in zip(*(series[key] for key in ("start", "end", "bytes", "group")), strict=True):
        first, last = (bisect(edges, numeric(at)) - 1 for at in (start, end))
        grown[int(numeric(group))][first] += numeric(size)
        grown[int(numeric(group))][last] -= numeric(size)
    order = sorted(range(len(groups)), key=lambda group: numeric(series["bands"][group]))
    colours, rests = roles(groups), [series.get(f"rest_{place}") or [0.0] * (len(edges) - 1) for place in order]
    return [
        (colours[place], [numeric(small) + large for small, large in zip(rest, accumulate(grown[place]), strict=False)])
        for place, rest in zip(order, rests, strict=True)
    ]


def layout_data(row: MemoryTimelineRow, unit: str, scale: float) -> dict[str, Any]:
    """Data that the page's script lays out: the row's series, the groups' colours, and how to write sizes."""
    series = row.series
    names = ("start", "end", "bytes", "group", "what", "stack", "groups", "bands", "whats", "stacks", "edges")
    rest = {name.removeprefix("rest_"): list(values) for name, values in series.items() if name.startswith("rest_")}
    return {
        **{name: list(series[name]) for name in names},
        "rest": rest,
        "roles": roles([str(name) for name in series["groups"]]),
        "unit": unit,
        "per_unit": 2**30 / scale,
        "last": (row.events or 0) + 1,
        "shown": min(SHOWN, len(series["start"])),
        "left_out": (row.allocations or 0) - (row.drawn or 0),
        "peak": (row.peak_gib or 0) * 2**30,
    }
