"""Predictions: strategies, memory by policy, limits of each axis, and throughput by GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainstep.base.config import CASE, settings_with
from trainstep.report import columns
from trainstep.report.blocks import Section, section
from trainstep.report.columns import Cell, Column, value_cell
from trainstep.report.findings import Claim, Finding, found, literal
from trainstep.report.numbers import NONE, number, numeric
from trainstep.report.tables import Table, TableRow, define, page_table
from trainstep.rows import PlanLimitRow, PlanMachineRow, PlanMemoryRow, PlanRow, PlanScalingRow
from trainstep.rows.records import Row, Scalar, of_kind

_SETTINGS = columns.named("workload", "device", *settings_with(CASE, without=("checkpointing",)))


def _shown(title: str, name: str) -> Column:
    """A setting that stays a column even where it is the same in all rows."""
    return Column(title, columns.case(title, name).cell)


_MESH = (
    _shown("strategy", "strategy"),
    columns.case("GPUs", "gpus"),
    _shown("tp", "tensor_parallel"),
    *columns.cases({"replicas": "replicas", "blocks a group": "blocks_per_group"}),
)
_PARTS = ("weights", "gradients", "optimizer_state", "activations", "buffers", "peak")
_SPLIT = columns.values({f"{name.rpartition('_')[2]} (GiB)": f"{name}_gib" for name in _PARTS})
_ROOM = replace(columns.value("room for tensors (GiB)", "tensors_gib", 4), setting=True)
"""The same in every row, so it stands in the caption, where "fits" is explained by it."""

TABLES = (
    define(
        PlanMachineRow,
        "What the prediction stands on",
        *columns.cases({"model": "workload", "device": "device"}),
        *columns.values({"parameters": "parameters", "GPUs": "gpus", "per node": "gpus_per_node"}),
        *columns.values({"memory (GiB)": "memory_gib", "for tensors (GiB)": "tensors_gib"}, digits=4),
        *columns.values({"products (TFLOP/s)": "product_tflops", "copy (GB/s)": "copy_gb_s"}),
        *columns.values({"link (GB/s)": "link_gb_s", "a call (µs)": "link_overhead_us"}),
        columns.value("network (GB/s per GPU)", "network_gb_s"),
    ),
    define(
        PlanRow,
        "Predicted: one step by strategy; computing is matrix products, memory traffic and the optimizer; what fits "
        "is within the room for tensors",
        *_SETTINGS,
        columns.case("checkpointing", "checkpointing"),
        *_MESH,
        columns.value("peak (GiB)", "peak_gib"),
        _ROOM,
        *columns.values({"fits": "fits", "largest batch": "largest_batch", "fewest GPUs": "smallest_gpus"}),
        columns.value("sent per GPU (GB)", "sent_gb"),
        *columns.values({"forward (ms)": "forward_ms", "backward (ms)": "backward_ms"}, brief=False),
        columns.value("optimizer (ms)", "optimizer_ms", brief=False),
        *columns.values({"computing (ms)": "compute_ms", "communicating (ms)": "communication_ms"}),
        *columns.values({"of it exposed (ms)": "exposed_ms", "launched by the host in (ms)": "launch_ms"}),
        *columns.values({"step (ms)": "step_ms", "limited by": "limit", "tokens/s": "tokens_per_s"}),
        columns.value("utilisation (%)", "utilisation"),
    ),
    define(
        PlanMemoryRow,
        "Predicted: memory of one GPU at its peak, by checkpointing policy",
        *_SETTINGS,
        *_MESH,
        _shown("checkpointing", "checkpointing"),
        *_SPLIT,
        columns.value("peak at", "peak_at"),
        _ROOM,
        *columns.values({"fits": "fits", "largest batch": "largest_batch"}),
    ),
    define(
        PlanLimitRow,
        "Predicted: how far each axis scales before its communication takes longer than the matrix products alone, at "
        "their full rate",
        *_SETTINGS,
        _shown("axis", "axis"),
        columns.case("connection", "connection"),
        *columns.values({"FLOP per byte": "flop_per_byte", "needs tokens per GPU": "least_tokens_per_gpu"}),
        *columns.values({"has": "tokens_per_gpu", "most GPUs at this global batch": "most_gpus"}),
    ),
)


def scaling_table(records: Sequence[Row]) -> list[Table]:
    """Throughput by number of GPUs, a column for each strategy; none where no scaling was planned."""
    rows = of_kind(records, PlanScalingRow)
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    cells = {
        (row.gpus, row.strategy): value_cell(row, "tokens_per_s") if row.fits else Cell("does not fit") for row in rows
    }
    lines = []
    for gpus in dict.fromkeys(row.gpus for row in rows):
        own = [cells.get((gpus, strategy), Cell(NONE)) for strategy in strategies]
        lines.append(TableRow([Cell(number(gpus), gpus, "gpus"), *own], str(gpus)))
    caption = "Predicted: tokens/s with the same batch on every GPU"
    return [Table(caption, ["GPUs", *strategies], lines, "plan-scaling")] if rows else []


DERIVED = (scaling_table,)


def findings(records: Sequence[Row]) -> list[Finding]:
    """The fastest strategy that fits, what to do where none does, and what the predictions stand on."""
    rows = of_kind(records, PlanRow)
    if not rows:
        return []
    fitting = [row for row in rows if row.fits]
    bases = of_kind(records, PlanMachineRow)
    stated = [found("plan.basis", "Predictions stand on this: {basis}.", basis=row.basis) for row in bases]
    return [_fastest(fitting) if fitting else _nothing_fits(rows), *_not_launched(rows), *stated]


RULES = (findings,)


def _fastest(rows: Sequence[PlanRow]) -> Finding:
    best = max(rows, key=lambda row: (row.gpus / (row.step_ms or math.inf), row.tokens_per_s or 0.0))
    speed = "{tokens_per_s:n} tokens/s at {utilisation:.0%} of the peak and {step_ms:ms} a step"
    if best.tokens_per_s is None or best.utilisation is None:  # the batch of a user's step does not tell
        speed = "{step_ms:ms} a step"
    devices = "one GPU" if best.gpus == 1 else "{gpus:,} GPUs"
    names = ("batch", "context", "precision", "checkpointing")
    case = literal(", ".join(f"{name} {best.case[name]}" for name in names if best.case.get(name)))
    said = f"Predicted ({case}): of what fits, {{strategy}} is fastest on {devices}, with {speed}. Limit: {{limit}}."
    figures = {"tokens_per_s": best.tokens_per_s, "utilisation": best.utilisation, "step_ms": best.step_ms}
    claim = Claim("Predicted: {strategy} is fastest of what fits", ("plan",), best.step_ms, is_part=False)
    return found("plan.fastest", said, claim, strategy=best.strategy, gpus=best.gpus, limit=best.limit, **figures)


def _not_launched(rows: Sequence[PlanRow]) -> Iterator[Finding]:
    """Strategies whose launches are not known beside some whose are."""
    unknown = [row.strategy for row in rows if row.launch_ms is None]
    if 0 < len(unknown) < len(rows):
        said = (
            "What the host takes to launch a step of {strategies} is not in the calibration and not counted, where "
            "that of others is: they may be slower than they are predicted."
        )
        yield found("plan.launches", said, strategies=", ".join(unknown))


def _nothing_fits(rows: Sequence[PlanRow]) -> Finding:
    least = min(rows, key=lambda row: numeric(row.peak_gib))
    enough = [row for row in rows if row.smallest_gpus is not None]
    fewest = min(enough, key=lambda row: numeric(row.smallest_gpus), default=None)
    said = (
        "Predicted: nothing fits. {strategy} needs least, {peak_gib:gib} on each GPU, which has room for "
        "{tensors_gib:gib} of tensors. "
    )
    figures: dict[str, Scalar] = {"fewest_gpus": None, "fewest_gpus_strategy": None}
    if fewest is None:
        said += "No number of GPUs helps at this batch and context: checkpoint activations, or take a smaller batch."
    else:
        said += "With {fewest_gpus_strategy} it takes {fewest_gpus:,} GPUs."
        figures = {"fewest_gpus": fewest.smallest_gpus, "fewest_gpus_strategy": fewest.strategy}
    figures |= {"peak_gib": least.peak_gib, "tensors_gib": least.tensors_gib}
    claim = Claim("Predicted: nothing fits", ("plan",), gib=least.peak_gib, is_part=False)
    return found("plan.nothing-fits", said, claim, strategy=least.strategy, **figures)


def plan(records: Sequence[Row]) -> Section | None:
    """Everything that was predicted and not measured."""
    *predicted, checks = (page_table(each, records) for each in TABLES)
    bases = dict.fromkeys(row.basis for row in of_kind(records, PlanMachineRow))
    lead = (
        "These are predictions, from the model’s shape and the rates below; nothing here was measured. "
        "Communication that hides behind computation slows it, by a share that was measured on two H200s."
    )
    lead = " ".join([lead, *(f"They stand on this: {basis}." for basis in bases)])
    blocks = *predicted, *scaling_table(records), checks
    return section("plan", "Plan", "Plan: predicted, not measured", lead, *blocks)


SECTIONS = (plan,)
