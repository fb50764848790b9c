"""A chart of named rows: the ladder's waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainstep.report.charts import COLOURS, COVER, add_hover, empty_figure, name_ticks, style_axes
from trainstep.report.numbers import typeset

if TYPE_CHECKING:
    from bokeh.plotting import figure

ROW_HEIGHT = 34
LONGEST_LABEL = 24


Outcome = Literal["baseline", "kept", "left", "slower", "failed"]


@dataclass(frozen=True)
class Fall:
    """A row of the waterfall: from the time accepted so far to this change's own."""

    name: str
    start: float  # The time kept before; 0 where there is none
    end: float | None  # This change's time; None where it has none
    outcome: Outcome
    label: str
    tip: str
    low: float | None = None
    high: float | None = None


def waterfall(rows: Sequence[Fall], axis: str) -> figure:
    """The ladder: bars from the accepted time to each change's, a cross where it has no time."""
    reach = [x for row in rows for x in (row.start, row.end, row.high) if x is not None]
    plot = _rows_figure([row.name for row in rows], [row.label for row in rows], axis, reach)
    kept = 0.0
    for index, row in enumerate(rows):
        if row.outcome in ("baseline", "kept") and row.end is not None:
            kept = row.end
        if kept and index + 1 < len(rows):
            plot.segment([kept], [-index], [kept], [-index - 1], line_color=COLOURS["muted"], line_width=1)
    hatched = {"hatch_pattern": "right_diagonal_line", "hatch_color": COLOURS["warn"], "hatch_scale": 7}
    outlined = {"fill_color": COLOURS["paper"], "line_width": 1.5}
    styles: dict[str, dict[str, Any]] = {
        "baseline": {"fill_color": COLOURS["neutral"], "line_color": None},
        "kept": {"fill_color": COLOURS["accent"], "line_color": None},
        "left": {"line_color": COLOURS["neutral"], **outlined},
        "slower": {"line_color": COLOURS["warn"], **outlined, **hatched},
    }
    for index, row in enumerate(rows):
        if row.end is not None and row.outcome in styles:
            left, right = sorted((row.start if row.outcome != "baseline" else 0.0, row.end))
            plot.hbar(y=[-index], height=0.52, left=[left], right=[right], **styles[row.outcome])
    crosses = [(row.start, -index) for index, row in enumerate(rows) if row.outcome == "failed"]
    if crosses:
        x, y = (list(column) for column in zip(*crosses, strict=True))
        plot.scatter(x, y, marker="x", size=11, color=COLOURS["warn"], line_width=2.5)
    _whiskers(plot, [(-index, row.low, row.high) for index, row in enumerate(rows)])
    _hover_rows(plot, rows)
    return plot


def _rows_figure(names: Sequence[str], labels: Sequence[str], axis: str, reach: Sequence[float]) -> figure:
    """Rows at y = 0, −1, −2 …, names at the left, labels in a column at the right."""
    from bokeh.models import LinearAxis, NoOverlap, Range1d

    count = len(names)
    plot = empty_figure(
        height=count * ROW_HEIGHT + 46,
        y_range=Range1d(-count + 0.4, 0.6),
        x_range=Range1d(0, 1.03 * max(reach, default=1.0) or 1.0),
        x_axis_label=axis,
    )
    plot.xaxis.ticker.desired_num_ticks = 5
    plot.xaxis.major_label_policy = NoOverlap()
    plot.xgrid.grid_line_color = COLOURS["rule"]
    right = LinearAxis()
    style_axes(right)
    plot.add_layout(right, "right")
    for side, texts in ((plot.yaxis, names), (right, map(typeset, labels))):
        cut = (text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…" for text in texts)
        name_ticks(side, {-index: text for index, text in enumerate(cut)}, "ink")
    return plot


def _whiskers(plot: figure, spans: Sequence[tuple[float, float | None, float | None]]) -> None:
    known = [(y, low, high) for y, low, high in spans if low is not None and high is not None]
    if not known:
        return
    style = {"line_color": COLOURS["ink"], "line_width": 1.2}
    y, low, high = (list(column) for column in zip(*known, strict=True))
    plot.segment(low, y, high, y, **style)
    for ends in (low, high):
        plot.segment(ends, [at - 0.1 for at in y], ends, [at + 0.1 for at in y], **style)


def _hover_rows(plot: figure, rows: Sequence[Fall]) -> None:
    """The whole row reacts, not only its bar: an invisible bar lies over each."""
    from bokeh.models import ColumnDataSource

    places = [-index for index in range(len(rows))]
    columns = {"y": places, "name": [row.name for row in rows], "tip": [row.tip for row in rows]}
    cover = plot.hbar(y="y", height=1, left=0, right=plot.x_range.end, source=ColumnDataSource(columns), **COVER)
    add_hover(plot, cover)
