"""Fused operators: every measured case, and ours against each other implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainstep.report import columns
from trainstep.report.blocks import Section, section
from trainstep.report.tables import define, page_table
from trainstep.rows import FusedRatioRow, FusedRow
from trainstep.rows.records import Row, of_kind

PROBLEM = ("operator", "shape", "dtype")
SIZES = ("tokens", "d_model", "heads", "vocab_size")
_IMPLEMENTATION = columns.word("implementation", "impl")

FUSED = define(
    FusedRow,
    "Fused operators: median of the passes in ms",
    replace(_IMPLEMENTATION, files=False),  # heads the page's rows
    *columns.named(*PROBLEM),
    *(replace(each, brief=False) for each in columns.named(*SIZES)),
    replace(_IMPLEMENTATION, page=False),
    *columns.values({"forward": "forward_ms", "backward": "backward_ms"}),
    columns.median("both [95 %]", "both"),
    columns.value("issue (host)", "issue_ms"),
    *columns.values({"before backward (GiB)": "before_backward_gib", "peak (GiB)": "peak_gib"}),
    columns.value("largest share of an allowed error", "error_share", digits=2),
    columns.value("of", "error_nearest", brief=False, page=False),
    columns.value("check and compilation (s)", "check_s", digits=2, brief=False, page=False),
    columns.value("graphs compiled", "compilations", brief=False, page=False),
    *columns.values({"recompiled while timed": "recompilations_timed", "rounds": "rounds"}, brief=False, page=False),
    columns.value("package", "package", brief=False, page=False),
    columns.value("timing", "not_timed"),
    columns.OUTCOME,
)

RATIOS = define(
    FusedRatioRow,
    "Fused operators: our time over each other implementation’s; below 1 ours is faster",
    *columns.named(*PROBLEM),
    *(replace(each, brief=False) for each in columns.named(*SIZES)),
    columns.word("beside", "peer"),
    *(columns.ratio(name, name) for name in ("forward", "backward", "both")),
    columns.value("rounds", "rounds"),
    columns.OUTCOME,
)


def fused(records: Sequence[Row]) -> Section | None:
    """All rows of fused operators, where there are any."""
    rows = of_kind(records, FusedRow)
    lead = (
        "Every case is checked against float64 before it is timed. Times are medians, the cache overwritten before "
        f"each pass{columns.issue_apart(rows)}; memory is beside the inputs. Liger’s loss, and ours where it takes its "
        "tokens in chunks, compute their gradients in forward."
    )
    tables = page_table(FUSED, rows), page_table(RATIOS, records, "fused ratios")
    return section("fused", "Fused operators", "Fused operators by implementation", lead, *tables)


TABLES = (FUSED, RATIOS)
SECTIONS = (fused,)
