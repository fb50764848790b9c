"""Charts of profiled steps: the roofline, one step's timeline, and the steps of several schemes below one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainstep.report.charts import COLOURS, TOOLTIP, add_text, add_zoom, empty_figure, name_ticks
from trainstep.report.numbers import number, numeric
from trainstep.rows import ParallelTraceRow, TimelineRow

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
    "transfer": "series-2",
    "CUDA graph": "series-4",
    "other": "series-1",
}  # Colour of each family
PHASE_ROLES: Mapping[str, str] = {"forward": "series-1", "loss": "warn", "backward": "series-3", "optimizer": "neutral"}
LANE_HEIGHT = 46
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
_PHASES, _COMMUNICATION, _COPIES = "phase", "communication", "copies"
_GAP = 0.5  # Lanes left empty between two schemes
_LETTER = 0.0095  # Share of the axis that a letter takes: a phase that has no room for its name goes without
_BAR = {"fill_color": "colour", "line_color": None, "hover_fill_color": COLOURS["ink"], "hover_line_color": None}


@dataclass(frozen=True)
class Point:
    """A family in the roofline."""

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
        bend = [left, max(left, peak / slope), right], [min(left * slope, peak), peak, peak]
        plot.line(*bend, line_color=COLOURS["neutral"], line_width=1.2)
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


@dataclass
class _Bars:
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in ("y", "left", "right", "name", "tip", "colour")}
    )

    def add(self, y: float, ends: tuple[float, float], name: str, tip: str, role: str) -> None:
        for column, each in zip(self.columns.values(), (y, *ends, name, tip, COLOURS[role]), strict=True):
            column.append(each)

    def draw(self, plot: figure, height: float, name: str | None = None, style: Mapping[str, Any] = _BAR) -> Any:
        from bokeh.models import ColumnDataSource

        source = ColumnDataSource(self.columns, name=name)
        return plot.hbar(y="y", left="left", right="right", height=height, source=source, **style)


def timeline(row: TimelineRow) -> figure:
    """A step, a lane for each stream and for copies and communication; drag to zoom, double-click for all of it."""
    order = {_COMMUNICATION: 1, _COPIES: 2}
    lanes = [_PHASES, *sorted(map(str, row.series["lane_names"]), key=lambda lane: (order.get(lane, 0), lane))]
    height = {lane: -index for index, lane in enumerate(lanes)}
    bars, strips, ends = _Bars(), _Bars(), _ends(row)
    start = "the first kernel" if row.has_steps is False else "the step’s first kernel"
    end = max((last for _, last in ends), default=1.0)
    plot = _lanes_figure({y: lane for lane, y in height.items()}, -len(lanes) + 0.4, end, start)
    plot.height = len(lanes) * LANE_HEIGHT + 60
    passed: dict[str, list[float]] = {}
    columns = (_texts(row, name) for name in ("lane", "family", "phase", "module"))
    for own, name, lane, family, phase, module in zip(ends, _kernel_names(row), *columns, strict=True):
        tip = f"{family}, {phase}\n{module}\n{length_text(round(own[1] - own[0], 6))}"  # whole nanoseconds
        bars.add(height[lane], own, name, tip, FAMILY_ROLES.get(family, "series-1"))
        passed.setdefault(phase, []).extend(own)
    for phase, role in PHASE_ROLES.items():
        if phase in passed:  # from its first kernel to its last
            first, last = min(passed[phase]), max(passed[phase])
            strips.add(0, (first, last), phase, f"from {number(first)} to {number(last)} ms", role)
    plain = {"fill_color": "colour", "line_color": None}
    add_zoom(plot, [bars.draw(plot, 0.72, "timeline"), strips.draw(plot, 0.3, style=plain)])
    return plot


def length_text(milliseconds: float) -> str:
    """A kernel's time with a unit that suits it."""
    return f"{number(milliseconds * 1e3)} µs" if milliseconds < 1 else f"{number(milliseconds)} ms"


def overlap_chart(rows: Sequence[ParallelTraceRow]) -> figure:
    """A strip for each scheme: its phases, its computation by stream, its communication; drag to zoom.

    Args:
        rows: of traces that ran, at least one.
    """
    labels: dict[float, str] = {}
    kernels, exposed, phases = _Bars(), _Bars(), _Bars()
    tops, top = [], 0.0
    for row in rows:
        lanes = _lanes_of(row)
        height = {lane: top - 2 - index for index, lane in enumerate(lanes)}
        labels |= {top: row.label, top - 1: "phases"} | {y: _label(lane, lanes) for lane, y in height.items()}
        _add_kernels(kernels, row, height)
        for ends in _ends(row, "exposed_"):
            tip = f"{row.label}\n{length_text(ends[1] - ends[0])} in which nothing is computed"
            exposed.add(height[_COMMUNICATION], ends, "exposed communication", tip, EXPOSED)
        for ends, phase in zip(_ends(row, "phase_span_"), map(str, row.series["phase_span_names"]), strict=True):
            tip = f"{row.label}: from {number(ends[0])} to {number(ends[1])} ms"
            phases.add(top - 1, ends, phase, tip, STEP_ROLES.get(phase, _OTHER))
        tops.append(top)
        top -= len(lanes) + 2 + _GAP  # and a heading, and the phases
    end = max(row.span_ms or 0 for row in rows)
    plot = _lanes_figure(labels, top + _GAP + 0.4, end)
    plot.height = round(-top * STRIP_HEIGHT) + 60
    add_text(plot, [0.0] * len(rows), tops, [*map(_heading, rows)], "ink", text_align="left", text_baseline="middle")
    drawn = [kernels.draw(plot, 0.84, "parallel-trace"), exposed.draw(plot, 0.84, "parallel-trace-exposed")]
    drawn.append(phases.draw(plot, 0.84, "parallel-trace-phases"))
    places = zip(*(phases.columns[name] for name in ("left", "right", "y", "name")), strict=True)
    wide = [
        ((left + right) / 2, y, name) for left, right, y, name in places if right - left >= _LETTER * len(name) * end
    ]
    x, y, names = zip(*wide, strict=True) if wide else ((), (), ())
    add_text(plot, x, y, names, "paper", text_align="center", text_baseline="middle")
    add_zoom(plot, drawn)
    return plot


def _lanes_figure(
    labels: Mapping[float, str], bottom: float, end: float, start: str = "the step’s first kernel"
) -> figure:
    """Time from 0 to `end` ms over named lanes."""
    from bokeh.models import Range1d

    along = Range1d(0, end, bounds=(0, end), min_interval=1e-3)
    plot = empty_figure(x_range=along, y_range=Range1d(bottom, 0.6), x_axis_label=f"ms from {start}")
    plot.xgrid.grid_line_color = COLOURS["rule"]
    name_ticks(plot.yaxis, labels, "ink")
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
    busy = Counter[str]()
    for lane, duration in zip(_texts(row, "lane"), row.series["duration_ns"], strict=True):
        busy[lane] += int(numeric(duration))
    own = [lane for lane, _ in busy.most_common() if lane not in (_COMMUNICATION, _COPIES)]
    return [*own, *([_COPIES] if _COPIES in busy else []), _COMMUNICATION]


def _label(lane: str, lanes: Sequence[str]) -> str:
    """The lane's name: that of a stream or thread only where there are several."""
    alone = len({*lanes} - {_COMMUNICATION, _COPIES}) == 1
    return "computation" if alone and lane not in (_COMMUNICATION, _COPIES) else lane


def _texts(row: TimelineRow | ParallelTraceRow, name: str) -> list[str]:
    names = row.series[f"{name}_names"]
    return [str(names[int(numeric(place))]) for place in row.series[name]]


def _kernel_names(row: TimelineRow | ParallelTraceRow) -> list[str]:
    counted = zip(row.series["count"], _texts(row, "kernel"), strict=True)
    return [kernel if count == 1 else f"{count} kernels, the longest {kernel}" for count, kernel in counted]


def _ends(row: TimelineRow | ParallelTraceRow, what: str = "") -> list[tuple[float, float]]:
    """Start and end of each bar, in ms."""
    spans = zip(row.series[f"{what}start_ns"], row.series[f"{what}duration_ns"], strict=True)
    return [(numeric(start) / 1e6, (numeric(start) + numeric(duration)) / 1e6) for start, duration in spans]


def _add_kernels(bars: _Bars, row: ParallelTraceRow, height: Mapping[str, float]) -> None:
    texts = (_texts(row, name) for name in ("lane", "phase", "family"))
    for ends, name, lane, phase, family in zip(_ends(row), _kernel_names(row), *texts, strict=True):
        role = STEP_ROLES["communication"] if family == "communication" else STEP_ROLES.get(phase, _OTHER)
        role = HIDDEN if lane == _COMMUNICATION else role  # what is exposed of it is drawn over it
        tip = f"{row.label}: {family}, {phase}\n{length_text(ends[1] - ends[0])}"
        bars.add(height[lane], ends, name, tip, role)
