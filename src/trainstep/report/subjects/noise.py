"""Whether the machine was quiet enough for what was measured: intervals, the GPU's throttling, the baseline again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainstep.kinds import CeilingRow, ControlRow, FamilyRow, ProfileRow, RungRow, SweepRow
from trainstep.records import Row, Times, of_kind
from trainstep.report.blocks import Finding, found, in_ms, listed
from trainstep.report.numbers import numeric
from trainstep.report.subjects.steps import analysed_step, is_same_step
from trainstep.stats import WILD_INTERVAL

NOISY_INTERVAL = 0.10  # A median whose interval is wider than this share of it was measured on a noisy machine
FEWEST = 5  # Samples whose extremes stand in for an interval
APART = 0.10
"""Measurements of one step in one run are said to disagree when what encloses their medians is further apart."""
BEYOND = 1.05
"""Part of the measured ceiling of arithmetic from which it cannot be: a GPU's clock is a few percent lower under one
long large product than under short ones."""
SEEN = 0.01  # Share of its phase from which a family has a row on the page


def noisy_step(rows: Sequence[Row]) -> Iterator[Finding]:
    """The analysed step's interval, and what slowed the GPU meanwhile."""
    step = analysed_step(rows)
    if step is None or (width := _width(step.times["step"])) is None:
        return
    if width > NOISY_INTERVAL:
        said = (
            "The machine was noisy: the step's 95 % interval spans {width:.0%} of its median. "
            "Small differences need more --steps or a quieter machine."
        )
        yield found("noise.interval", said, width=width)
    if step.throttled_by not in (None, "nothing"):
        said = "The GPU was slowed by its {throttled_by} while it was measured."
        yield found("noise.throttled", said, throttled_by=step.throttled_by)


def _width(times: Times) -> float | None:
    return None if times.low is None or times.high is None else (times.high - times.low) / times.median


def measured_again(rows: Sequence[Row]) -> list[Finding]:
    """Rungs whose first times were unsteady."""
    again = tuple(row.rung for row in of_kind(rows, RungRow) if row.attempts == 2)
    said = "Measured twice, since the first times were unsteady: {rungs:n}. The second ones are shown."
    return [found("noise.measured-again", said, rungs=again)] if again else []


def wild_rows(rows: Sequence[Row]) -> list[Finding]:
    """A disturbance of seconds hits single rows, and may be over when the baseline is measured again."""
    return [*_wild(of_kind(rows, RungRow), "rungs"), *_wild(of_kind(rows, SweepRow), "rows")]


def _wild(rows: Sequence[RungRow] | Sequence[SweepRow], many: str) -> list[Finding]:
    measured = [
        (width, row.times["step"]) for row in rows if "step" in row.times and (width := _width(row.times["step"]))
    ]
    wild = [(width, times) for width, times in measured if width > WILD_INTERVAL]
    if not wild:
        return []
    _, worst = max(wild, key=lambda each: each[0])
    said = (
        f"Unsteady times in {{rows}} of {{of}} {many}: 95 % intervals span more than half of the median, at worst "
        "{low_ms:ms} to {high_ms:ms} around {ms:ms}. Something else may have run; measure again before believing them."
    )
    figures = {"rows": len(wild), "of": len(measured), "low_ms": worst.low, "ms": worst.median, "high_ms": worst.high}
    return [found(f"noise.unsteady-{many}", said, **figures)]


def control(rows: Sequence[Row]) -> list[Finding]:
    """A baseline that took another time at the end of the ladder than at its start."""
    said = (
        "The machine changed while it was measured: the baseline took {first_ms:ms} at the start of the ladder and "
        "{again_ms:ms} at its end. Speed-ups are no more certain than that; run again on a quieter machine."
    )
    return [
        found("noise.control", said, first_ms=row.first_ms, again_ms=row.again_ms, ratio=row.ratio)
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
    ends = {
        name: (numeric(row.values["step_ms"]), *enclosed)
        for name, those in candidates.items()
        for row in those[:1]
        if row.values.get("step_ms") is not None and is_same_step(step, row) and (enclosed := _enclosed(row))
    }
    lows, highs = [low for _, low, _ in ends.values()], [high for _, _, high in ends.values()]
    if len(ends) < 2 or max(lows) <= (1 + APART) * min(highs):
        return []
    medians = {name: median for name, (median, _, _) in ends.items()}
    told = listed([f"{in_ms(median)} ({name})" for name, median in medians.items()])
    said = (
        f"The same step was measured as {told}, {{apart:.1f}}× apart: the machine changed meanwhile. Times of these "
        "parts cannot be set beside one another; run again on a quieter machine."
    )
    figures = {f"{name.replace(' ', '_')}_ms": median for name, median in medians.items()}
    return [found("noise.same-step", said, **figures, apart=max(medians.values()) / min(medians.values()))]


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
    said = (
        f"More than can be, of the arithmetic that a large product reached: "
        f"{listed([f'{name} {part:.0%}' for name, part in beyond.items()])}. That product or the profile was disturbed "
        "(or their clocks differed), so shares of the device's limit are not to be trusted here."
    )
    return [found("noise.beyond-arithmetic", said, **beyond)]


RULES = (noisy_step, measured_again, wild_rows, control, same_step_twice, beyond_arithmetic)
