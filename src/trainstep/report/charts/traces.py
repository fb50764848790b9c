"""Charts of profiled steps: the roofline, one step's timeline, and the steps of several schemes below one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainstep.report.charts import Plot, Scale
from trainstep.report.numbers import number, numeric
from trainstep.rows import ParallelTraceRow, TimelineRow

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
_NARROW = 3.5  # Times that share on a phone


def roofline(
    points: Mapping[str, tuple[float, float, str]], matmul_tflops: Mapping[str, float], copy_gb_s: float
) -> str:
    """Achieved arithmetic rate over arithmetic intensity, under what this device reaches (Williams et al. 2009).

    Args:
        points: family → FLOP per byte, TFLOP/s and words; at least one.
        matmul_tflops: name of each ceiling → its rate.
        copy_gb_s: measured bandwidth.
    """
    slope = copy_gb_s / 1e3  # TFLOP/s for each FLOP per byte
    reach, rates, _ = zip(*points.values(), strict=True)
    most = max(matmul_tflops.values())
    left, right = min(reach) / 3, max(*reach, most / slope) * 3
    plot = Plot(Scale(left, right, True), Scale(min(rates) / 3, 3 * most, True), 270)
    plot.x_axis("FLOP per byte", plot.x.ticks(), has_grid=True)
    plot.y_axis("TFLOP/s", plot.y.ticks())
    for name, peak in matmul_tflops.items():
        plot.line([left, max(left, peak / slope), right], [min(left * slope, peak), peak, peak], "neutral")
        plot.text(right / 1.15, peak, f"{name}: {number(peak)}", "muted", "end", "-.4em")
    for name, (x, y, tip) in points.items():
        plot.dot(x, y, FAMILY_ROLES.get(name, "series-1"), f"{name}\n{tip}", 6.5)
    return plot.svg()


def timeline(row: TimelineRow) -> str:
    """A step, a lane for each stream and for copies and communication; drag to zoom, double-click for all of it."""
    order = {_COMMUNICATION: 1, _COPIES: 2}
    lanes = [_PHASES, *sorted(map(str, row.series["lane_names"]), key=lambda lane: (order.get(lane, 0), lane))]
    height, ends = {lane: -index for index, lane in enumerate(lanes)}, _ends(row)
    start = "the first kernel" if row.has_steps is False else "the step’s first kernel"
    end = max((last for _, last in ends), default=1.0)
    named = {float(y): lane for lane, y in height.items()}
    plot = _lanes(named, 0.5 - len(lanes), end, len(lanes) * LANE_HEIGHT, start)
    passed: dict[str, list[float]] = {}
    columns = (_texts(row, name) for name in ("lane", "family", "phase", "module"))
    for own, name, lane, family, phase, module in zip(ends, _kernel_names(row), *columns, strict=True):
        length = length_text(round(own[1] - own[0], 6))  # whole nanoseconds
        tip = f"{name}\n{family}, {phase}\n{module}\n{length}"
        plot.bar(own, _around(height[lane], 0.72), FAMILY_ROLES.get(family, "series-1"), tip)
        passed.setdefault(phase, []).extend(own)
    for phase, role in STEP_ROLES.items():
        if phase in passed:  # from its first kernel to its last
            first, last = min(passed[phase]), max(passed[phase])
            plot.bar((first, last), _around(0, 0.3), role, f"{phase}\nfrom {number(first)} to {number(last)} ms")
    return plot.svg("x")


def length_text(milliseconds: float) -> str:
    """A kernel's time with a unit that suits it."""
    return f"{number(milliseconds * 1e3)} µs" if milliseconds < 1 else f"{number(milliseconds)} ms"


def overlap_chart(rows: Sequence[ParallelTraceRow]) -> str:
    """A strip for each scheme: its phases, its computation by stream, its communication; drag to zoom.

    Args:
        rows: of traces that ran, at least one.
    """
    lanes = [_lanes_of(row) for row in rows]
    tops = [-sum(len(each) + 2 + _GAP for each in lanes[:place]) for place in range(len(rows))]
    labels: dict[float, str] = {}
    for row, own, top in zip(rows, lanes, tops, strict=True):  # a heading, the phases, and the lanes
        labels |= {top: row.label, top - 1: "phases"}
        labels |= {top - 2 - index: _label(lane, own) for index, lane in enumerate(own)}
    bottom, end = min(labels) - 0.6, max(row.span_ms or 0 for row in rows)
    plot = _lanes(labels, bottom, end, round((0.5 - bottom) * STRIP_HEIGHT))
    for row, own, top in zip(rows, lanes, tops, strict=True):
        height = {lane: top - 2 - index for index, lane in enumerate(own)}
        plot.text(0, top, _heading(row), "ink", "start")
        _add_kernels(plot, row, height)
        for ends in _ends(row, "exposed_"):
            tip = f"exposed communication\n{row.label}\n{length_text(ends[1] - ends[0])} in which nothing is computed"
            plot.bar(ends, _around(height[_COMMUNICATION], 0.84), EXPOSED, tip)
        for ends, phase in zip(_ends(row, "phase_span_"), map(str, row.series["phase_span_names"]), strict=True):
            tip = f"{phase}\n{row.label}: from {number(ends[0])} to {number(ends[1])} ms"
            plot.bar(ends, _around(top - 1, 0.84), STEP_ROLES.get(phase, _OTHER), tip)
            room = (ends[1] - ends[0]) / (_LETTER * len(phase) * end)
            if room >= 1:
                plot.text(sum(ends) / 2, top - 1, phase, "paper wide" if room < _NARROW else "paper")
    return plot.svg("x")


def _lanes(
    labels: Mapping[float, str], bottom: float, end: float, height: int, start: str = "the step’s first kernel"
) -> Plot:
    """Time from 0 to `end` ms over named lanes."""
    plot = Plot(Scale(0, end), Scale(bottom, 0.5), height)
    plot.x_axis(f"ms from {start}", plot.x.ticks(), has_grid=True)
    plot.y_axis("", labels, "ink")
    return plot


def _around(y: float, height: float) -> tuple[float, float]:
    return y - height / 2, y + height / 2


def _heading(row: ParallelTraceRow) -> str:
    if row.hidden_share is None:
        return "no communication"
    return f"{number(row.communication_ms)} ms communication, {row.hidden_share:.0%} hidden"


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


def _add_kernels(plot: Plot, row: ParallelTraceRow, height: Mapping[str, float]) -> None:
    texts = (_texts(row, name) for name in ("lane", "phase", "family"))
    for ends, name, lane, phase, family in zip(_ends(row), _kernel_names(row), *texts, strict=True):
        role = STEP_ROLES["communication"] if family == "communication" else STEP_ROLES.get(phase, _OTHER)
        role = HIDDEN if lane == _COMMUNICATION else role  # what is exposed of it is drawn over it
        tip = f"{name}\n{row.label}: {family}, {phase}\n{length_text(ends[1] - ends[0])}"
        plot.bar(ends, _around(height[lane], 0.84), role, tip)
