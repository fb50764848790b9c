"""The page's charts, drawn with Bokeh from plain rows.

No colour is fixed here. Every colour is a stand-in for a CSS variable of the page (`COLOURS`); the page's script puts
the variable's value in its place when it draws, and draws again when the reader switches between light and dark.
Charts have no toolbar and take no gestures, so they never catch a finger that scrolls the page; hovering (or tapping)
shows a row's figures. Names come from the user's model: they are drawn as plain text, and escaped in tooltips.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearAxis, NoOverlap, PlainText, Range1d, Span
from bokeh.plotting import figure

COLOURS: Mapping[str, str] = {
    role: f"#fe{number:02x}fd"
    for number, role in enumerate(
        (
            *("ink", "muted", "rule", "accent", "neutral", "warn", "paper"),
            *("series-1", "series-2", "series-3", "series-4"),
            *(f"kind-{number}" for number in range(1, 9)),
        )
    )
}
"""Role → the stand-in for the page's CSS variable of that name."""

SERIES = ("series-1", "series-2", "series-3", "series-4")
"""Roles for lines that follow one another, the first the palest."""

KINDS = tuple(f"kind-{number}" for number in range(1, 9))
"""Roles for lines of different things, told apart by hue (after Okabe & Ito)."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
ROW_HEIGHT = 34
LONGEST_LABEL = 24

TOOLTIP = '<div style="white-space: pre-line"><strong>@name</strong>\n@tip</div>'


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart."""

    name: str
    value: float | None
    """Where the bar ends; None draws none (the label says why)."""
    label: str
    """Stands in the column at the right."""
    tip: str
    """What hovering shows under the name; lines are kept."""
    low: float | None = None
    high: float | None = None
    base: float = 0.0
    """From 0 to here the bar is drawn in the neutral colour."""
    second: float | None = None
    """A thinner bar below the first."""
    role: str = "accent"


Outcome = Literal["baseline", "kept", "left", "slower", "failed"]


@dataclass(frozen=True)
class Fall:
    """One row of the waterfall: from the time kept so far to this rung's own."""

    name: str
    start: float
    """The time kept before; 0 where there is none."""
    end: float | None
    """This rung's time; None where it has none."""
    outcome: Outcome
    label: str
    tip: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    role: str
    width: float = 1.6
    dash: str = "solid"
    markers: bool = False
    line: bool = True
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    texts: Sequence[str] | None = None
    """What hovering shows for each y, where that is not y itself."""


def bars(rows: Sequence[Bar], axis: str, *, limit: float | None = None) -> figure:
    """Horizontal bars, the first row on top, with interval whiskers; `limit` draws a line across all rows."""
    reach = [x for row in rows for x in (row.value, row.high, row.second, row.base) if x is not None]
    plot = _rows_figure([row.name for row in rows], [row.label for row in rows], axis, [*reach, limit or 0.0])
    has_second = any(row.second is not None for row in rows)
    thick, shift = (0.40, 0.10) if has_second else (0.52, 0.0)
    drawn = [(-index + shift, row) for index, row in enumerate(rows) if row.value is not None]
    _hbar(plot, [y for y, _ in drawn], thick, [0.0] * len(drawn), [min(row.base, row.value or 0) for _, row in drawn])
    _hbar(
        plot,
        [y for y, _ in drawn],
        thick,
        [row.base for _, row in drawn],
        [max(row.value or 0, row.base) for _, row in drawn],
        [row.role for _, row in drawn],
    )
    lower = [(-index - 0.24, row) for index, row in enumerate(rows) if row.second is not None]
    other = "neutral" if rows and rows[0].role == "accent" else "accent"
    second = [row.second or 0.0 for _, row in lower]
    _hbar(plot, [y for y, _ in lower], 0.16, [0.0] * len(lower), second, [other] * len(lower))
    _whiskers(plot, [(y, row.low, row.high) for y, row in drawn])
    if limit is not None:
        plot.add_layout(Span(location=limit, dimension="height", line_color=COLOURS["warn"], line_dash="dashed"))
    _hover_rows(plot, [(row.name, row.tip) for row in rows])
    return plot


def waterfall(rows: Sequence[Fall], axis: str) -> figure:
    """The ladder: bars from the kept time to each rung's, a cross where it has no time."""
    reach = [x for row in rows for x in (row.start, row.end, row.high) if x is not None]
    plot = _rows_figure([row.name for row in rows], [row.label for row in rows], axis, reach)
    kept = 0.0
    for index, row in enumerate(rows):
        if row.outcome in ("baseline", "kept") and row.end is not None:
            kept = row.end
        if kept and index + 1 < len(rows):
            plot.segment([kept], [-index], [kept], [-index - 1], line_color=COLOURS["muted"], line_width=1)
    styles: dict[str, dict[str, Any]] = {
        "baseline": {"fill_color": COLOURS["neutral"], "line_color": None},
        "kept": {"fill_color": COLOURS["accent"], "line_color": None},
        "left": {"fill_color": COLOURS["paper"], "line_color": COLOURS["neutral"], "line_width": 1.5},
        "slower": {
            "fill_color": COLOURS["paper"],
            "line_color": COLOURS["warn"],
            "line_width": 1.5,
            "hatch_pattern": "right_diagonal_line",
            "hatch_color": COLOURS["warn"],
            "hatch_scale": 7,
        },
    }
    for index, row in enumerate(rows):
        if row.end is not None and row.outcome in styles:
            left, right = sorted((row.start if row.outcome != "baseline" else 0.0, row.end))
            plot.hbar(y=[-index], height=0.52, left=[left], right=[right], **styles[row.outcome])
    crosses = [(row.start, -index) for index, row in enumerate(rows) if row.outcome == "failed"]
    if crosses:
        plot.scatter(
            [x for x, _ in crosses],
            [y for _, y in crosses],
            marker="x",
            size=11,
            color=COLOURS["warn"],
            line_width=2.5,
        )
    _whiskers(plot, [(-index, row.low, row.high) for index, row in enumerate(rows)])
    _hover_rows(plot, [(row.name, row.tip) for row in rows])
    return plot


def lines(
    series: Sequence[Series],
    x_axis: str,
    y_axis: str,
    *,
    log: bool = False,
    around_zero: bool = False,
    hover: bool = True,
) -> figure:
    """Lines over a common x; hovering shows all of them at one x."""
    plot = empty_figure(height=260, y_axis_type="log" if log else "linear", y_axis_label=y_axis)
    plot.xaxis.axis_label = x_axis
    plot.ygrid.grid_line_color = COLOURS["rule"]
    plot.yaxis.ticker.desired_num_ticks = 5
    ticks = sorted({x for one in series for x in one.x})
    if all(x == int(x) for x in ticks) and len(ticks) <= 30:
        plot.xaxis.ticker = FixedTicker(ticks=ticks if len(ticks) <= 8 else [x for x in ticks if x % 5 == 0])
    if ticks:
        margin = 0.06 * max(ticks[-1] - ticks[0], 1)
        plot.x_range = Range1d(ticks[0] - margin, ticks[-1] + margin)
    plot.y_range = Range1d(*_room(series, log, around_zero))
    if around_zero:
        plot.add_layout(Span(location=0, dimension="width", line_color=COLOURS["neutral"], level="underlay"))
    for one in series:
        colour = COLOURS[one.role]
        spans = [
            (x, low, high)
            for x, low, high in zip(one.x, one.low or (), one.high or (), strict=False)
            if low is not None and high is not None
        ]
        if spans:
            x, low, high = (list(column) for column in zip(*spans, strict=True))
            plot.segment(x, low, x, high, line_color=colour, line_width=2)
        if one.line:
            plot.line(list(one.x), list(one.y), line_color=colour, line_width=one.width, line_dash=one.dash)
        if one.markers:
            plot.scatter(list(one.x), list(one.y), size=8, fill_color=colour, line_color=COLOURS["paper"], line_width=1)
    if hover:
        _hover_columns(plot, series, ticks, [f"{x_axis} {x:g}" for x in ticks])
    return plot


def _room(series: Sequence[Series], log: bool, around_zero: bool) -> tuple[float, float]:
    """A y range with some air, no narrower than a twentieth of its values: noise is not blown up to fill it."""
    found = [y for one in series for y in (*one.y, *(one.low or ()), *(one.high or ())) if y is not None]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if log:
        air = (high / low) ** 0.1
        return low / air, high * air
    if around_zero:
        reach = 1.1 * max(-low, high) or 1.0
        return -reach, reach
    lacking = max(0.0, 0.05 * abs(high) - (high - low))
    air = 0.1 * (high - low + lacking) or 1.0
    return low - lacking / 2 - air, high + lacking / 2 + air


def dots(names: Sequence[str], series: Sequence[Series], x_axis: str, y_axis: str) -> figure:
    """Values with their intervals over named places; series stand side by side. A series' x are indices of `names`."""
    shift = 0.14
    places = [shift * (index - (len(series) - 1) / 2) for index in range(len(series))]
    moved = [
        replace(one, x=[x + place for x in one.x], line=False, markers=True)
        for one, place in zip(series, places, strict=True)
    ]
    plot = lines(moved, x_axis, y_axis, hover=False)
    plot.x_range = Range1d(-0.5, len(names) - 0.5)
    plot.xaxis.ticker = FixedTicker(ticks=list(range(len(names))))
    plot.xaxis.major_label_overrides = {index: PlainText(text=name) for index, name in enumerate(names)}
    _hover_columns(plot, series, list(range(len(names))), [f"{name} {x_axis}" for name in names])
    return plot


def curves(sizes: Sequence[float], series: Sequence[Series], x_axis: str, y_axis: str) -> figure:
    """Lines with markers, logarithmic both ways, a tick at each of `sizes`. The series' x are among these."""
    series = [replace(one, x=[math.log2(x) for x in one.x], markers=True) for one in series]
    ticks = [math.log2(size) for size in sizes]
    names = [f"{size:.15g}" for size in sizes]
    margin = 0.04 * (ticks[-1] - ticks[0]) or 0.5
    plot = lines(series, x_axis, y_axis, log=True, hover=False)
    plot.x_range = Range1d(ticks[0] - margin, ticks[-1] + margin)
    plot.xaxis.ticker = FixedTicker(ticks=ticks)
    plot.xaxis.major_label_overrides = {tick: PlainText(text=name) for tick, name in zip(ticks, names, strict=True)}
    plot.xaxis.major_label_policy = NoOverlap()
    _hover_columns(plot, series, ticks, [f"{x_axis} {name}" for name in names])
    return plot


def embedded(plot: figure) -> dict[str, Any]:
    """A chart as the object that BokehJS draws from."""
    return dict(json_item(plot))


def empty_figure(**options: Any) -> figure:
    """An empty chart in the page's style."""
    plot = figure(
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        min_border=0,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **options,
    )
    _style_axes(plot.axis)
    plot.grid.grid_line_color = None
    return plot


def _style_axes(axes: Any) -> None:
    axes.axis_line_color = None
    axes.major_tick_line_color = None
    axes.minor_tick_line_color = None
    axes.major_label_text_color = COLOURS["muted"]
    axes.major_label_text_font = FONT
    axes.major_label_text_font_size = "12px"
    axes.axis_label_text_color = COLOURS["muted"]
    axes.axis_label_text_font = FONT
    axes.axis_label_text_font_size = "12px"
    axes.axis_label_text_font_style = "normal"
    axes.axis_label_standoff = 6


def _rows_figure(names: Sequence[str], labels: Sequence[str], axis: str, reach: Sequence[float]) -> figure:
    """Rows at y = 0, −1, −2 …, names at the left, labels in a column at the right."""
    count = len(names)
    plot = empty_figure(
        height=count * ROW_HEIGHT + 46,
        y_range=Range1d(-count + 0.4, 0.6),
        x_range=Range1d(0, 1.03 * max(reach, default=1.0) or 1.0),
    )
    plot.xaxis.axis_label = axis
    plot.xaxis.ticker.desired_num_ticks = 5
    plot.xaxis.major_label_policy = NoOverlap()
    plot.xgrid.grid_line_color = COLOURS["rule"]
    plot.yaxis.ticker = FixedTicker(ticks=[-index for index in range(count)])
    plot.yaxis.major_label_overrides = _row_texts(names)
    plot.yaxis.major_label_text_color = COLOURS["ink"]
    right = LinearAxis(ticker=FixedTicker(ticks=[-index for index in range(count)]))
    right.major_label_overrides = _row_texts(labels)
    _style_axes(right)
    right.major_label_text_color = COLOURS["ink"]
    plot.add_layout(right, "right")
    return plot


def _row_texts(texts: Sequence[str]) -> dict[float | str, PlainText]:
    """Tick labels as `PlainText`: Bokeh would typeset strings with `$$` as TeX, by a script from the network."""
    return {
        -index: PlainText(text=text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…")
        for index, text in enumerate(texts)
    }


def _hbar(
    plot: figure,
    y: Sequence[float],
    height: float,
    left: Sequence[float],
    right: Sequence[float],
    roles: Sequence[str] | None = None,
) -> None:
    shown = [index for index in range(len(y)) if right[index] > left[index]]
    if shown:
        plot.hbar(
            y=[y[index] for index in shown],
            height=height,
            left=[left[index] for index in shown],
            right=[right[index] for index in shown],
            fill_color=[COLOURS[roles[index] if roles else "neutral"] for index in shown],
            line_color=None,
        )


def _whiskers(plot: figure, spans: Sequence[tuple[float, float | None, float | None]]) -> None:
    """Intervals as a line with two end caps."""
    known = [(y, low, high) for y, low, high in spans if low is not None and high is not None]
    if not known:
        return
    style = {"line_color": COLOURS["ink"], "line_width": 1.2}
    y, low, high = (list(column) for column in zip(*known, strict=True))
    plot.segment(low, y, high, y, **style)
    cap = 0.1
    for ends in (low, high):
        plot.segment(ends, [at - cap for at in y], ends, [at + cap for at in y], **style)


def _hover_rows(plot: figure, texts: Sequence[tuple[str, str]]) -> None:
    """The whole row reacts, not only its bar: an invisible bar lies over each."""
    columns = {
        "y": [-index for index in range(len(texts))],
        "name": [name for name, _ in texts],
        "tip": [tip for _, tip in texts],
    }
    cover = plot.hbar(y="y", height=1, left=0, right=plot.x_range.end, source=ColumnDataSource(columns), **_COVER)
    _add_hover(plot, cover)


def _hover_columns(plot: figure, series: Sequence[Series], ticks: Sequence[float], names: Sequence[str]) -> None:
    """The same for every x at which a line has a value: an invisible column, which shows all of them."""
    columns: dict[str, list[Any]] = {"x": [], "name": [], "tip": []}
    for x, name in zip(ticks, names, strict=True):
        known = [(one, list(one.x).index(x)) for one in series if x in one.x]
        if not known:
            continue
        columns["x"].append(x)
        columns["name"].append(name)
        columns["tip"].append("\n".join(f"{one.name}: {_text(one, index)}" for one, index in known))
    apart = min((after - before for before, after in itertools.pairwise(ticks)), default=1)
    bottom, top = plot.y_range.start, plot.y_range.end
    cover = plot.vbar(x="x", width=apart, bottom=bottom, top=top, source=ColumnDataSource(columns), **_COVER)
    _add_hover(plot, cover)


_COVER: Mapping[str, Any] = {
    "fill_color": COLOURS["muted"],
    "fill_alpha": 0,
    "line_color": None,
    "hover_fill_color": COLOURS["muted"],
    "hover_fill_alpha": 0.08,
    "hover_line_color": None,
}


def _add_hover(plot: figure, cover: Any) -> None:
    plot.add_tools(HoverTool(renderers=[cover], tooltips=TOOLTIP, point_policy="follow_mouse", visible=False))


def _text(series: Series, index: int) -> str:
    return series.texts[index] if series.texts else f"{series.y[index]:.5g}"
