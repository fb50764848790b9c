"""Noise of the machine: intervals, the GPU's throttling, steps measured again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from trainstep.report.findings import Finding, found, listed, literal
from trainstep.report.numbers import in_ms, numeric
from trainstep.report.subjects.climbs import changes, of_steps
from trainstep.report.subjects.steps import analysed_step, is_same_step
from trainstep.rows import AttentionRow, ChangeRow, CollectiveRow, FitRow, ParallelRow, ProfileRow, StepRow, SweepRow
from trainstep.rows.records import Row, Scalar, Times, of_kind

NOISY_INTERVAL = 0.10  # A median whose interval is wider than this share of it was measured on a noisy machine
WILD_INTERVAL = 0.50  # One wider than this share of its median is not to be believed: something else must have run
FEWEST = 5  # Samples whose extremes stand in for an interval
APART = 0.10
"""Measurements of one step in one run are said to disagree when what encloses their medians is further apart."""
BEYOND = 1.05
"""Part of the measured ceiling of arithmetic from which it cannot be: a GPU's clock is a few percent lower under one
long large product than under short ones."""
SEEN = 0.01  # Share of its phase from which a family has a row on the page


def _groups(rows: Sequence[Row]) -> dict[str, list[tuple[str, Row]]]:
    """Timed rows, by what a sentence calls them, each row with its name; of a warm-up study, its last window."""
    step, found = analysed_step(rows), dict[str, list[tuple[str, Row]]]()
    tried = {id(row) for row in changes(rows)}
    for row in rows:
        many = TIMED.get(type(row)) if not isinstance(row, ChangeRow) or id(row) in tried else None
        if many is not None and row.status == "ok" and (step is None or row is step or not isinstance(row, StepRow)):
            found.setdefault(many, []).append((_name(row), row))
    return found


TIMED: Mapping[type[Row], str] = {
    StepRow: "steps",
    ChangeRow: "changes",
    FitRow: "choices of activations",
    AttentionRow: "cases of attention",
    ParallelRow: "schemes",
    CollectiveRow: "collectives",
    SweepRow: "rows of the sweep",
}
_WHOLE = ("step", "both", "time")  # the time of a row that its phases are parts of


def _name(row: Row) -> str:
    for name in ("change", "scheme", "collective", "impl", "form", "workload"):
        if (value := row.case.get(name)) is not None:
            return str(value)
    return TIMED[type(row)]


def unsteady(rows: Sequence[Row]) -> Iterator[Finding]:
    """Rows of every kind whose intervals are wide; a disturbance of seconds hits single rows, and may soon be over."""
    for many, own in _groups(rows).items():
        every = [(name, getattr(row, "times", {})) for name, row in own]
        timed = [(name, times[whole]) for name, times in every for whole in _WHOLE if whole in times]
        widths = [(width, name, times) for name, times in timed if (width := _width(times)) is not None]
        wide = [each for each in widths if each[0] > NOISY_INTERVAL]
        if not wide:
            continue
        # The worst row decides the advice: wild times ask for another run, wide ones for more steps.
        worst, name, times = max(wide, key=lambda each: each[0])
        said = (
            f"Unsteady times in {{rows}} of {{of}} {many}: 95 % intervals span more than {NOISY_INTERVAL:.0%} of the "
            "median. The widest is {low_ms:ms} to {high_ms:ms} around {ms:ms} ({worst}). "
        )
        said += (
            "Something else may have run; measure again before believing them."
            if worst > WILD_INTERVAL
            else "Small differences need more samples or a quieter machine."
        )
        figures: dict[str, Scalar] = {"rows": len(wide), "of": len(widths), "worst": name, "width": worst}
        figures |= {"low_ms": times.low, "ms": times.median, "high_ms": times.high}
        yield found(f"noise.unsteady-{many.rpartition(' ')[2]}", said, **figures)


def _width(times: Times) -> float | None:
    return None if times.low is None or times.high is None else (times.high - times.low) / times.median


def throttled(rows: Sequence[Row]) -> Iterator[Finding]:
    """Count the rows of every kind that a slowed GPU measured, with the reason."""
    for many, own in _groups(rows).items():
        known = [(name, reason) for name, row in own if (reason := getattr(row, "throttled_by", None)) is not None]
        slowed = [(name, reason) for name, reason in known if reason != "nothing"]
        if slowed:
            reasons = Counter(reason for _, reason in slowed)
            told = literal(listed([f"by its {reason} in {count}" for reason, count in reasons.items()]))
            said = (
                f"The GPU was slowed, right after the last step, in {{rows}} of {{of}} {many}: {told}. "
                "Their times are those of a GPU at that limit: another GPU, or a colder one, gives others."
            )
            figures: dict[str, Scalar] = {
                "rows": len(slowed),
                "of": len(known),
                "slowed": tuple(name for name, _ in slowed),
                **reasons,
            }
            yield found(f"noise.throttled-{many.rpartition(' ')[2]}", said, **figures)


def measured_again(rows: Sequence[Row]) -> list[Finding]:
    """Changes that were timed for longer than was asked for."""
    again = tuple(dict.fromkeys(row.change for row in changes(rows) if (row.attempts or 1) > 1))
    said = "Timed for longer than asked, since the first samples left a gain open: {changes:list}."
    return [found("noise.measured-again", said, changes=again)] if again else []


def drift(rows: Sequence[Row]) -> Iterator[Finding]:
    """The first or the final configuration, if it took another time at the end of the ladder than when it was tried."""
    for climb in of_steps(rows):
        if (final := climb.final) is None:
            continue
        # Steps in turns meet the same machine, so their gains outlive a drift that ruins times taken one by one.
        in_turns = final.speedup is not None and all(row.in_turns is not False for row in climb.accepted)
        said = (
            "The machine changed while it was measured: {change} took {first_ms:ms} at first and {again_ms:ms} at the "
            "end of the ladder. "
        )
        said += (
            "Gains are of interleaved steps. Times of different changes are no more certain than that."
            if in_turns
            else "Speed-ups are no more certain than that; run again on a quieter machine."
        )
        for end in ("first", "top"):
            low, high = (final.values.get(f"{end}_drift_{side}") for side in ("low", "high"))
            if low is not None and high is not None and not numeric(low) <= 1 <= numeric(high):
                names = {"first_ms": f"{end}_ms", "again_ms": f"{end}_again_ms", "ratio": f"{end}_drift", "change": end}
                yield found("noise.control", said, **{name: final.values[own] for name, own in names.items()})


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
        "the ladder's baseline": [row for row in changes(rows) if row.verdict == "baseline"],
    }
    ends = {
        name: (numeric(row.values["step_ms"]), *enclosed)
        for name, those in candidates.items()
        for row in those[:1]
        if row.values.get("step_ms") is not None and is_same_step(step, row) and (enclosed := _enclosed(row))
    }
    # Intervals that touch agree; beyond them `APART` allows what differs between parts of a command.
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
    """Bounds of the median of a step's times; None where neither an interval nor samples are known."""
    low, high, samples = row.values.get("step_low_ms"), row.values.get("step_high_ms"), row.samples.get("step")
    if low is not None and high is not None:
        return numeric(low), numeric(high)
    return (min(samples), max(samples)) if samples and len(samples) >= FEWEST else None


RULES = (unsteady, throttled, measured_again, drift, same_step_twice)
