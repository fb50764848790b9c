"""Charts over a number: lines, and curves that are logarithmic both ways."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.report.charts import Plot, Scale


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    role: str
    width: float = 1.6  # Of its line; 0 where it has dots alone
    dash: str = "solid"
    markers: bool = False
    texts: Sequence[str] | None = None  # What hovering shows for each y, where that is not y itself; () where nothing


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
    marks: Sequence[float] = (),
    sizes: Sequence[float] = (),
) -> str:
    """Lines over a common x; hovering shows all of them at one x.

    Args:
        log: whether y is logarithmic.
        marks: where a line stands across the chart.
        sizes: make x logarithmic, with these as ticks; the series' x are among them.
    """
    places = sorted({*sizes, *(x for one in series for x in one.x)})
    first, last = (places[0], places[-1]) if places else (0.0, 1.0)
    air = 0.03 * max(last - first, 1)
    x = Scale(first / 1.1, last * 1.1, True) if sizes else Scale(first - air, last + air)
    plot = Plot(x, Scale(*_room(series, log, around_zero), log), 210)
    is_whole = all(place == int(place) for place in places)
    named = {size: f"{size:.15g}" for size in sizes[:: -(-len(sizes) // 7)]} if sizes else {}
    plot.x_axis(x_axis, named or x.ticks(least=1.0 if is_whole else 0.0))
    plot.y_axis(y_axis, plot.y.ticks())
    if around_zero:
        plot.line((x.low, x.high), (0, 0), "neutral")
    for mark in marks:
        plot.across(mark, "warn dashed")
    for one in series:
        if one.width and one.x:
            plot.line(one.x, one.y, f"{one.role} {one.dash}", one.width)
        for at in zip(one.x, one.y, strict=True) if one.markers or sizes or len(one.x) == 1 else ():
            plot.dot(*at, one.role)
    texts = [[f"{y:.5g}" for y in one.y] if one.texts is None else one.texts for one in series]
    told = [(one.name, dict(zip(one.x, said, strict=False))) for one, said in zip(series, texts, strict=True)]
    ends = [x.low, *map(sum, itertools.pairwise(places)), x.high]
    # An invisible column around every x at which a line has a value shows all of them.
    for place, left, right in zip(places, ends, ends[1:], strict=False):
        tips = [f"{name}: {said[place]}" for name, said in told if place in said]
        edges = (left if place == first else left / 2, right if place == last else right / 2)
        plot.bar(edges, (plot.y.low, plot.y.high), "cover", "\n".join([f"{x_axis} {place:.15g}", *tips]))
    return plot.svg()


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
