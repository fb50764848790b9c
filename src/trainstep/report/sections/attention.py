"""Attention: time and memory against the sequence length, one pair of charts per shape, and every measured case."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trainstep.kinds import AttentionRow
from trainstep.records import Row, of_kind
from trainstep.report import charts as plots
from trainstep.report.blocks import Block, Cell, Chart, Charts, Section, Table, TableRow
from trainstep.report.cells import cell_of, get, median_of, number
from trainstep.report.charts import Series
from trainstep.report.numbers import NONE, as_float

SHAPE = ("dtype", "causal", "batch", "heads", "head_dim")


def attention(records: Sequence[Row]) -> Section | None:
    """All records of attention, where there are any."""
    rows = of_kind(records, AttentionRow)
    if not rows:
        return None
    impls = list(dict.fromkeys(str(row.case["impl"]) for row in rows))
    shapes = list(dict.fromkeys(tuple(row.case[name] for name in SHAPE) for row in rows))
    blocks: list[Block] = []
    for shape in shapes:
        group = [row for row in rows if tuple(row.case[name] for name in SHAPE) == shape]
        if len({row.case["seq"] for row in group if row.status == "ok"}) > 1:
            title = ", ".join(f"{name} {value}" for name, value in zip(SHAPE, shape, strict=True))
            blocks.append(Charts([_chart(group, impls, title, *what) for what in _CHARTS]))
    lead = (
        "Every case is checked against float64 before it is timed. Times are medians, the cache overwritten before "
        "each pass; TFLOP/s counts causal attention as half and backward as 2.5 forwards."
    )
    return Section("attention", "Attention", "Attention by implementation", lead, [*blocks, _table(rows)])


_CHARTS = (
    ("both_ms", "Time of forward and backward", "ms"),
    ("peak_gib", "Peak memory", "GiB"),
)


def _chart(rows: Sequence[Row], impls: Sequence[str], shape: str, value: str, title: str, unit: str) -> Chart:
    lengths = sorted({as_float(row.case["seq"]) or 0 for row in rows})
    series, legend = [], []
    for index, impl in enumerate(impls):
        own = {as_float(row.case["seq"]): get(row, value) for row in rows if row.case["impl"] == impl}
        known = [(seq, y) for seq, y in own.items() if seq is not None and y]
        if known:
            role = plots.KINDS[index % len(plots.KINDS)]
            x, y = ([pair[part] for pair in sorted(known)] for part in (0, 1))
            texts = [f"{number(each)} {unit}" for each in y]
            series.append(Series(impl, x, y, role, texts=texts))
            legend.append((role, impl))
    plot = partial(plots.curves, lengths, series, "sequence length", unit)
    return Chart(f"{value}-{shape}".replace(" ", "-").replace(",", ""), title, shape, plot, legend)


def _table(rows: Sequence[Row]) -> Table:
    settings = [name for name in (*SHAPE, "seq") if len({row.case[name] for row in rows}) > 1]
    table_rows = []
    for row in rows:
        cells = [Cell(str(row.case["impl"]), row.case["impl"], "impl", is_text=True)]
        cells += [Cell(number(row.case[name]), row.case[name], name, is_text=True) for name in settings]
        if row.status == "ok":
            cells += [cell_of(row, "forward_ms"), cell_of(row, "backward_ms"), median_of(row, "both")]
            cells += [cell_of(row, "both_tflops"), cell_of(row, "before_backward_gib"), cell_of(row, "peak_gib")]
        else:
            cells += [Cell(NONE)] * 6
        cells += [cell_of(row, "predicted_peak_gib")]
        tone = Cell("") if row.status == "ok" else Cell(row.status, note=row.reason, tone="bad", is_text=True)
        table_rows.append(TableRow([*cells, tone]))
    columns = [
        *("Implementation", *settings, "Forward, ms", "Backward, ms", "Both, ms [95 %]", "TFLOP/s"),
        *("Before backward, GiB", "Peak, GiB", "Peak by formula, GiB", "Outcome"),
    ]
    return Table("One row per case", columns, table_rows, name="attention")
