"""Whether the machine was quiet enough for what was measured: intervals, the GPU's throttling, the baseline again."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.report.finding import Finding, in_ms
from trainstep.report.numbers import numeric
from trainstep.report.records import Record, of_kind

NOISY_INTERVAL = 0.10
"""A median whose interval is wider than this share of it was measured on a noisy machine."""
WILD_INTERVAL = 0.50
"""A row of many (rungs, cases of a sweep) is pointed at when its interval is wider than this share of its median."""


def noise_findings(step: Record | None, records: Sequence[Record]) -> list[Finding]:
    """What to say about noise: of the step that was taken apart, of single rows, and of the baseline measured twice."""
    return [
        *_step(step),
        *_measured_again(records),
        *_wild_rows(records, "rung", "rungs"),
        *_wild_rows(records, "sweep", "rows"),
        *_control(records),
    ]


def _step(step: Record | None) -> list[Finding]:
    if step is None or step.values.get("step_low_ms") is None:
        return []
    width = _width(step)
    throttle = step.values.get("throttled_by")
    found = []
    if width > NOISY_INTERVAL:
        found.append(
            Finding(
                "noise",
                f"The machine was noisy: the step's 95 % interval spans {width:.0%} of its median. "
                "Small differences need more --steps or a quieter machine.",
            )
        )
    if throttle not in (None, "nothing"):
        found.append(Finding("noise", f"The GPU was slowed by its {throttle} while it was measured."))
    return found


def _wild_rows(records: Sequence[Record], kind: str, many: str) -> list[Finding]:
    """A disturbance of seconds hits single rows, and may be over when the baseline is measured again."""
    rows = [row for row in of_kind(records, kind) if row.values.get("step_low_ms") is not None]
    widths = [_width(row) for row in rows]
    wild = [width for width in widths if width > WILD_INTERVAL]
    if not wild:
        return []
    worst = rows[widths.index(max(widths))].values
    low, median, high = (in_ms(worst[name]) for name in ("step_low_ms", "step_ms", "step_high_ms"))
    return [
        Finding(
            "noise",
            f"Unsteady times in {len(wild)} of {len(rows)} {many}: 95 % intervals span more than half of the median, "
            f"at worst {low} to {high} around {median}. Something else may have run; measure again before "
            "believing them.",
        )
    ]


def _measured_again(records: Sequence[Record]) -> list[Finding]:
    rungs = of_kind(records, "rung")
    again = [str(row.case["rung"]) for row in rungs if row.values.get("attempts") == 2]
    if not again:
        return []
    return [
        Finding(
            "noise",
            f"Measured twice, since the first times were unsteady: {', '.join(again)}. The second ones are shown.",
        )
    ]


def _width(row: Record) -> float:
    low, median, high = (numeric(row.values[name]) for name in ("step_low_ms", "step_ms", "step_high_ms"))
    return (high - low) / median


def _control(records: Sequence[Record]) -> list[Finding]:
    found = []
    for row in of_kind(records, "control"):
        low, high = row.values.get("ratio_low"), row.values.get("ratio_high")
        if low is None or numeric(low) <= 1 <= numeric(high):
            continue
        found.append(
            Finding(
                "noise",
                f"The machine changed while it was measured: the baseline took {in_ms(row.values['first_ms'])} at the "
                f"start of the ladder and {in_ms(row.values['again_ms'])} at its end. Speed-ups are no more certain "
                "than that; run again on a quieter machine.",
            )
        )
    return found
