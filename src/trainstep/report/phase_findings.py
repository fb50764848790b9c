"""What the phases of the analysed step say: which is the longest, and whether backward is odd beside forward."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import WorkloadRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report.analysed import PHASE_NAMES
from trainstep.report.finding import Finding, in_ms
from trainstep.report.numbers import numeric

BACKWARD_OVER_FORWARD = 2.0
"""Each product y = x·W has two in backward: one for the gradient of x, one for that of W."""
ODD = (0.75, 1.75)
"""A ratio of backward to forward outside of these multiples of the expected one is remarked on."""


def phase_findings(step: Row | None, records: Sequence[Row]) -> list[Finding]:
    """The longest phases, with a remark where backward and forward do not fit together."""
    if step is None:
        return []
    times = {name: numeric(step.values[f"{name}_ms"]) for name in PHASE_NAMES}
    total = sum(times.values())
    first, second = sorted(times, key=times.__getitem__, reverse=True)[:2]
    return [
        Finding(
            "phases",
            f"{first.capitalize()} dominates: {times[first] / total:.0%} of the phases together "
            f"({in_ms(times[first])} of {in_ms(total)}), then {second} with {times[second] / total:.0%}."
            f"{_oddness(times['backward'] / times['forward'], step, records)}",
        )
    ]


def _oddness(ratio: float, step: Row, records: Sequence[Row]) -> str:
    """A remark where backward takes much more or less of forward's time than its matrix products would."""
    expected = expected_ratio(step, records)
    if expected is None or ODD[0] * expected <= ratio <= ODD[1] * expected:
        return ""
    why = {
        "with checkpointing": step.case.get("checkpointing") not in (None, "selective"),
        "with a chunked loss": step.case.get("loss") == "chunked",
    }
    under = " and ".join(name for name, holds in why.items() if holds)
    return (
        f" Backward takes {ratio:.1f}× forward, where the matrix products alone would make it {expected:.2g}×"
        f"{f' {under}' if under else ''}: look there first (memory spilling, a slow backward kernel, or a forward "
        "bound by launches)."
    )


def expected_ratio(step: Row, records: Sequence[Row]) -> float | None:
    """Backward over forward if matrix products took all the time and ran equally fast; None where that is unknown.

    A chunked loss moves the head's product from forward to the loss, and backward computes it once more; every-K runs
    the blocks once more in backward. Both need the FLOPs of the model's parts, which only our models have. Selective
    checkpointing computes no product twice; recursive does so a number of times that no record holds.
    """
    checkpointing, is_chunked = step.case.get("checkpointing"), step.case.get("loss") == "chunked"
    facts = _facts(step, records)
    if facts.get("trainable_parameters") != facts.get("parameters"):
        return None  # frozen weights need no gradient
    recomputes = checkpointing not in (None, "selective")
    if not is_chunked and not recomputes:
        return BACKWARD_OVER_FORWARD
    blocks, head = (facts.get(name) for name in ("blocks_tflop", "head_tflop"))
    if blocks is None or head is None or (recomputes and not str(checkpointing).startswith("every-")):
        return None
    blocks, head = numeric(blocks), numeric(head)
    backward = BACKWARD_OVER_FORWARD * (blocks + head) + blocks * recomputes + head * is_chunked
    return backward / (blocks + head * (not is_chunked))


def _facts(step: Row, records: Sequence[Row]) -> dict[str, Scalar]:
    """What is known of the workload, with its blocks' FLOPs as one sum; empty where nothing is."""
    for row in of_kind(records, WorkloadRow):
        if all(row.case.get(name) == step.case.get(name) for name in ("workload", "batch", "context")):
            parts = [row.values.get(f"{name}_tflop") for name in ("projections", "feed_forward", "attention")]
            blocks = None if None in parts else sum(map(numeric, parts))
            return {**row.values, "blocks_tflop": blocks}
    return {}
