"""Attention: every measured case, and time and memory against the sequence length, a pair of charts for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from trainstep.report import columns
from trainstep.report.blocks import Chart, Charts, Section, section
from trainstep.report.charts import KINDS
from trainstep.report.charts.lines import Series, curves
from trainstep.report.numbers import number, typeset
from trainstep.report.tables import define, page_table
from trainstep.rows import AttentionRatioRow, AttentionRow
from trainstep.rows.records import Row, of_kind

SHAPE = ("dtype", "causal", "window", "deterministic", "batch", "heads", "head_dim")
_IMPLEMENTATION = columns.word("implementation", "impl")

ATTENTION = define(
    AttentionRow,
    "Attention: median of the passes in ms; TFLOP/s counts causal attention as half, backward as 2.5 forwards: five "
    "products against two, one of which computes the scores again",
    replace(_IMPLEMENTATION, files=False),  # heads the page's rows
    *columns.named(*SHAPE, "seq"),
    replace(_IMPLEMENTATION, page=False),
    *columns.values({"forward": "forward_ms", "backward": "backward_ms"}),
    columns.median("both [95 %]", "both"),
    columns.value("issue (host)", "issue_ms"),
    columns.value("TFLOP/s forward", "forward_tflops", brief=False, page=False),
    columns.value("TFLOP/s backward", "backward_tflops", brief=False, page=False),
    *columns.values({"TFLOP/s": "both_tflops", "before backward (GiB)": "before_backward_gib"}),
    columns.value("by formula (GiB)", "predicted_before_backward_gib", brief=False, page=False),
    *columns.values({"peak (GiB)": "peak_gib", "peak by formula (GiB)": "predicted_peak_gib"}),
    columns.value("score matrices at the peak", "score_matrices_at_peak", brief=False, page=False),
    columns.value("error of o", "o_error", digits=2, brief=False, page=False),
    columns.value("largest share of an allowed error", "error_share", digits=2, page=False),
    columns.value("check and compilation (s)", "check_s", digits=2, brief=False, page=False),
    columns.value("graphs compiled", "compilations", brief=False, page=False),
    *columns.values({"recompiled while timed": "recompilations_timed", "rounds": "rounds"}, brief=False, page=False),
    columns.value("package", "package", brief=False, page=False),
    columns.value("timing", "not_timed"),
    columns.OUTCOME,
)


RATIOS = define(
    AttentionRatioRow,
    "Attention: our kernels’ time over each other implementation’s; below 1 ours are faster",
    *columns.named(*SHAPE, "seq"),
    columns.word("beside", "peer"),
    *(columns.ratio(name, name) for name in ("forward", "backward", "both")),
    columns.value("rounds", "rounds"),
    columns.OUTCOME,
)


def attention(records: Sequence[Row]) -> Section | None:
    """All rows of attention, where there are any."""
    rows = of_kind(records, AttentionRow)
    groups: dict[str, list[AttentionRow]] = {}
    for row in rows:
        groups.setdefault(", ".join(f"{name} {row.case[name]}" for name in SHAPE if name in row.case), []).append(row)
    impls = list(dict.fromkeys(row.impl for row in rows))
    charts = [
        Charts([_chart(group, impls, shape, *what) for what in _CHARTS if any(map(what[-1], group))])
        for shape, group in groups.items()
        if len({row.seq for row in group if row.times}) > 1
    ]
    checked = ", in all heads and rows," if any(row.error_share is not None for row in rows) else ""
    lead = (
        f"Every case is checked against float64{checked} before it is timed. Times are medians, the cache overwritten "
        f"before each pass{columns.issue_apart(rows)}; TFLOP/s counts causal attention as half, a window as the pairs "
        "in it, and backward as 2.5 forwards: five products against two, one of which computes the scores again."
    )
    tables = page_table(ATTENTION, rows), page_table(RATIOS, records, "attention ratios")
    return section("attention", "Attention", "Attention by implementation", lead, *charts, *tables)


def _both_ms(row: AttentionRow) -> float | None:
    return row.times["both"].median if "both" in row.times else None


_CHARTS: tuple[tuple[str, str, str, Callable[[AttentionRow], float | None]], ...] = (
    ("both_ms", "Time of forward and backward", "ms", _both_ms),
    ("peak_gib", "Peak memory", "GiB", lambda row: row.peak_gib),
)  # Name, title, unit, value


def _chart(
    rows: Sequence[AttentionRow],
    impls: Sequence[str],
    shape: str,
    name: str,
    title: str,
    unit: str,
    value_of: Callable[[AttentionRow], float | None],
) -> Chart:
    """A line for each implementation, in its colour of all charts; a case without the value is left out."""
    series = []
    for index, impl in enumerate(impls):
        known = sorted((row.seq, value) for row in rows if row.impl == impl and (value := value_of(row)))
        if known:
            x, y = zip(*known, strict=True)
            role = KINDS[index % len(KINDS)]
            series.append(Series(impl, x, y, role, texts=[typeset(f"{number(each)} {unit}") for each in y]))
    lengths = sorted({float(row.seq) for row in rows})
    id, legend = f"{name}-{shape}".replace(" ", "-").replace(",", ""), [(each.role, each.name) for each in series]
    return Chart(id, title, shape, partial(curves, lengths, series, "sequence length", unit), legend)


TABLES = (ATTENTION, RATIOS)
SECTIONS = (attention,)
