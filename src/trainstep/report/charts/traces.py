"""The charts of traces: a profile's roofline, one step's timeline, and steps of several schemes below one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainstep.kinds import ParallelTraceRow, TimelineRow
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
_BAR = {"fill_color": "colour", "line_color": None, "hover_fill_color": COLOURS["ink"], "hover_line_color": None}


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
    drawn = ColumnDataSource(source, name="timeline")
    bars = plot.hbar(y="y", left="left", right="right", height=0.72, source=drawn, **_BAR)
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


STEP_ROLES: Mapping[str, str] = {
    "forward": "series-1",
    "loss": "series-2",
    "backward": "series-4",
    "communication": "kind-8",
    "optimizer": "neutral",
}
"""Colour of each phase; computation has the colour of the phase that it was started in. Where a CPU's thread starts a
collective, it has that of communication."""
HIDDEN, EXPOSED = "kind-3", "warn"
LEGEND = (
    *((STEP_ROLES[name], name) for name in ("forward", "backward", "optimizer")),
    (STEP_ROLES["communication"], "waiting for communication"),
    (HIDDEN, "communication, hidden behind computation"),
    (EXPOSED, "exposed communication"),
)
STRIP_HEIGHT = 21
_OTHER = "kind-6"
_COMMUNICATION, _COPIES = "communication", "copies"
_GAP = 0.5  # Lanes left empty between two schemes
_LETTER = 0.0095  # Share of the axis that a letter takes: a phase that has no room for its name goes without


@dataclass
class _Bars:
    """The columns of one kind of bar."""

    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in ("y", "left", "right", "name", "tip", "colour")}
    )

    def add(self, y: float, ends: tuple[float, float], name: str, tip: str, role: str) -> None:
        for column, each in zip(self.columns.values(), (y, *ends, name, tip, COLOURS[role]), strict=True):
            column.append(each)

    def draw(self, plot: figure, height: float, name: str) -> Any:
        from bokeh.models import ColumnDataSource

        source = ColumnDataSource(self.columns, name=name)
        return plot.hbar(y="y", left="left", right="right", height=height, source=source, **_BAR)


def overlap_chart(rows: Sequence[ParallelTraceRow]) -> figure:
    """A strip for each scheme: its phases, its computation by stream, its communication; drag to zoom.

    Args:
        rows: of traces that ran, at least one.
    """
    from bokeh.models import FixedTicker, PlainText, Range1d

    lanes = [_lanes_of(row) for row in rows]
    tops, depth = [], 0.0
    for own in lanes:
        tops.append(-depth)
        depth += len(own) + 2 + _GAP  # and a heading, and the phases
    end = max(row.span_ms or 0 for row in rows)
    plot = empty_figure(
        height=round(depth * STRIP_HEIGHT) + 60,
        x_range=Range1d(0, end, bounds=(0, end), min_interval=1e-3),
        y_range=Range1d(-depth + _GAP + 0.4, 0.6),
    )
    plot.xaxis.axis_label = "ms from the step’s first kernel"
    plot.xgrid.grid_line_color = COLOURS["rule"]
    labels: dict[float, str] = {}
    kernels, exposed, phases = _Bars(), _Bars(), _Bars()
    for row, own, top in zip(rows, lanes, tops, strict=True):
        height = {lane: top - 2 - index for index, lane in enumerate(own)}
        labels |= {top: row.scheme, top - 1: "phases"}
        labels |= {y: _label(lane, own) for lane, y in height.items()}
        _add_kernels(kernels, row, height)
        _add_exposed(exposed, row, height)
        _add_phases(phases, row, top - 1)
        add_text(plot, [0.0], [top], [_heading(row)], "ink", text_align="left", text_baseline="middle")
    plot.yaxis.ticker = FixedTicker(ticks=sorted(labels))
    plot.yaxis.major_label_overrides = {y: PlainText(text=text) for y, text in labels.items()}
    plot.yaxis.major_label_text_color = COLOURS["ink"]
    drawn = [kernels.draw(plot, 0.84, "parallel-trace"), exposed.draw(plot, 0.84, "parallel-trace-exposed")]
    strips = phases.draw(plot, 0.84, "parallel-trace-phases")
    places = zip(*(phases.columns[name] for name in ("y", "left", "right", "name")), strict=True)
    wide = [
        ((left + right) / 2, y, name) for y, left, right, name in places if right - left >= _LETTER * len(name) * end
    ]
    x, y, names = zip(*wide, strict=True) if wide else ((), (), ())
    add_text(plot, x, y, names, "paper", text_align="center", text_baseline="middle")
    add_zoom(plot, [*drawn, strips])
    return plot


def _heading(row: ParallelTraceRow) -> str:
    if row.hidden_share is None:
        return "no communication"
    return (
        f"{number(row.communication_ms)} ms of communication, {row.hidden_share:.0%} hidden, "
        f"{number(row.exposed_communication_ms)} ms exposed"
    )


def _lanes_of(row: ParallelTraceRow) -> list[str]:
    """Computation first, the busiest stream uppermost; communication right below, always."""
    busy: dict[str, float] = {}
    for lane, duration in zip(_texts(row, "lane"), row.series["duration_ns"], strict=True):
        busy[lane] = busy.get(lane, 0.0) + numeric(duration)
    own = sorted((lane for lane in busy if lane not in (_COMMUNICATION, _COPIES)), key=lambda lane: -busy[lane])
    return [*own, *([_COPIES] if _COPIES in busy else []), _COMMUNICATION]


def _label(lane: str, lanes: Sequence[str]) -> str:
    """The lane's name: that of a stream or thread only where there are several."""
    if lane in (_COMMUNICATION, _COPIES):
        return lane
    alone = sum(each not in (_COMMUNICATION, _COPIES) for each in lanes) == 1
    return "computation" if alone else lane


def _texts(row: ParallelTraceRow, name: str) -> Iterator[str]:
    names = [str(each) for each in row.series[f"{name}_names"]]
    return (names[int(numeric(each))] for each in row.series[name])


def _in_ms(row: ParallelTraceRow, name: str) -> Iterator[tuple[float, float]]:
    prefix = f"{name}_" if name else ""
    for start, duration in zip(row.series[f"{prefix}start_ns"], row.series[f"{prefix}duration_ns"], strict=True):
        yield numeric(start) / 1e6, (numeric(start) + numeric(duration)) / 1e6


def _add_kernels(bars: _Bars, row: ParallelTraceRow, height: Mapping[str, float]) -> None:
    texts = (_texts(row, name) for name in ("lane", "phase", "family", "kernel"))
    counts = row.series["count"]
    for ends, count, lane, phase, family, kernel in zip(_in_ms(row, ""), counts, *texts, strict=True):
        name = kernel if count == 1 else f"{count} kernels, the longest {kernel}"
        tip = f"{row.scheme}: {family}, {phase}\n{length_text(ends[1] - ends[0])}"
        bars.add(height[lane], ends, name, tip, _kernel_role(lane, family, phase))


def _kernel_role(lane: str, family: str, phase: str) -> str:
    """What is exposed is drawn over the communication, which is hidden where it is not."""
    if lane == _COMMUNICATION:
        return HIDDEN
    return STEP_ROLES["communication"] if family == "communication" else STEP_ROLES.get(phase, _OTHER)


def _add_exposed(bars: _Bars, row: ParallelTraceRow, height: Mapping[str, float]) -> None:
    for ends in _in_ms(row, "exposed"):
        tip = f"{row.scheme}\n{length_text(ends[1] - ends[0])} in which nothing is computed"
        bars.add(height[_COMMUNICATION], ends, "exposed communication", tip, EXPOSED)


def _add_phases(bars: _Bars, row: ParallelTraceRow, y: float) -> None:
    for ends, phase in zip(_in_ms(row, "phase_span"), row.series["phase_span_names"], strict=True):
        tip = f"{row.scheme}: from {number(ends[0])} to {number(ends[1])} ms"
        bars.add(y, ends, str(phase), tip, STEP_ROLES.get(str(phase), _OTHER))
