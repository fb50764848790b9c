"""Operators, attention and fused ones: every measured case, our time beside each other implementation's, and of
attention time and memory against the sequence length, a pair of charts for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainstep.report import columns
from trainstep.report.blocks import Chart, Charts, Section, section
from trainstep.report.charts import KINDS
from trainstep.report.charts.lines import Series, key_of, lines
from trainstep.report.numbers import as_float, number, typeset
from trainstep.report.tables import define, page_table
from trainstep.rows import AttentionRatioRow, AttentionRow, FusedRatioRow, FusedRow
from trainstep.rows.records import Row, of_kind

SHAPE = ("dtype", "causal", "window", "deterministic", "batch", "heads", "head_dim")
PROBLEM, SIZES = ("operator", "shape", "dtype"), ("tokens", "d_model", "heads", "vocab_size")
_IMPLEMENTATION = columns.word("implementation", "impl")
_HEAD, _BELOW_THE_CASE = replace(_IMPLEMENTATION, files=False), replace(_IMPLEMENTATION, page=False)
"""The implementation heads the page's rows, and follows the case in files."""
_CASE_OF_FUSED = (*columns.named(*PROBLEM), *(replace(each, brief=False) for each in columns.named(*SIZES)))
_TIMES = (
    *columns.values({"forward": "forward_ms", "backward": "backward_ms"}),
    columns.median("both [95 %]", "both"),
    columns.value("issue (host)", "issue_ms"),
)
_RUNS = {"graphs compiled": "compilations", "recompiled while timed": "recompilations_timed", "rounds": "rounds"}
_HOW = (
    columns.value("check and compilation (s)", "check_s", digits=2, brief=False, page=False),
    *columns.values({**_RUNS, "package": "package"}, brief=False, page=False),
    columns.value("timing", "not_timed"),
    columns.OUTCOME,
)
_BESIDE = (
    columns.word("beside", "peer"),
    *(columns.ratio(name, name) for name in ("forward", "backward", "both")),
    columns.value("rounds", "rounds"),
    columns.OUTCOME,
)

ATTENTION = define(
    AttentionRow,
    "Attention: median of the passes in ms; TFLOP/s counts causal attention as half, backward as 2.5 forwards: five "
    "products against two, one of which computes the scores again",
    _HEAD,
    *columns.named(*SHAPE, "seq"),
    _BELOW_THE_CASE,
    *_TIMES,
    *columns.values(
        {"TFLOP/s forward": "forward_tflops", "TFLOP/s backward": "backward_tflops"}, brief=False, page=False
    ),
    *columns.values({"TFLOP/s": "both_tflops", "before backward (GiB)": "before_backward_gib"}),
    columns.value("by formula (GiB)", "predicted_before_backward_gib", brief=False, page=False),
    *columns.values({"peak (GiB)": "peak_gib", "peak by formula (GiB)": "predicted_peak_gib"}),
    columns.value("score matrices at the peak", "score_matrices_at_peak", brief=False, page=False),
    columns.value("error of o", "o_error", digits=2, brief=False, page=False),
    columns.value("largest share of an allowed error", "error_share", digits=2, page=False),
    *_HOW,
)
ATTENTION_RATIOS = define(
    AttentionRatioRow,
    "Attention: our kernels’ time over each other implementation’s; below 1 ours are faster",
    *columns.named(*SHAPE, "seq"),
    *_BESIDE,
)
FUSED = define(
    FusedRow,
    "Fused operators: median of the passes in ms",
    _HEAD,
    *_CASE_OF_FUSED,
    _BELOW_THE_CASE,
    *_TIMES,
    *columns.values({"before backward (GiB)": "before_backward_gib", "peak (GiB)": "peak_gib"}),
    columns.value("largest share of an allowed error", "error_share", digits=2),
    columns.value("of", "error_nearest", brief=False, page=False),
    *_HOW,
)
FUSED_RATIOS = define(
    FusedRatioRow,
    "Fused operators: our time over each other implementation’s; below 1 ours is faster",
    *_CASE_OF_FUSED,
    *_BESIDE,
)


def attention(records: Sequence[Row]) -> Section | None:
    """All rows of attention, where there are any."""
    rows = of_kind(records, AttentionRow)
    groups: dict[str, list[AttentionRow]] = {}
    for row in rows:
        groups.setdefault(", ".join(f"{name} {row.case[name]}" for name in SHAPE if name in row.case), []).append(row)
    impls = list(dict.fromkeys(row.impl for row in rows))
    charts = [
        Charts(
            [_chart(group, impls, shape, *what) for what in _CHARTS if any(row.values.get(what[0]) for row in group)]
        )
        for shape, group in groups.items()
        if len({row.seq for row in group if row.times}) > 1
    ]
    checked = ", in all heads and rows," if any(row.error_share is not None for row in rows) else ""
    lead = (
        f"Every case is checked against float64{checked} before it is timed. Times are medians, the cache overwritten "
        f"before each pass{columns.issue_apart(rows)}; TFLOP/s counts causal attention as half, a window as the pairs "
        "in it, and backward as 2.5 forwards: five products against two, one of which computes the scores again."
    )
    tables = page_table(ATTENTION, rows), page_table(ATTENTION_RATIOS, records, "attention ratios")
    return section("attention", "Attention", "Attention by implementation", lead, *charts, *tables)


_CHARTS = (("both_ms", "Time of forward and backward", "ms"), ("peak_gib", "Peak memory", "GiB"))
"""Value, title, unit."""


def _chart(rows: Sequence[AttentionRow], impls: Sequence[str], shape: str, name: str, title: str, unit: str) -> Chart:
    """A line for each implementation, in its colour of all charts; a case without the value is left out."""
    series = []
    for index, impl in enumerate(impls):
        known = sorted(
            (row.seq, value) for row in rows if row.impl == impl and (value := as_float(row.values.get(name)))
        )
        if known:
            x, y = zip(*known, strict=True)
            role = KINDS[index % len(KINDS)]
            series.append(Series(impl, x, y, role, texts=[typeset(f"{number(each)} {unit}") for each in y]))
    lengths = sorted({float(row.seq) for row in rows})
    id = f"{name}-{shape}".replace(" ", "-").replace(",", "")
    drawn = partial(lines, series, "sequence length", unit, log=True, sizes=lengths)
    return Chart(id, title, shape, drawn, key_of(series))


def fused(records: Sequence[Row]) -> Section | None:
    """All rows of fused operators, where there are any."""
    rows = of_kind(records, FusedRow)
    lead = (
        "Every case is checked against float64 before it is timed. Times are medians, the cache overwritten before "
        f"each pass{columns.issue_apart(rows)}; memory is beside the inputs. Liger’s loss, and ours where it takes its "
        "tokens in chunks, compute their gradients in forward."
    )
    tables = page_table(FUSED, rows), page_table(FUSED_RATIOS, records, "fused ratios")
    return section("fused", "Fused operators", "Fused operators by implementation", lead, *tables)


TABLES = (ATTENTION, ATTENTION_RATIOS, FUSED, FUSED_RATIOS)
SECTIONS = (attention, fused)
