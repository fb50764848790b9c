"""Predictions: strategies, memory by policy, limits of each axis, and throughput against the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trainstep.kinds import KINDS, PlanMachineRow, PlanScalingRow
from trainstep.records import Row, of_kind
from trainstep.report import charts as plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.cells import get, number
from trainstep.report.charts import Series
from trainstep.report.numbers import as_float
from trainstep.report.sections.plain import plain_table

TABLES = ("plan machine", "plan", "plan memory", "plan limit", "plan scaling", "plan check")


def plan(records: Sequence[Row]) -> Section | None:
    """Everything that was predicted and not measured."""
    present = [kind for kind in TABLES if of_kind(records, KINDS[kind])]
    if not present:
        return None
    blocks: list[Block] = []
    if scaling := of_kind(records, PlanScalingRow):
        drawn = [_scaling(scaling, per_gpu=each) for each in (False, True)]
        blocks += [Charts(charts)] if (charts := [chart for chart in drawn if chart is not None]) else []
    blocks += [plain_table(kind, of_kind(records, KINDS[kind]), kind.replace(" ", "-")) for kind in present]
    bases = dict.fromkeys(str(row.values["basis"]) for row in of_kind(records, PlanMachineRow))
    lead = (
        "These are predictions, from the model’s shape and the rates below; nothing here was measured. "
        "Communication that hides behind computation slows it, by a share that was measured on two H200s."
    )
    lead = " ".join([lead, *(f"They stand on this: {basis}." for basis in bases)])
    return Section("plan", "Plan", "Plan: predicted, not measured", lead, blocks)


def _scaling(rows: Sequence[Row], *, per_gpu: bool) -> Chart | None:
    """Throughput of each strategy where it fits, with a line for perfect scaling; None where nothing ever fits."""
    counts = [as_float(row.case["gpus"]) or 1 for row in rows]
    ending = "_tokens_per_s"
    unit = "tokens/s per GPU" if per_gpu else "tokens/s"
    names = dict.fromkeys(name.removesuffix(ending) for row in rows for name in row.values if name.endswith(ending))
    series, legend = [], []
    for index, name in enumerate(names):
        known = [
            (gpus, value / gpus if per_gpu else value)
            for gpus, row in zip(counts, rows, strict=True)
            if row.values.get(f"{name}_fits") and (value := get(row, f"{name}{ending}")) is not None
        ]
        if not known:
            continue
        role = plots.KINDS[index % len(plots.KINDS)]
        x, y = [gpus for gpus, _ in known], [value for _, value in known]
        series.append(Series(f"{name} (predicted)", x, y, role, texts=[f"{number(value)} {unit}" for value in y]))
        legend.append((role, name))
    if not series:
        return None
    if not per_gpu:
        best = max(one.y[0] / one.x[0] for one in series)
        ideal = [best * gpus for gpus in counts]
        texts = [f"{number(value)} {unit}" for value in ideal]
        series.append(Series("perfect scaling", counts, ideal, "neutral", 1.0, "dashed", texts=texts))
        legend.append(("neutral", "perfect scaling"))
    plot = partial(plots.curves, counts, series, "GPUs", unit)
    caption = "Prediction: the same batch on every GPU. A strategy has no point where it does not fit."
    title = "Throughput per GPU (prediction)" if per_gpu else "Throughput against GPUs (prediction)"
    return Chart("plan-scaling-per-gpu" if per_gpu else "plan-scaling", title, caption, plot, legend)
