"""Traced steps of several schemes below one another, on one time axis: what is computed, and what is sent meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainstep.kinds import ParallelTraceRow
from trainstep.report.charts import COLOURS, add_text, empty_figure
from trainstep.report.charts.profile import add_zoom, length_text
from trainstep.report.numbers import number, numeric

if TYPE_CHECKING:
    from bokeh.plotting import figure

PHASE_ROLES: Mapping[str, str] = {
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
    *((PHASE_ROLES[name], name) for name in ("forward", "backward", "optimizer")),
    (PHASE_ROLES["communication"], "waiting for communication"),
    (HIDDEN, "communication, hidden behind computation"),
    (EXPOSED, "exposed communication"),
)
LANE_HEIGHT = 21
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

        style = {
            "fill_color": "colour",
            "line_color": None,
            "hover_fill_color": COLOURS["ink"],
            "hover_line_color": None,
        }
        source = ColumnDataSource(self.columns, name=name)
        return plot.hbar(y="y", left="left", right="right", height=height, source=source, **style)


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
        height=round(depth * LANE_HEIGHT) + 60,
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
    return PHASE_ROLES["communication"] if family == "communication" else PHASE_ROLES.get(phase, _OTHER)


def _add_exposed(bars: _Bars, row: ParallelTraceRow, height: Mapping[str, float]) -> None:
    for ends in _in_ms(row, "exposed"):
        tip = f"{row.scheme}\n{length_text(ends[1] - ends[0])} in which nothing is computed"
        bars.add(height[_COMMUNICATION], ends, "exposed communication", tip, EXPOSED)


def _add_phases(bars: _Bars, row: ParallelTraceRow, y: float) -> None:
    for ends, phase in zip(_in_ms(row, "phase_span"), row.series["phase_span_names"], strict=True):
        tip = f"{row.scheme}: from {number(ends[0])} to {number(ends[1])} ms"
        bars.add(y, ends, str(phase), tip, PHASE_ROLES.get(str(phase), _OTHER))
