"""Collectives: time and bandwidth against size, the fitted lines, and every measured case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from trainstep.kinds import CollectiveFitRow, CollectiveRow
from trainstep.records import Row, of_kind
from trainstep.report import charts as plots
from trainstep.report.blocks import Block, Cell, Chart, Charts, Section, Table, TableRow
from trainstep.report.cells import cell_of, get, median_of, number
from trainstep.report.charts import Series
from trainstep.report.numbers import NONE, as_float

SETTING = ("world_size", "dtype", "backend")


def collectives(records: Sequence[Row]) -> Section | None:
    """All records of collectives, where there are any."""
    rows, fits = of_kind(records, CollectiveRow), of_kind(records, CollectiveFitRow)
    if not rows:
        return None
    blocks: list[Block] = []
    for setting in dict.fromkeys(tuple(row.case[name] for name in SETTING) for row in rows):
        measured = [row for row in rows if _setting(row) == setting and row.status == "ok"]
        if len({row.case["size_mb"] for row in measured}) > 1:
            lines = [row for row in fits if _setting(row) == setting]
            title = f"{setting[0]} ranks, {setting[1]}, {setting[2]}"
            blocks.append(Charts([_times(measured, lines, title), _bandwidths(measured, title)]))
    if fits:
        blocks.append(_fits(fits))
    lead = (
        "Results are checked before anything is timed. All ranks are lined up before every call, and a call lasts as "
        "long as on its slowest rank. Size is that of the full tensor. Bus bandwidth is bytes on each link of a ring "
        "over time, so it can be compared between collectives and numbers of ranks."
    )
    return Section("collectives", "Collectives", "Collectives by size", lead, [*blocks, _table(rows)])


def _setting(row: Row) -> tuple[object, ...]:
    return tuple(row.case[name] for name in SETTING)


def _times(rows: Sequence[Row], fits: Sequence[Row], title: str) -> Chart:
    def text(value: float) -> str:
        return f"{number(value)} ms"

    def line(fit: Row, row: Row) -> float:
        on_link = (get(row, "payload_bytes") or 0) * (get(row, "bus_gb_s") or 0) / (get(row, "algorithm_gb_s") or 1)
        return (get(fit, "overhead_us") or 0) / 1e3 + on_link / (get(fit, "bus_gb_s") or 1) / 1e6

    series, legend = _series(rows, "time_ms", text)
    for fit in fits:
        own = [row for row in rows if row.case["collective"] == fit.case["collective"]]
        points = sorted((as_float(row.case["size_mb"]) or 0, line(fit, row)) for row in own)
        role = next((one.role for one in series if one.name == fit.case["collective"]), "neutral")
        x, y = [place for place, _ in points], [value for _, value in points]
        series.append(Series(f"{fit.case['collective']}, fitted", x, y, role, 1.0, "dashed", texts=[*map(text, y)]))
    plot = partial(plots.curves, _sizes(rows), series, "MB", "ms")
    caption = f"{title}; dashed: the fitted line" if fits else title
    return Chart(f"collective-time-{title}".replace(" ", "-").replace(",", ""), "Time", caption, plot, legend)


def _bandwidths(rows: Sequence[Row], title: str) -> Chart:
    series, legend = _series(rows, "bus_gb_s", lambda value: f"{number(value)} GB/s")
    plot = partial(plots.curves, _sizes(rows), series, "MB", "GB/s")
    return Chart(f"collective-bus-{title}".replace(" ", "-").replace(",", ""), "Bus bandwidth", title, plot, legend)


def _sizes(rows: Sequence[Row]) -> list[float]:
    return sorted({as_float(row.case["size_mb"]) or 0 for row in rows})


def _series(
    rows: Sequence[Row], value: str, text: Callable[[float], str]
) -> tuple[list[Series], list[tuple[str, str]]]:
    series, legend = [], []
    for index, name in enumerate(dict.fromkeys(str(row.case["collective"]) for row in rows)):
        own = [row for row in rows if row.case["collective"] == name]
        points = sorted((as_float(row.case["size_mb"]) or 0, get(row, value) or 0) for row in own)
        role = plots.KINDS[index % len(plots.KINDS)]
        x, y = [place for place, _ in points], [found for _, found in points]
        series.append(Series(name, x, y, role, texts=[text(each) for each in y]))
        legend.append((role, name))
    return series, legend


def _fits(fits: Sequence[Row]) -> Table:
    settings = _shown(fits, SETTING)
    rows = []
    for fit in fits:
        cells = [Cell(str(fit.case["collective"]), fit.case["collective"], "collective", is_text=True)]
        cells += [_setting_cell(fit, name) for name in settings]
        cells += [cell_of(fit, "overhead_us"), cell_of(fit, "bus_gb_s")]
        cells.append(cell_of(fit, "worst_error", lambda value: f"{100 * (as_float(value) or 0):.2g}%"))
        rows.append(TableRow(cells))
    columns = ["Collective", *(_TITLES[name] for name in settings), "Overhead, µs", "Bus GB/s", "Worst error"]
    return Table("What a call costs: time = overhead + bytes on each link / bandwidth", columns, rows, "collective-fit")


def _table(rows: Sequence[Row]) -> Table:
    settings = _shown(rows, (*SETTING, "size_mb"))
    table_rows = []
    for row in rows:
        cells = [Cell(str(row.case["collective"]), row.case["collective"], "collective", is_text=True)]
        cells += [_setting_cell(row, name) for name in settings]
        if row.status == "ok":
            cells += [median_of(row, "time"), cell_of(row, "fastest_rank_ms"), cell_of(row, "slowest_rank_ms")]
            cells += [cell_of(row, "algorithm_gb_s"), cell_of(row, "bus_gb_s")]
        else:
            cells += [Cell(NONE)] * 5
        outcome = Cell("") if row.status == "ok" else Cell(row.status, note=row.reason, tone="bad", is_text=True)
        table_rows.append(TableRow([*cells, outcome]))
    columns = [
        *("Collective", *(_TITLES[name] for name in settings), "Time, ms [95 %]"),
        *("Fastest rank, ms", "Slowest rank, ms", "Algorithm GB/s", "Bus GB/s", "Outcome"),
    ]
    return Table("One row per case", columns, table_rows, name="collectives")


def _setting_cell(row: Row, name: str) -> Cell:
    value = row.case[name]
    return Cell(f"{value:g}" if isinstance(value, float) else str(value), value, name, is_text=True)


_TITLES = {"world_size": "Ranks", "dtype": "Type", "backend": "Backend", "size_mb": "MB"}


def _shown(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    return [name for name in names if len({row.case[name] for row in rows}) > 1]
