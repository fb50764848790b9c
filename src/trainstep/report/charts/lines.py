"""Charts over a number: lines, and curves that are logarithmic both ways."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainstep.report.charts import COLOURS, COVER, add_hover, empty_figure, name_ticks

if TYPE_CHECKING:
    from bokeh.plotting import figure


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    role: str
    width: float = 1.6
    dash: str = "solid"
    markers: bool = False
    line: bool = True
    texts: Sequence[str] | None = None  # What hovering shows for each y, where that is not y itself
    hover: bool = True  # Whether hovering shows it


@dataclass(frozen=True)
class Mark:
    """A vertical line across the chart."""

    x: float
    role: str
    dash: str = "dashed"


def key_of(series: Sequence[Series]) -> list[tuple[str, str]]:
    """The legend of these lines."""
    return [(one.role, one.name) for one in series]


def lines(
    series: Sequence[Series],
    x_axis: str,
    y_axis: str,
    *,
    log: bool = False,
    around_zero: bool = False,
    hover: bool = True,
    marks: Sequence[Mark] = (),
) -> figure:
    """Lines over a common x; hovering shows all of them at one x."""
    from bokeh.models import FixedTicker, Range1d, Span

    scale = "log" if log else "linear"
    plot = empty_figure(height=260, y_axis_type=scale, x_axis_label=x_axis, y_axis_label=y_axis)
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
    for mark in marks:
        style = {"line_color": COLOURS[mark.role], "line_dash": mark.dash, "line_width": 1.2}
        plot.add_layout(Span(location=mark.x, dimension="height", **style))
    for one in series:
        colour = COLOURS[one.role]
        if one.line:
            plot.line(list(one.x), list(one.y), line_color=colour, line_width=one.width, line_dash=one.dash)
        if one.markers:
            plot.scatter(list(one.x), list(one.y), size=8, fill_color=colour, line_color=COLOURS["paper"], line_width=1)
    if hover:
        _hover_columns(plot, [one for one in series if one.hover], ticks, [f"{x_axis} {x:g}" for x in ticks])
    return plot


def _room(series: Sequence[Series], log: bool, around_zero: bool) -> tuple[float, float]:
    """A y range with some air, no narrower than a twentieth of its values: noise is not blown up to fill it."""
    found = [y for one in series for y in one.y]
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


def curves(sizes: Sequence[float], series: Sequence[Series], x_axis: str, y_axis: str) -> figure:
    """Lines with markers, logarithmic both ways, a tick at each of `sizes`. The series' x are among these."""
    from bokeh.models import NoOverlap, Range1d

    series = [replace(one, x=[math.log2(x) for x in one.x], markers=True) for one in series]
    ticks = [math.log2(size) for size in sizes]
    names = [f"{size:.15g}" for size in sizes]
    margin = 0.04 * (ticks[-1] - ticks[0]) or 0.5
    plot = lines(series, x_axis, y_axis, log=True, hover=False)
    plot.x_range = Range1d(ticks[0] - margin, ticks[-1] + margin)
    name_ticks(plot.xaxis, dict(zip(ticks, names, strict=True)))
    plot.xaxis.major_label_policy = NoOverlap()
    _hover_columns(plot, series, ticks, [f"{x_axis} {name}" for name in names])
    return plot


def _hover_columns(plot: figure, series: Sequence[Series], ticks: Sequence[float], names: Sequence[str]) -> None:
    """The same for every x at which a line has a value: an invisible column, which shows all of them."""
    from bokeh.models import ColumnDataSource

    columns: dict[str, list[Any]] = {"x": [], "name": [], "tip": []}
    for x, name in zip(ticks, names, strict=True):
        tips = [f"{one.name}: {_text(one, list(one.x).index(x))}" for one in series if x in one.x]
        if tips:
            for column, each in zip(columns.values(), (x, name, "\n".join(tips)), strict=True):
                column.append(each)
    apart = min((after - before for before, after in itertools.pairwise(ticks)), default=1)
    bottom, top = plot.y_range.start, plot.y_range.end
    cover = plot.vbar(x="x", width=apart, bottom=bottom, top=top, source=ColumnDataSource(columns), **COVER)
    add_hover(plot, cover)


def _text(series: Series, index: int) -> str:
    return series.texts[index] if series.texts else f"{series.y[index]:.5g}"
