"""Predictions: strategies, memory by policy, limits of each axis, and throughput against the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.report import plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.cells import as_float, get, number
from trainstep.report.plots import Series
from trainstep.report.records import Record, of_kind
from trainstep.report.sections.plain import plain_table

TABLES = ("plan machine", "plan", "plan memory", "plan limit", "plan scaling", "plan check")


def plan(records: Sequence[Record]) -> Section | None:
    """Everything that was predicted and not measured."""
    present = [kind for kind in TABLES if of_kind(records, kind)]
    if not present:
        return None
    blocks: list[Block] = []
    if scaling := of_kind(records, "plan scaling"):
        blocks.append(Charts([_scaling(scaling)]))
    blocks += [plain_table(kind, of_kind(records, kind), kind.replace(" ", "-")) for kind in present]
    bases = dict.fromkeys(str(row.values["basis"]) for row in of_kind(records, "plan machine"))
    lead = (
        "These are predictions, from the model’s shape and the rates below; nothing here was measured. "
        "Communication that hides behind computation is assumed not to slow it down."
    )
    lead = " ".join([lead, *(f"Rates: {basis}." for basis in bases)])
    return Section("plan", "Plan", "Plan: predicted, not measured", lead, blocks)


def _scaling(rows: Sequence[Record]) -> Chart:
    """Throughput of each strategy where it fits; a dashed line is that of perfect scaling."""
    counts = [as_float(row.case["gpus"]) or 1 for row in rows]
    ending = "_tokens_per_s"
    names = dict.fromkeys(name.removesuffix(ending) for row in rows for name in row.values if name.endswith(ending))
    series, legend = [], []
    for index, name in enumerate(names):
        known = [
            (gpus, value)
            for gpus, row in zip(counts, rows, strict=True)
            if row.values.get(f"{name}_fits") and (value := get(row, f"{name}{ending}")) is not None
        ]
        if not known:
            continue
        role = plots.KINDS[index % len(plots.KINDS)]
        x, y = [gpus for gpus, _ in known], [value for _, value in known]
        series.append(Series(f"{name} (predicted)", x, y, role, texts=[f"{number(value)} tokens/s" for value in y]))
        legend.append((role, name))
    if series:
        per_gpu = max(one.y[0] / one.x[0] for one in series)
        ideal = [per_gpu * gpus for gpus in counts]
        texts = [f"{number(value)} tokens/s" for value in ideal]
        series.append(Series("as many GPUs, as many times", counts, ideal, "neutral", 1.0, "dashed", texts=texts))
        legend.append(("neutral", "perfect scaling"))
    plot = plots.curves(counts, series, "GPUs", "tokens/s")
    caption = "Prediction: the same batch on every GPU. A strategy has no point where it does not fit."
    return Chart("plan-scaling", "Throughput against GPUs (prediction)", caption, plot, legend)
