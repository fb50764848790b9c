"""What a plan says in sentences: the fastest strategy that fits, what to do where none does, and what it stands on."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import PlanMachineRow, PlanRow
from trainstep.records import Row, of_kind
from trainstep.report.finding import Finding, in_gib, in_ms
from trainstep.report.numbers import number, numeric

TOPIC = "plan"


def plan_findings(records: Sequence[Row]) -> list[Finding]:
    """About predictions alone; none where nothing was planned."""
    rows = of_kind(records, PlanRow)
    if not rows:
        return []
    fitting = [row for row in rows if row.values["fits"]]
    sentences = [_fastest(fitting) if fitting else _nothing_fits(rows)]
    sentences += [f"Predictions stand on this: {row.values['basis']}." for row in of_kind(records, PlanMachineRow)]
    return [Finding(TOPIC, sentence) for sentence in sentences]


def _fastest(rows: Sequence[Row]) -> str:
    best = max(rows, key=lambda row: numeric(row.values["tokens_per_s"]))
    gpus, values = numeric(best.case["gpus"]), best.values
    where = "one GPU" if gpus == 1 else f"{gpus:,.0f} GPUs"
    return (
        f"Predicted: of what fits, {best.case['strategy']} is fastest on {where}, with "
        f"{number(values['tokens_per_s'])} tokens/s at {numeric(values['utilisation']):.0%} of the peak and "
        f"{in_ms(values['step_ms'])} a step. What limits it: {values['limit']}."
    )


def _nothing_fits(rows: Sequence[Row]) -> str:
    least = min(rows, key=lambda row: numeric(row.values["peak_gib"]))
    enough = [row for row in rows if row.values.get("smallest_gpus") is not None]
    fewest = min(enough, key=lambda row: numeric(row.values["smallest_gpus"]), default=None)
    advice = (
        "No number of GPUs helps at this batch and context: checkpoint activations, or take a smaller batch."
        if fewest is None
        else f"With {fewest.case['strategy']} it takes {numeric(fewest.values['smallest_gpus']):,.0f} GPUs."
    )
    return (
        f"Predicted: nothing fits. {least.case['strategy']} needs least, "
        f"{in_gib(numeric(least.values['peak_gib']))} on each GPU, which has room for "
        f"{in_gib(numeric(least.values['tensors_gib']))} of tensors. {advice}"
    )
