"""Collectives: their time and bandwidth by size, and what a call costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainstep.report import columns
from trainstep.report.blocks import Section, section
from trainstep.report.tables import define, page_table
from trainstep.rows import CollectiveFitRow, CollectiveRow
from trainstep.rows.records import Row

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
    """Section of collectives: what a call costs, and every measured case."""
    lead = (
        "Results are checked before anything is timed. All ranks are lined up before every call, and a call lasts as "
        "long as on its slowest rank. Size is that of the full tensor. Bus bandwidth is bytes on each link of a ring "
        "over time, so it can be compared between collectives and numbers of ranks. CPU is for how long a call keeps a "
        "rank's cores busy, all its threads together."
    )
    tables = page_table(FIT, records), page_table(COLLECTIVE, records, "collectives")
    return section("collectives", "Collectives", "Collectives by size", lead, *tables)


TABLES = (COLLECTIVE, FIT)
SECTIONS = (collectives,)
