"""What dtypes and sums in half precision say."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import AccumulationRow, DtypeRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report.finding import Finding, listed


def dtype_findings(records: Sequence[Row]) -> list[Finding]:
    """Logits, loss, parameters and gradients under each precision."""
    found = []
    rows = [row for row in of_kind(records, DtypeRow) if row.status == "ok"]
    for precision in dict.fromkeys(row.precision for row in rows):
        own = {row.module: row for row in rows if row.precision == precision}
        result, loss = (
            ", ".join(own[name].outputs or ()) if name in own else "–" for name in ("(forward's result)", "(loss)")
        )
        weights, gradients = (
            sorted({", ".join(each) for each in dtypes if each}) or ["none"]
            for dtypes in ([row.parameters for row in own.values()], [row.gradients for row in own.values()])
        )
        sentence = (
            f"Under {precision}, forward's result is {result} and the loss {loss}; parameters are {listed(weights)}, "
            f"their gradients {listed(gradients)}."
        )
        figures: dict[str, Scalar] = {"precision": precision, "result": result, "loss": loss}
        figures |= {"parameters": tuple(weights), "gradients": tuple(gradients)}
        found.append(Finding("precision", sentence, "precision.dtypes", figures))
    return found


def accumulation_findings(records: Sequence[Row]) -> list[Finding]:
    """What a sum in fp16 loses, and what of it a wide running sum saves."""
    totals = {(row.accumulator, row.addend): row.total for row in of_kind(records, AccumulationRow)}
    half, full = totals.get(("fp16", "fp16")), totals.get(("fp32", "fp16"))
    if half is None or full is None:
        return []
    sentence = (
        f"0.01 added a thousand times is {half:.4f} in fp16, and {full:.4f} if only the running sum is fp32: sums need "
        "the wide type, addends less."
    )
    return [Finding("precision", sentence, "precision.accumulation", {"fp16": half, "fp32_sum": full})]


RULES = (dtype_findings, accumulation_findings)
