"""Peak memory over a grid: forward alone and full steps, by context and precision."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import PeakRow
from trainstep.records import Row, of_kind
from trainstep.report import plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.cells import get, gib
from trainstep.report.numbers import as_float
from trainstep.report.plots import Series
from trainstep.report.sections.plain import plain_table

_LINES = ("workload", "precision", "compile", "attention", "checkpointing", "optimizer", "batch", "mode")
"""Settings that tell the lines of the chart apart."""


def peaks(records: Sequence[Row]) -> Section | None:
    """The peaks that were measured case by case."""
    rows = of_kind(records, PeakRow)
    if not rows:
        return None
    blocks: list[Block] = []
    contexts = sorted({length for row in rows if (length := as_float(row.case.get("context"))) is not None})
    if len(contexts) > 1:
        blocks.append(Charts([_by_context(rows, contexts)]))
    blocks.append(plain_table("peak", rows, "peaks"))
    lead = (
        "The most bytes in live tensors during one step, after steps that made the optimizer’s state. Predictions come "
        "from the model’s shape alone; they leave out what the CUDA libraries allocate for themselves."
    )
    return Section("peaks", "Peaks", "Peak memory, case by case", lead, blocks)


def _by_context(rows: Sequence[Row], contexts: Sequence[float]) -> Chart:
    told = [name for name in _LINES if len({row.case.get(name) for row in rows}) > 1]
    series, legend = [], []
    groups = dict.fromkeys(tuple(row.case.get(name) for name in told) for row in rows)
    for index, group in enumerate(groups):
        own = [row for row in rows if tuple(row.case.get(name) for name in told) == group]
        known = {as_float(row.case["context"]): peak for row in own if (peak := get(row, "peak_gib")) is not None}
        if not known:
            continue
        name = ", ".join(str(part) for part in group if part is not None) or "peak"
        role = plots.KINDS[index % len(plots.KINDS)]
        shown = [(length, peak) for length, peak in known.items() if length is not None]
        x, y = ([pair[part] for pair in sorted(shown)] for part in (0, 1))
        series.append(Series(name, x, y, role, texts=[gib(peak) for peak in y]))
        legend.append((role, name))
    plot = plots.curves(contexts, series, "context", "GiB")
    return Chart("peaks-by-context", "Peak by context", "A case that did not fit has no point.", plot, legend)
