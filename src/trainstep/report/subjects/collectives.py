"""Collectives: their time and bandwidth by size, and what a call costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from trainstep.report import columns
from trainstep.report.blocks import Chart, Charts, Section, section
from trainstep.report.charts import KINDS
from trainstep.report.charts.lines import Series, curves
from trainstep.report.numbers import number, typeset
from trainstep.report.tables import define, page_table
from trainstep.rows import CollectiveFitRow, CollectiveRow
from trainstep.rows.records import Row, by_case, of_kind

_RANKS = columns.case("ranks", "world_size")
_COLLECTIVE = replace(columns.word("collective", "collective"), setting=True)
_COLLECTIVES = (
    replace(_COLLECTIVE, files=False, setting=False),  # heads the page's rows
    *columns.named("backend", "dtype", "tensors", "groups"),
    replace(_COLLECTIVE, page=False),
    _RANKS,
)
COLLECTIVE = define(
    CollectiveRow,
    "Collectives: time on the slowest rank; bus bandwidth is bytes on each link of a ring over that time",
    *_COLLECTIVES,
    columns.case("MB", "size_mb"),
    columns.COUNTED,
    columns.median("time (ms) [95 %]", "time"),
    replace(columns.mean("mean ± std", "time"), page=False),
    *columns.values({"fastest rank (ms)": "fastest_rank_ms", "slowest rank (ms)": "slowest_rank_ms"}, brief=False),
    columns.value("CPU (ms)", "cpu_ms", brief=False),
    *columns.values({"algorithm GB/s": "algorithm_gb_s", "bus GB/s": "bus_gb_s"}),
    columns.OUTCOME,
)
FIT = define(
    CollectiveFitRow,
    "What a call costs: an overhead, and bytes on each link at a bandwidth",
    *_COLLECTIVES,
    *columns.values({"overhead (µs)": "overhead_us", "bus GB/s": "bus_gb_s"}),
    columns.value("CPU (share)", "cpu_share", brief=False),
    columns.value("sizes", "sizes", page=False),
    columns.value("worst error (%)", "worst_error", digits=2),
)


def collectives(records: Sequence[Row]) -> Section | None:
    """Collectives: time and bandwidth against size, the fitted lines, and every measured case."""
    rows, fits = of_kind(records, CollectiveRow), of_kind(records, CollectiveFitRow)
    charts = list[Charts]()
    for group in by_case(rows, "collective", "size_mb"):
        measured = [row for row in group if row.status == "ok"]
        if len({row.size_mb for row in measured}) > 1:
            lines = [fit for fit in fits if _setting(fit) == _setting(measured[0])]
            times = _by_size("collective-time", "Time", measured, lambda row: row.times["time"].median, "ms", lines)
            rates = _by_size("collective-bus", "Bus bandwidth", measured, lambda row: row.bus_gb_s or 0, "GB/s")
            charts.append(Charts([times, rates]))
    lead = (
        "Results are checked before anything is timed. All ranks are lined up before every call, and a call lasts as "
        "long as on its slowest rank. Size is that of the full tensor. Bus bandwidth is bytes on each link of a ring "
        "over time, so it can be compared between collectives and numbers of ranks. CPU is for how long a call keeps a "
        "rank's cores busy, all its threads together."
    )
    tables = page_table(FIT, fits), page_table(COLLECTIVE, rows, "collectives")
    return section("collectives", "Collectives", "Collectives by size", lead, *charts, *tables)


def _setting(row: CollectiveRow | CollectiveFitRow) -> str:
    hosts = "" if row.hosts is None else f" on {row.hosts} hosts"
    tensors = "" if row.tensors is None else f", {row.tensors} tensors"
    groups = "" if row.groups is None else f", {row.groups} at once"
    return f"{row.world_size} ranks{hosts}{groups}, {row.dtype}{tensors}, {row.backend}"


def _by_size(
    name: str,
    title: str,
    rows: Sequence[CollectiveRow],
    value_of: Callable[[CollectiveRow], float],
    unit: str,
    fits: Sequence[CollectiveFitRow] = (),
) -> Chart:
    """A line for each collective of one setting against the size, and dashed what its fit says."""

    def line(name: str, role: str, own: Sequence[CollectiveRow], value_of: Callable[[CollectiveRow], float]) -> Series:
        x, y = [row.size_mb for row in own], [value_of(row) for row in own]
        return Series(name, x, y, role, texts=[typeset(f"{number(each)} {unit}") for each in y])

    roles = dict(zip(dict.fromkeys(row.collective for row in rows), itertools.cycle(KINDS), strict=False))
    own = {each: sorted((row for row in rows if row.collective == each), key=lambda row: row.size_mb) for each in roles}
    series = [line(each, role, own[each], value_of) for each, role in roles.items()]
    for fit in fits:
        if (each := fit.collective) in roles:
            fitted = line(f"{each}, fitted", roles[each], own[each], partial(_fitted_ms, fit))
            series.append(replace(fitted, width=1.0, dash="dashed"))
    setting, plot = _setting(rows[0]), partial(curves, sorted({row.size_mb for row in rows}), series, "MB", unit)
    caption = f"{setting}; dashed: the fitted line" if fits else setting
    legend = [(role, each) for each, role in roles.items()]
    return Chart(f"{name}-{setting}".replace(" ", "-").replace(",", ""), title, caption, plot, legend)


def _fitted_ms(fit: CollectiveFitRow, row: CollectiveRow) -> float:
    on_link = (row.payload_bytes or 0) * (row.bus_gb_s or 0) / (row.algorithm_gb_s or 1)
    return (fit.overhead_us or 0) / 1e3 + on_link / (fit.bus_gb_s or 1) / 1e6


TABLES = (COLLECTIVE, FIT)
SECTIONS = (collectives,)
