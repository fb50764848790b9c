"""The charts of a profile: the roofline, and one step's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainstep.kinds import TimelineRow
from trainstep.report.charts import COLOURS, TOOLTIP, add_text, empty_figure
from trainstep.report.numbers import number, numeric

if TYPE_CHECKING:
    from bokeh.plotting import figure

FAMILY_ROLES: Mapping[str, str] = {
    "tensor-core matmul": "kind-1",
    "matmul": "kind-1",
    "FP32 SIMT matmul": "kind-2",
    "fused attention": "kind-3",
    "softmax": "kind-4",
    "normalisation": "kind-5",
    "elementwise": "kind-6",
    "reduction": "kind-7",
    "copy": "kind-8",
    "optimizer": "neutral",
    "communication": "warn",
    "other": "series-1",
}  # Colour of each family
PHASE_ROLES: Mapping[str, str] = {"forward": "series-1", "loss": "warn", "backward": "series-3", "optimizer": "neutral"}
LANE_HEIGHT = 46
_PHASES = "phase"


@dataclass(frozen=True)
class Point:
    """One family in the roofline."""

    name: str
    flop_per_byte: float
    tflops: float
    tip: str


def roofline(points: Sequence[Point], matmul_tflops: Mapping[str, float], copy_gb_s: float) -> figure:
    """Achieved arithmetic rate over arithmetic intensity, under what this device reaches (Williams et al. 2009).

    Args:
        points: at least one.
        matmul_tflops: name of each ceiling → its rate.
        copy_gb_s: measured bandwidth.
    """
    from bokeh.models import ColumnDataSource, HoverTool, Range1d

    slope = copy_gb_s / 1e3  # TFLOP/s for each FLOP per byte
    reach = [point.flop_per_byte for point in points]
    ridge = max(matmul_tflops.values()) / slope
    left, right = min(reach) / 3, max(*reach, ridge) * 3
    lowest = min(point.tflops for point in points) / 3
    plot = empty_figure(
        height=320,
        x_axis_type="log",
        y_axis_type="log",
        x_range=Range1d(left, right),
        y_range=Range1d(lowest, 3 * max(matmul_tflops.values())),
        y_axis_label="TFLOP/s",
    )
    plot.xaxis.axis_label = "FLOP per byte"
    plot.grid.grid_line_color = COLOURS["rule"]
    for name, peak in matmul_tflops.items():
        corner = peak / slope
        if corner <= left:
            plot.line([left, right], [peak, peak], line_color=COLOURS["neutral"], line_width=1.2)
        else:
            ends = [left, corner, max(right, corner)]
            plot.line(ends, [left * slope, peak, peak], line_color=COLOURS["neutral"], line_width=1.2)
        text = f"{name}: {number(peak)}"
        add_text(plot, [right / 1.15], [peak], [text], "muted", text_align="right", text_baseline="bottom")
    columns = {
        "x": reach,
        "y": [point.tflops for point in points],
        "name": [point.name for point in points],
        "tip": [point.tip for point in points],
        "colour": [COLOURS[FAMILY_ROLES.get(point.name, "series-1")] for point in points],
    }
    style = {"fill_color": "colour", "line_color": COLOURS["paper"], "hover_line_color": COLOURS["ink"]}
    dots = plot.scatter(x="x", y="y", size=13, source=ColumnDataSource(columns), **style)
    plot.add_tools(HoverTool(renderers=[dots], tooltips=TOOLTIP, visible=False))
    return plot


def timeline(row: TimelineRow) -> figure:
    """One step, a lane for each stream and for copies and communication; drag to zoom, double-click for all of it."""
    from bokeh.models import ColumnDataSource, FixedTicker, PlainText, Range1d

    series = row.series
    start = [numeric(each) / 1e6 for each in series["start_ns"]]
    length = [numeric(each) / 1e6 for each in series["duration_ns"]]
    texts = {name: [str(each) for each in series[f"{name}_names"]] for name in _TABLES}
    columns = {name: [texts[name][int(numeric(each))] for each in series[name]] for name in _TABLES}
    lanes = [_PHASES, *sorted(texts["lane"], key=_lane_order)]
    height = {lane: -index for index, lane in enumerate(lanes)}
    end = max((begin + duration for begin, duration in zip(start, length, strict=True)), default=1.0)
    plot = empty_figure(
        height=len(lanes) * LANE_HEIGHT + 60,
        x_range=Range1d(0, end, bounds=(0, end), min_interval=1e-3),
        y_range=Range1d(-len(lanes) + 0.4, 0.6),
    )
    plot.xaxis.axis_label = "ms from the step’s first kernel"
    plot.xgrid.grid_line_color = COLOURS["rule"]
    plot.yaxis.ticker = FixedTicker(ticks=list(height.values()))
    plot.yaxis.major_label_overrides = {-index: PlainText(text=lane) for index, lane in enumerate(lanes)}
    plot.yaxis.major_label_text_color = COLOURS["ink"]
    counts = [int(numeric(each)) for each in series["count"]]
    source = {
        "left": start,
        "right": [begin + duration for begin, duration in zip(start, length, strict=True)],
        "y": [height[lane] for lane in columns["lane"]],
        "name": [name if count == 1 else f"{count} kernels, the longest {name}"
                 for name, count in zip(columns["kernel"], counts, strict=True)],
        "tip": [
            f"{family}, {phase}\n{module}\n{length_text(duration)}"
            for family, phase, module, duration in zip(
                columns["family"], columns["phase"], columns["module"], length, strict=True
            )
        ],
        "colour": [COLOURS[FAMILY_ROLES.get(family, "series-1")] for family in columns["family"]],
    }  # fmt: skip
    style = {"fill_color": "colour", "line_color": None, "hover_fill_color": COLOURS["ink"], "hover_line_color": None}
    drawn = ColumnDataSource(source, name="timeline")
    bars = plot.hbar(y="y", left="left", right="right", height=0.72, source=drawn, **style)
    strips = _phase_strips(plot, start, length, columns["phase"])
    add_zoom(plot, [bars, strips])
    return plot


_TABLES = ("kernel", "family", "phase", "module", "lane")


def _phase_strips(plot: figure, start: Sequence[float], length: Sequence[float], phases: Sequence[str]) -> Any:
    """From each phase's first kernel to its last, in the uppermost lane."""
    from bokeh.models import ColumnDataSource

    found: dict[str, tuple[float, float]] = {}
    for begin, duration, phase in zip(start, length, phases, strict=True):
        first, last = found.get(phase, (begin, begin))
        found[phase] = (min(first, begin), max(last, begin + duration))
    known = {phase: found[phase] for phase in PHASE_ROLES if phase in found}
    columns = {
        "y": [0] * len(known),
        "left": [first for first, _ in known.values()],
        "right": [last for _, last in known.values()],
        "name": list(known),
        "tip": [f"from {number(first)} to {number(last)} ms" for first, last in known.values()],
        "colour": [COLOURS[PHASE_ROLES[phase]] for phase in known],
    }
    style = {"fill_color": "colour", "line_color": None}
    return plot.hbar(y="y", left="left", right="right", height=0.3, source=ColumnDataSource(columns), **style)


def add_zoom(plot: figure, renderers: Sequence[Any]) -> None:
    """Drag to see a part of the time axis closer, double-click (or the tool) for all; hovering tells a bar's `tip`."""
    from bokeh.models import BoxZoomTool, HoverTool, ResetTool, WheelZoomTool

    zoom = BoxZoomTool(dimensions="width")
    wheel = WheelZoomTool(dimensions="width", modifiers={"shift": True})
    hover = HoverTool(renderers=list(renderers), tooltips=TOOLTIP, point_policy="follow_mouse", visible=False)
    plot.toolbar_location = "above"
    plot.toolbar.logo = None
    plot.add_tools(zoom, wheel, ResetTool(), hover)
    plot.toolbar.active_drag = zoom
    plot.toolbar.active_scroll = wheel


def _lane_order(lane: str) -> tuple[int, str]:
    return ({"communication": 1, "copies": 2}.get(lane, 0), lane)


def length_text(milliseconds: float) -> str:
    """A kernel's time with a unit that suits it."""
    return f"{number(milliseconds * 1e3)} µs" if milliseconds < 1 else f"{number(milliseconds)} ms"
