"""A step's allocations, stacked over its events: the frame drawn here, the allocations laid out by the page's script.

The script (`allocations.js`) stacks them anew whenever the reader asks for more or less detail, so the page carries the
allocations themselves, a few numbers each, and no polygons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainstep.report.charts import COLOURS, add_text, add_zoom, empty_figure
from trainstep.report.numbers import numeric
from trainstep.rows import MemoryTimelineRow

if TYPE_CHECKING:
    from bokeh.plotting import figure

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


def allocation_chart(row: MemoryTimelineRow, unit: str, scale: float) -> figure:
    """The chart of a timeline, its allocations still to be laid out.

    Args:
        unit, scale: the unit of its axis, and how many of it a GiB has.
    """
    from bokeh.models import ColumnDataSource, Range1d, Span

    series, events, peak = row.series, row.events or 0, (row.peak_gib or 0.0) * scale
    plot = empty_figure(height=HEIGHT, y_axis_label=unit, x_axis_label="allocations and releases, in order")
    plot.x_range = Range1d(0, events + 1, bounds=(0, events + 1))
    plot.y_range = Range1d(0, 1.12 * peak, bounds=(0, 1.12 * peak))
    plot.ygrid.grid_line_color = COLOURS["rule"]
    plot.yaxis.ticker.desired_num_ticks = 6
    source = ColumnDataSource({name: [] for name in ("xs", "ys", "colour", "alpha", "name", "tip")}, name="allocations")
    style = {"fill_color": "colour", "fill_alpha": "alpha", "line_color": None}
    hovered = {"hover_fill_color": "colour", "hover_fill_alpha": 1.0, "hover_line_color": COLOURS["ink"]}
    patches = plot.patches(xs="xs", ys="ys", source=source, **style, **hovered)
    edges = [numeric(edge) for edge in series["edges"]]
    total = [numeric(size) / 2**30 * scale for size in series["total"]]
    plot.step(edges, [*total, total[-1]], mode="after", line_color=COLOURS["ink"], line_width=1)
    for start in series["phase_start"]:
        plot.add_layout(Span(location=start, dimension="height", line_color=COLOURS["neutral"], line_dash="dotted"))
    phases = [
        ((numeric(start) + numeric(end)) / 2, str(name))
        for name, start, end in zip(*(series[key] for key in ("phases", "phase_start", "phase_end")), strict=True)
        if numeric(end) - numeric(start) >= _NARROWEST_LABEL * events
    ]
    middles, names = zip(*phases, strict=True) if phases else ((), ())
    add_text(plot, middles, [1.06 * peak] * len(phases), names, "muted", text_align="center")
    plot.add_layout(Span(location=row.peak_state, dimension="height", line_color=COLOURS["warn"], line_dash="dashed"))
    add_zoom(plot, [patches], "auto")
    return plot


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
