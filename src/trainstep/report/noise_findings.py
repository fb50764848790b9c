"""Whether the machine was quiet enough for what was measured: intervals, the GPU's throttling, the baseline again."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import CeilingRow, ControlRow, FamilyRow, ProfileRow, RungRow, SweepRow
from trainstep.records import Row, of_kind
from trainstep.report.analysed import is_same_step
from trainstep.report.finding import Finding, in_ms, listed
from trainstep.report.numbers import numeric

NOISY_INTERVAL = 0.10
"""A median whose interval is wider than this share of it was measured on a noisy machine."""
WILD_INTERVAL = 0.50
"""A row of many (rungs, cases of a sweep) is pointed at when its interval is wider than this share of its median."""


FEWEST = 5
"""Samples whose extremes stand in for an interval."""
APART = 0.10
"""Measurements of one step in one run are said to disagree when what encloses their medians is further apart."""
BEYOND = 1.05
"""Part of the measured ceiling of arithmetic from which it cannot be: a GPU's clock is a few percent lower under one
long large product than under short ones."""
SEEN = 0.01
"""Share of its phase from which a family has a row on the page."""


def noise_findings(step: Row | None, records: Sequence[Row]) -> list[Finding]:
    """What to say about noise: of the step that was taken apart, of single rows, and of the baseline measured twice."""
    return [
        *_step(step),
        *_measured_again(records),
        *_wild_rows(records, RungRow, "rungs"),
        *_wild_rows(records, SweepRow, "rows"),
        *_control(records),
        *_same_step_twice(step, records),
        *_beyond_arithmetic(records),
    ]


def _step(step: Row | None) -> list[Finding]:
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


def _wild_rows(records: Sequence[Row], kind: type[Row], many: str) -> list[Finding]:
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


def _measured_again(records: Sequence[Row]) -> list[Finding]:
    rungs = of_kind(records, RungRow)
    again = [str(row.case["rung"]) for row in rungs if row.values.get("attempts") == 2]
    if not again:
        return []
    return [
        Finding(
            "noise",
            f"Measured twice, since the first times were unsteady: {', '.join(again)}. The second ones are shown.",
        )
    ]


def _width(row: Row) -> float:
    low, median, high = (numeric(row.values[name]) for name in ("step_low_ms", "step_ms", "step_high_ms"))
    return (high - low) / median


def _control(records: Sequence[Row]) -> list[Finding]:
    found = []
    for row in of_kind(records, ControlRow):
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


def _same_step_twice(step: Row | None, records: Sequence[Row]) -> list[Finding]:
    """The phases' step, the profile's plain one and the ladder's baseline, where their settings are the same.

    They disagree where the lowest end of one lies above the highest of another by more than `APART`. The ends are those
    of the median's 95 % interval, or, of samples too few for one, the extremes: that five samples of one distribution
    all lie above five others has a probability of 1 in 252.
    """
    if step is None:
        return []
    baselines = [row for row in of_kind(records, RungRow) if row.values.get("verdict") == "baseline"]
    rows: dict[str, Sequence[Row]] = {
        "the phases": [step],
        "the profile": of_kind(records, ProfileRow),
        "the ladder's baseline": baselines,
    }
    found = {
        name: (numeric(row.values["step_ms"]), *ends)
        for name, candidates in rows.items()
        for row in candidates[:1]
        if row.values.get("step_ms") is not None and is_same_step(step, row) and (ends := _enclosed(row)) is not None
    }
    if len(found) < 2:
        return []
    highest_low, lowest_high = max(low for _, low, _ in found.values()), min(high for _, _, high in found.values())
    if highest_low <= (1 + APART) * lowest_high:
        return []
    medians = [median for median, _, _ in found.values()]
    told = listed([f"{in_ms(median)} ({name})" for name, (median, _, _) in found.items()])
    return [
        Finding(
            "noise",
            f"The same step was measured as {told}, {max(medians) / min(medians):.1f}× apart: the machine changed "
            "meanwhile. Times of these parts cannot be set beside one another; run again on a quieter machine.",
        )
    ]


def _enclosed(row: Row) -> tuple[float, float] | None:
    """What the median of a step's times lies between; None where neither an interval nor samples are known."""
    low, high, samples = row.values.get("step_low_ms"), row.values.get("step_high_ms"), row.samples.get("step")
    if low is not None and high is not None:
        return numeric(low), numeric(high)
    return (min(samples), max(samples)) if samples and len(samples) >= FEWEST else None


def _beyond_arithmetic(records: Sequence[Row]) -> list[Finding]:
    """Families of kernels that compute faster than a large product did here; caches excuse bytes, not FLOPs."""
    limits = {row.case["what"]: row.values.get("tflops") for row in of_kind(records, CeilingRow)}
    parts = {
        f"{row.case['family']} in {row.case['phase']}": numeric(row.values["tflops"]) / numeric(limit)
        for row in of_kind(records, FamilyRow)
        if row.case["phase"] != "step" and numeric(row.values.get("share") or 0) >= SEEN
        if row.values.get("tflops") and (limit := limits.get(row.values.get("ceiling")))
    }
    beyond = {name: part for name, part in parts.items() if part >= BEYOND}
    if not beyond:
        return []
    told = listed([f"{name} {part:.0%}" for name, part in sorted(beyond.items(), key=lambda each: -each[1])])
    return [
        Finding(
            "noise",
            f"More than can be, of the arithmetic that a large product reached: {told}. That product or the profile "
            "was disturbed (or their clocks differed), so shares of the device's limit are not to be trusted here.",
        )
    ]
