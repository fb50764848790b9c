"""Predictions: strategies, memory by policy, limits of each axis, throughput by GPUs, and the check against figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from trainstep.kinds import PlanCheckRow, PlanLimitRow, PlanMachineRow, PlanMemoryRow, PlanRow, PlanScalingRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report import plots
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.columns import Cell, Column, case_column, value_column
from trainstep.report.finding import Finding, in_gib, in_ms
from trainstep.report.numbers import NONE, number
from trainstep.report.plots import Series
from trainstep.report.tables import Definition, Table, TableRow, make_table

_SETTINGS = tuple(
    case_column(name, name)
    for name in ("workload", "device", "batch", "context", "precision", "compile", "attention", "optimizer")
)


def _shown(title: str, name: str) -> Column:
    """A setting that stays a column even where it is the same in all rows."""
    return Column(title, case_column(title, name).cell)


_MESH = (_shown("strategy", "strategy"), case_column("GPUs", "gpus"), _shown("tp", "tensor_parallel"))
_SPLIT = tuple(
    value_column(f"{title} (GiB)", f"{name}_gib")
    for title, name in (
        ("weights", "weights"),
        ("gradients", "gradients"),
        ("state", "optimizer_state"),
        ("activations", "activations"),
        ("buffers", "buffers"),
        ("peak", "peak"),
    )
)
_ROOM = Column("room for tensors (GiB)", lambda row: number(row.values.get("tensors_gib"), 4), setting=True)
"""The same in every row, so it stands in the caption, where "fits" is explained by it."""

TABLES = (
    Definition(
        PlanMachineRow,
        "What the prediction stands on",
        (
            case_column("model", "workload"),
            case_column("device", "device"),
            value_column("parameters", "parameters"),
            value_column("GPUs", "gpus"),
            value_column("per node", "gpus_per_node"),
            value_column("memory (GiB)", "memory_gib", digits=4),
            value_column("for tensors (GiB)", "tensors_gib", digits=4),
            value_column("products (TFLOP/s)", "product_tflops"),
            value_column("copy (GB/s)", "copy_gb_s"),
            value_column("link (GB/s)", "link_gb_s"),
            value_column("a call (µs)", "link_overhead_us"),
            value_column("network (GB/s per GPU)", "network_gb_s"),
        ),
    ),
    Definition(
        PlanRow,
        "Predicted: one step by strategy; computing is matrix products, memory traffic and the optimizer; what fits "
        "is within the room for tensors",
        (
            *_SETTINGS,
            case_column("checkpointing", "checkpointing"),
            *_MESH,
            value_column("peak (GiB)", "peak_gib"),
            _ROOM,
            value_column("fits", "fits"),
            value_column("largest batch", "largest_batch"),
            value_column("fewest GPUs", "smallest_gpus"),
            value_column("sent per GPU (GB)", "sent_gb"),
            value_column("forward (ms)", "forward_ms", brief=False),
            value_column("backward (ms)", "backward_ms", brief=False),
            value_column("optimizer (ms)", "optimizer_ms", brief=False),
            value_column("computing (ms)", "compute_ms"),
            value_column("communicating (ms)", "communication_ms"),
            value_column("of it exposed (ms)", "exposed_ms"),
            value_column("step (ms)", "step_ms"),
            value_column("limited by", "limit"),
            value_column("tokens/s", "tokens_per_s"),
            value_column("utilisation (%)", "utilisation", 100),
        ),
    ),
    Definition(
        PlanMemoryRow,
        "Predicted: memory of one GPU at its peak, by checkpointing policy",
        (
            *_SETTINGS,
            *_MESH,
            _shown("checkpointing", "checkpointing"),
            *_SPLIT,
            value_column("peak at", "peak_at"),
            _ROOM,
            value_column("fits", "fits"),
            value_column("largest batch", "largest_batch"),
        ),
    ),
    Definition(
        PlanLimitRow,
        "Predicted: how far each axis scales before its communication takes longer than the matrix products alone, at "
        "their full rate",
        (
            *_SETTINGS[:-2],
            _shown("axis", "axis"),
            case_column("connection", "connection"),
            value_column("FLOP per byte", "flop_per_byte"),
            value_column("needs tokens per GPU", "least_tokens_per_gpu"),
            value_column("has", "tokens_per_gpu"),
            value_column("most GPUs at this global batch", "most_gpus"),
        ),
    ),
    Definition(
        PlanCheckRow,
        "Predicted beside measured",
        (
            *(case_column(name, name) for name in ("workload", "batch", "context", "strategy", "gpus")),
            *(
                Column(name, lambda row, name=name: str(row.case.get(name) or "none"))  # type: ignore[misc]
                for name in ("precision", "compile", "attention", "checkpointing", "optimizer")
            ),
            value_column("step (ms)", "step_ms"),
            value_column("predicted (ms)", "predicted_ms"),
            value_column("time off by (%)", "time_error", 100, digits=2),
            value_column("peak (GiB)", "peak_gib"),
            value_column("predicted (GiB)", "predicted_gib"),
            value_column("memory off by (%)", "memory_error", 100, digits=2),
        ),
    ),
)


def scaling_table(records: Sequence[Row]) -> list[Table]:
    """Throughput by number of GPUs, a column for each strategy; none where no scaling was planned."""
    rows = of_kind(records, PlanScalingRow)
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    cells = {(row.gpus, row.strategy): row for row in rows}

    def cell(gpus: int, strategy: str) -> Cell:
        row = cells.get((gpus, strategy))
        if row is None:
            return Cell(NONE)
        if not row.fits:
            return Cell("does not fit")
        return Cell(number(row.tokens_per_s), row.tokens_per_s, "tokens_per_s")

    lines = [
        TableRow([Cell(number(gpus), gpus, "gpus"), *(cell(gpus, strategy) for strategy in strategies)], str(gpus))
        for gpus in dict.fromkeys(row.gpus for row in rows)
    ]
    caption = "Predicted: tokens/s with the same batch on every GPU"
    return [Table(caption, ["GPUs", *strategies], lines, "plan-scaling")] if rows else []


DERIVED = (scaling_table,)


def findings(records: Sequence[Row]) -> list[Finding]:
    """The fastest strategy that fits, what to do where none does, and what the predictions stand on."""
    rows = of_kind(records, PlanRow)
    if not rows:
        return []
    fitting = [row for row in rows if row.fits]
    found = [_fastest(fitting) if fitting else _nothing_fits(rows)]
    for row in of_kind(records, PlanMachineRow):
        found.append(Finding("plan", f"Predictions stand on this: {row.basis}.", "plan.basis", {"basis": row.basis}))
    return found


RULES = (findings,)


def _fastest(rows: Sequence[PlanRow]) -> Finding:
    best = max(rows, key=lambda row: row.tokens_per_s or 0)
    where = "one GPU" if best.gpus == 1 else f"{best.gpus:,} GPUs"
    sentence = (
        f"Predicted: of what fits, {best.strategy} is fastest on {where}, with {number(best.tokens_per_s)} tokens/s at "
        f"{best.utilisation or 0:.0%} of the peak and {in_ms(best.step_ms)} a step. What limits it: {best.limit}."
    )
    figures: dict[str, Scalar] = {
        "strategy": best.strategy,
        "gpus": best.gpus,
        "tokens_per_s": best.tokens_per_s,
        "utilisation": best.utilisation,
        "step_ms": best.step_ms,
        "limit": best.limit,
    }
    return Finding("plan", sentence, "plan.fastest", figures)


def _nothing_fits(rows: Sequence[PlanRow]) -> Finding:
    least = min(rows, key=lambda row: row.peak_gib or 0)
    enough = [row for row in rows if row.smallest_gpus is not None]
    fewest = min(enough, key=lambda row: row.smallest_gpus or 0, default=None)
    advice = (
        "No number of GPUs helps at this batch and context: checkpoint activations, or take a smaller batch."
        if fewest is None
        else f"With {fewest.strategy} it takes {fewest.smallest_gpus:,} GPUs."
    )
    sentence = (
        f"Predicted: nothing fits. {least.strategy} needs least, {in_gib(least.peak_gib or 0)} on each GPU, which has "
        f"room for {in_gib(least.tensors_gib or 0)} of tensors. {advice}"
    )
    figures: dict[str, Scalar] = {
        "strategy": least.strategy,
        "peak_gib": least.peak_gib,
        "tensors_gib": least.tensors_gib,
        "fewest_gpus": fewest.smallest_gpus if fewest else None,
        "fewest_gpus_strategy": fewest.strategy if fewest else None,
    }
    return Finding("plan", sentence, "plan.nothing-fits", figures)


def plan(records: Sequence[Row]) -> Section | None:
    """Everything that was predicted and not measured."""
    scaling = of_kind(records, PlanScalingRow)
    tables = [*_made(TABLES[:-1], records), *scaling_table(records), *_made(TABLES[-1:], records)]
    if not tables:
        return None
    blocks: list[Block] = []
    if scaling:
        drawn = [_scaling(scaling, per_gpu=each) for each in (False, True)]
        blocks += [Charts(charts)] if (charts := [chart for chart in drawn if chart is not None]) else []
    bases = dict.fromkeys(row.basis for row in of_kind(records, PlanMachineRow))
    lead = (
        "These are predictions, from the model’s shape and the rates below; nothing here was measured. "
        "Communication that hides behind computation slows it, by a share that was measured on two H200s."
    )
    lead = " ".join([lead, *(f"They stand on this: {basis}." for basis in bases)])
    return Section("plan", "Plan", "Plan: predicted, not measured", lead, [*blocks, *tables])


def _made(definitions: Sequence[Definition], records: Sequence[Row]) -> list[Table]:
    return [make_table(each, rows, "page") for each in definitions if (rows := of_kind(records, each.kind))]


SECTIONS: tuple[Callable[[Sequence[Row]], Section | None], ...] = (plan,)


def _scaling(rows: Sequence[PlanScalingRow], *, per_gpu: bool) -> Chart | None:
    """Throughput of each strategy where it fits, with a line for perfect scaling; None where nothing ever fits."""
    counts = [float(gpus) for gpus in dict.fromkeys(row.gpus for row in rows)]
    unit = "tokens/s per GPU" if per_gpu else "tokens/s"
    series, legend = [], []
    for index, name in enumerate(dict.fromkeys(row.strategy for row in rows)):
        known = [row for row in rows if row.strategy == name and row.fits and row.tokens_per_s is not None]
        if not known:
            continue
        role = plots.KINDS[index % len(plots.KINDS)]
        x = [float(row.gpus) for row in known]
        y = [(row.tokens_per_s or 0) / (row.gpus if per_gpu else 1) for row in known]
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
