"""A sweep: per axis a chart and a table of the measured values, and every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from bokeh.plotting import figure

from trainstep.kinds import SweepRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report import charts as plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.cells import get
from trainstep.report.charts import Series
from trainstep.report.numbers import as_float
from trainstep.report.sections.plain import plain_table
from trainstep.report.sweep_axes import Axis, Line, Measure, axes_of, in_order, is_predicted, measures_of, named, shown

MOST_LINES = 8
"""In one chart over numbers: as many as there are hues."""
MOST_DOTS = 6
"""Side by side at one name; more would reach into the next."""
DECADE = 10
"""Numbers that span this factor are set on logarithmic axes."""


def sweep(records: Sequence[Row]) -> Section | None:
    from trainstep.report.subjects import axis_table

    """All cases of a sweep, where there are any."""
    rows = in_order(of_kind(records, SweepRow))
    if not rows:
        return None
    measures = measures_of(rows)
    blocks: list[Block] = []
    for axis in axes_of(rows):
        charts = [chart for measure in measures for chart in _charts(axis, measure)]
        blocks += [Charts(charts)] if charts else []
        blocks += [axis_table(axis, measure) for measure in measures[:1]]
    failed = sum(row.status != "ok" for row in rows)
    says = "times are predictions" if is_predicted(rows) else "whiskers are 95 % intervals of the median"
    lead = (
        f"Each case ran in a process of its own: {len(rows)} rows, {failed} without a result. Lines are the "
        f"combinations of all other settings; {says}."
    )
    return Section("sweep", "Sweep", "The sweep", lead, [*blocks, plain_table("sweep", rows)])


def _charts(axis: Axis, measure: Measure) -> Iterator[Chart]:
    """One chart, or several where one would hold too many lines."""
    most = MOST_LINES if axis.is_numeric else MOST_DOTS
    title = f"{measure.title[:1].upper()}{measure.title[1:]} by {axis.name.replace('_', ' ')}"
    drawn = [line for line in axis.lines if _points(line, measure)]
    if len({value for line in drawn for value in _points(line, measure)}) < 2:
        return
    for number, (facet, lines) in enumerate(_facets(drawn, most), start=1):
        plot, legend = _drawn(axis, lines, measure)
        yield Chart(f"sweep-{axis.name}-{measure.value}-{number}", title, facet, plot, legend)


def _points(line: Line, measure: Measure) -> Mapping[Scalar, Row]:
    return {
        value: row
        for value, row in line.rows.items()
        if row.status == "ok" and (get(row, measure.value) or 0) > 0
    }  # fmt: skip


def _facets(lines: Sequence[Line], most: int, apart: tuple[str, ...] = ()) -> Iterator[tuple[str, Sequence[Line]]]:
    """The lines in groups of at most `most`, by the settings that come first; each with the group's name."""
    names = list(dict.fromkeys(name for line in lines for name in line.settings if name not in apart))
    if len(lines) <= most or len(names) < 2:
        for start in range(0, len(lines), most):
            yield named({name: lines[0].settings.get(name) for name in apart}), lines[start : start + most]
        return
    for value in dict.fromkeys(line.settings.get(names[0]) for line in lines):
        own = [line for line in lines if line.settings.get(names[0]) == value]
        yield from _facets(own, most, (*apart, names[0]))


def _drawn(axis: Axis, lines: Sequence[Line], measure: Measure) -> tuple[Callable[[], figure], list[tuple[str, str]]]:
    varying = {name for line in lines for name in line.settings if len({each.settings.get(name) for each in lines}) > 1}
    series, legend = [], []
    for index, line in enumerate(lines):
        points = {value: row for value in axis.values if (row := _points(line, measure).get(value)) is not None}
        name = named({key: value for key, value in line.settings.items() if key in varying}) or measure.title
        role = plots.KINDS[index % len(plots.KINDS)]
        series.append(
            Series(
                name,
                [as_float(value) or 0 if axis.is_numeric else axis.values.index(value) for value in points],
                [get(row, measure.value) or 0 for row in points.values()],
                role,
                markers=True,
                low=[get(row, measure.low) for row in points.values()],
                high=[get(row, measure.high) for row in points.values()],
                texts=[f"{measure.text(row)} {measure.unit}" for row in points.values()],
            )
        )
        legend.append((role, name))
    title = axis.name.replace("_", " ")
    if not axis.is_numeric:
        return partial(plots.dots, [shown(value) for value in axis.values], series, title, measure.unit), legend
    x = sorted({each for one in series for each in one.x})
    if x[0] > 0 and x[-1] >= DECADE * x[0]:
        return partial(plots.curves, x, series, title, measure.unit), legend
    y = [each for one in series for each in one.y]
    return partial(plots.lines, series, title, measure.unit, log=max(y) >= DECADE * min(y)), legend
