"""Whether the machine was quiet enough for what was measured: intervals, the GPU's throttling, the baseline again."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import CeilingRow, ControlRow, FamilyRow, ProfileRow, RungRow, SweepRow
from trainstep.records import Row, Times, of_kind
from trainstep.report.analysed import analysed_step, is_same_step
from trainstep.report.finding import Finding, in_ms, listed
from trainstep.report.numbers import numeric
from trainstep.stats import WILD_INTERVAL

NOISY_INTERVAL = 0.10  # A median whose interval is wider than this share of it was measured on a noisy machine
FEWEST = 5  # Samples whose extremes stand in for an interval
APART = 0.10
"""Measurements of one step in one run are said to disagree when what encloses their medians is further apart."""
BEYOND = 1.05
"""Part of the measured ceiling of arithmetic from which it cannot be: a GPU's clock is a few percent lower under one
long large product than under short ones."""
SEEN = 0.01  # Share of its phase from which a family has a row on the page

TOPIC = "noise"


def noisy_step(rows: Sequence[Row]) -> list[Finding]:
    """The analysed step's interval, and what slowed the GPU meanwhile."""
    step = analysed_step(rows)
    if step is None or (width := _width(step.times["step"])) is None:
        return []
    found = []
    if width > NOISY_INTERVAL:
        sentence = (
            f"The machine was noisy: the step's 95 % interval spans {width:.0%} of its median. "
            "Small differences need more --steps or a quieter machine."
        )
        found.append(Finding(id="noise.interval", topic=TOPIC, figures={"width": width}, sentence=sentence))
    if step.throttled_by not in (None, "nothing"):
        sentence = f"The GPU was slowed by its {step.throttled_by} while it was measured."
        figures = {"throttled_by": step.throttled_by}
        found.append(Finding(id="noise.throttled", topic=TOPIC, figures=figures, sentence=sentence))
    return found


def _width(times: Times) -> float | None:
    """The interval's width as a share of the median."""
    return None if times.low is None or times.high is None else (times.high - times.low) / times.median


def measured_again(rows: Sequence[Row]) -> list[Finding]:
    """Rungs whose first times were unsteady."""
    again = tuple(row.rung for row in of_kind(rows, RungRow) if row.attempts == 2)
    if not again:
        return []
    sentence = f"Measured twice, since the first times were unsteady: {', '.join(again)}. The second ones are shown."
    return [Finding(id="noise.measured-again", topic=TOPIC, figures={"rungs": again}, sentence=sentence)]


def wild_rows(rows: Sequence[Row]) -> list[Finding]:
    """A disturbance of seconds hits single rows, and may be over when the baseline is measured again."""
    return [*_wild(of_kind(rows, RungRow), "rungs"), *_wild(of_kind(rows, SweepRow), "rows")]


def _wild(rows: Sequence[RungRow] | Sequence[SweepRow], many: str) -> list[Finding]:
    measured = [row.times["step"] for row in rows if "step" in row.times]
    widths = {times: width for times in measured if (width := _width(times)) is not None}
    wild = [times for times in measured if widths.get(times, 0) > WILD_INTERVAL]
    if not wild:
        return []
    worst, known = max(wild, key=widths.__getitem__), sum(times in widths for times in measured)
    figures = {"rows": len(wild), "of": known, "low_ms": worst.low, "ms": worst.median, "high_ms": worst.high}
    sentence = (
        f"Unsteady times in {len(wild)} of {known} {many}: 95 % intervals span more than half of the median, at worst "
        f"{in_ms(worst.low)} to {in_ms(worst.high)} around {in_ms(worst.median)}. Something else may have run; measure "
        "again before believing them."
    )
    return [Finding(id=f"noise.unsteady-{many}", topic=TOPIC, figures=figures, sentence=sentence)]


def control(rows: Sequence[Row]) -> list[Finding]:
    """A baseline that took another time at the end of the ladder than at its start."""
    return [
        Finding(
            id="noise.control",
            topic=TOPIC,
            figures={"first_ms": row.first_ms, "again_ms": row.again_ms, "ratio": row.ratio},
            sentence=f"The machine changed while it was measured: the baseline took {in_ms(row.first_ms)} at the start "
            f"of the ladder and {in_ms(row.again_ms)} at its end. Speed-ups are no more certain than that; run again "
            "on a quieter machine.",
        )
        for row in of_kind(rows, ControlRow)
        if row.ratio_low is not None and row.ratio_high is not None and not row.ratio_low <= 1 <= row.ratio_high
    ]


def same_step_twice(rows: Sequence[Row]) -> list[Finding]:
    """The phases' step, the profile's plain one and the ladder's baseline, where their settings are the same.

    They disagree where the lowest end of one lies above the highest of another by more than `APART`. The ends are those
    of the median's 95 % interval, or, of samples too few for one, the extremes: that five samples of one distribution
    all lie above five others has a probability of 1 in 252.
    """
    step = analysed_step(rows)
    if step is None:
        return []
    candidates: dict[str, Sequence[Row]] = {
        "the phases": [step],
        "the profile": of_kind(rows, ProfileRow),
        "the ladder's baseline": [row for row in of_kind(rows, RungRow) if row.verdict == "baseline"],
    }
    found = {
        name: (numeric(row.values["step_ms"]), *ends)
        for name, those in candidates.items()
        for row in those[:1]
        if row.values.get("step_ms") is not None and is_same_step(step, row) and (ends := _enclosed(row)) is not None
    }
    if len(found) < 2:
        return []
    highest_low, lowest_high = max(low for _, low, _ in found.values()), min(high for _, _, high in found.values())
    if highest_low <= (1 + APART) * lowest_high:
        return []
    medians = {name: median for name, (median, _, _) in found.items()}
    apart = max(medians.values()) / min(medians.values())
    told = listed([f"{in_ms(median)} ({name})" for name, median in medians.items()])
    return [
        Finding(
            id="noise.same-step",
            topic=TOPIC,
            figures={**{f"{name.replace(' ', '_')}_ms": median for name, median in medians.items()}, "apart": apart},
            sentence=f"The same step was measured as {told}, {apart:.1f}× apart: the machine changed meanwhile. Times "
            "of these parts cannot be set beside one another; run again on a quieter machine.",
        )
    ]


def _enclosed(row: Row) -> tuple[float, float] | None:
    """What the median of a step's times lies between; None where neither an interval nor samples are known."""
    low, high, samples = row.values.get("step_low_ms"), row.values.get("step_high_ms"), row.samples.get("step")
    if low is not None and high is not None:
        return numeric(low), numeric(high)
    return (min(samples), max(samples)) if samples and len(samples) >= FEWEST else None


def beyond_arithmetic(rows: Sequence[Row]) -> list[Finding]:
    """Families of kernels that compute faster than a large product did here; caches excuse bytes, not FLOPs."""
    limits = {row.precision: row.tflops for row in of_kind(rows, CeilingRow) if row.operation == "matmul"}
    parts = {
        f"{row.family} in {row.phase}": row.tflops / limit
        for row in of_kind(rows, FamilyRow)
        if row.phase != "step" and (row.share or 0) >= SEEN and row.ceiling_precision is not None
        if row.tflops and (limit := limits.get(row.ceiling_precision))
    }
    beyond = {name: part for name, part in sorted(parts.items(), key=lambda each: -each[1]) if part >= BEYOND}
    if not beyond:
        return []
    told = listed([f"{name} {part:.0%}" for name, part in beyond.items()])
    return [
        Finding(
            id="noise.beyond-arithmetic",
            topic=TOPIC,
            figures=beyond,
            sentence=f"More than can be, of the arithmetic that a large product reached: {told}. That product or the "
            "profile was disturbed (or their clocks differed), so shares of the device's limit are not to be trusted "
            "here.",
        )
    ]


RULES = (noisy_step, measured_again, wild_rows, control, same_step_twice, beyond_arithmetic)
