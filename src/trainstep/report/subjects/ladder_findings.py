"""What ladders found: what the kept rungs bring, what was tried in vain, and results that take the place of advice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from trainstep.base.stats import Interval, Ratio, product
from trainstep.report import columns
from trainstep.report.blocks import Finding, found, listed, literal, told_apart
from trainstep.report.numbers import numeric
from trainstep.rows import AT_ONCE, ON_TOP, ControlRow, RungRow, ScriptRungRow
from trainstep.rows.records import Row, Scalar, of_kind

BASELINE = "baseline"  # the rung that every climb begins with
SETTINGS = ("precision", "attention", "optimizer", "compile", "loss", "fused")  # what rungs change, and flags


def climbs(rows: Sequence[Row]) -> dict[str, list[RungRow]]:
    """The rungs of each ladder, which begins with a baseline, by what tells it apart: nothing where it is alone."""
    every: list[list[RungRow]] = []
    for row in of_kind(rows, RungRow):
        if not every or row.rung == BASELINE:
            every.append([])
        every[-1].append(row)
    firsts, found = [each[0] for each in every], dict[str, list[RungRow]]()
    for place, climb in enumerate(every, start=1):
        name = told_apart(climb[0], firsts) if len(every) > 1 else ""
        found[f"{name}, ladder {place}" if name in found else name] = climb
    return found


def with_controls(climb: Sequence[RungRow], rows: Sequence[Row]) -> list[Row]:
    """A ladder's rungs, and what was written of it until the next one began."""
    own = itertools.dropwhile(lambda row: row is not climb[0], rows)
    until_next = itertools.takewhile(lambda row: not (isinstance(row, RungRow) and row.rung == BASELINE), own)
    return [*itertools.islice(own, 1), *until_next]


def base_name(row: RungRow) -> str:
    """The change that a rung tries, wherever on the ladder."""
    return row.rung.removesuffix(ON_TOP)


def base_names(row: ScriptRungRow) -> list[str]:
    """The changes that a rung of a script's ladder tries: one, or several at once."""
    return row.rung.removesuffix(ON_TOP).split(AT_ONCE)


def control_name(row: ControlRow, rows: Sequence[Row]) -> str:
    """The rung that a control measures again."""
    settings = row.case.items()
    return next((rung.rung for rung in of_kind(rows, RungRow) if rung.kept and settings <= rung.case.items()), BASELINE)


def kept_rungs(rows: Sequence[Row]) -> list[RungRow]:
    """The rungs that ladders were built on, each ladder's baseline first."""
    return [row for row in of_kind(rows, RungRow) if row.kept]


def recommended_flags(rows: Sequence[Row]) -> str:
    """The settings of the first ladder's top that differ from its baseline's, as flags to paste; or empty.

    None of a ladder whose speed-up is disputed.
    """
    climb = next(iter(climbs(rows).values()), [])
    kept = kept_rungs(climb)
    if not kept or disputing(kept, with_controls(climb, rows)):
        return ""
    start, end = climb[0].case, kept[-1].case
    return " ".join(f"--{name} {end[name]}" for name in SETTINGS if end.get(name) != start.get(name))


def disputing(kept: Sequence[RungRow], rows: Sequence[Row]) -> ControlRow | None:
    """The control, among those of one ladder, in which the top, in turns with the first rung, has another speed-up than
    the product of its gains: the intervals have nothing in common. None where they have, or that was not measured."""
    settings, ends = kept[-1].case.items(), (kept[-1].speedup_low, kept[-1].speedup_high)
    for again in of_kind(rows, ControlRow):
        known = (again.speedup_low, again.speedup_high, *ends)
        if again.case.items() <= settings and None not in known:
            low, high, claimed_low, claimed_high = map(numeric, known)
            if high < claimed_low or claimed_high < low:
                return again
    return None


def changes(kept: Sequence[RungRow]) -> list[tuple[RungRow, list[str]]]:
    """The kept rungs whose change is still there at the top, with the settings they changed.

    TF32 is not among them where bf16 came after it. A rung that changed none of `SETTINGS` counts.
    """
    top = kept[-1].case
    every = [
        (rung, [name for name in SETTINGS if rung.case.get(name) != before.case.get(name)])
        for before, rung in itertools.pairwise(kept)
    ]
    return [(rung, names) for rung, names in every if not names or any(top.get(n) == rung.case.get(n) for n in names)]


GAIN = "gain of "
"""Begins the figure of a finding that says what a ladder measured of a rung."""


def tried(rows: Sequence[Row], names: Sequence[str], workload: str | None) -> tuple[str, dict[str, Scalar]]:
    """What ladders of this workload measured of such changes, in words and as `gain of RUNG`; empty where none did.

    A ladder whose speed-up is disputed says nothing.
    """
    told, gains = [], dict[str, Scalar]()
    own = [
        row
        for climb in climbs(rows).values()
        if not ((kept := kept_rungs(climb)) and disputing(kept, with_controls(climb, rows)))
        for row in climb
        if base_name(row) in names and row.workload in (None, workload)
    ]
    for row in {base_name(row): row for row in own}.values():  # the last try of each
        if row.status != "ok":
            told.append(f"{row.rung} could not be used ({row.status})")
        elif row.verdict in ("faster", "slower") and row.gain is not None:
            factor = row.gain if row.verdict == "faster" else 1 / row.gain
            told.append(f"{row.rung} made the step {factor:.2f}× {row.verdict}")
            gains[GAIN + base_name(row)] = row.gain
        elif row.verdict == "inconclusive":
            told.append(f"{row.rung} made no difference that the samples can show")
    return literal(f" On the ladder, {listed(told)}." if told else ""), gains


def advised(
    advice: str, rows: Sequence[Row], names: Sequence[str], workload: str | None
) -> tuple[str, dict[str, Scalar]]:
    """The end of a sentence: the advice, or where ladders tried it, their result instead."""
    result, gains = tried(rows, names, workload)
    return (f".{result}", gains) if result else (advice, {})


def failed_baselines(rows: Sequence[Row]) -> list[RungRow]:
    """The first rungs of ladders that could not be climbed. One that is too large is not among them."""
    return [climb[0] for climb in climbs(rows).values() if climb[0].status not in ("ok", "out of memory")]


def baseline(rows: Sequence[Row]) -> list[Finding]:
    """That a ladder has no baseline, which is said before all else."""
    told = []
    for name, climb in climbs(rows).items():
        first, whose = climb[0], f"{literal(name)}: " if name else ""
        figures: dict[str, Scalar] = {"status": first.status, "reason": first.reason or None}
        if first.status not in ("ok", "out of memory"):
            said = "the baseline failed ({status}): {reason}. There is nothing to compare with, and no rung was tried."
            told.append(found("gain.no-baseline", (whose + said) if whose else f"T{said[1:]}", **figures))
        elif first.status != "ok" and (kept := kept_rungs(climb)):
            said = "the baseline is too large ({reason}): speed-ups are over {first}, the first that fits."
            figures = {"reason": first.reason, "first": kept[0].rung}
            told.append(found("gain.too-large", (whose + said) if whose else f"T{said[1:]}", **figures))
    return told


def gain(rows: Sequence[Row]) -> list[Finding]:
    """What the kept rungs of each ladder bring together, and what was checked of them."""
    told = []
    for name, climb in climbs(rows).items():
        if kept := kept_rungs(climb):
            whose, against = f"{literal(name)}: " if name else "", disputing(kept, with_controls(climb, rows))
            told.append(_gain(kept, whose) if against is None else _withheld(kept, against, whose))
    return told


def _withheld(kept: Sequence[RungRow], again: ControlRow, whose: str) -> Finding:
    said = (
        "No speed-up is claimed: in turns with {first} at the end, {top} was {again:.2f}× as fast "
        f"({columns.INTERVAL} {{again_low:.2f}}–{{again_high:.2f}}), and by the gains of the rungs up to it "
        "{speedup:.2f}× ({speedup_low:.2f}–{speedup_high:.2f}). The machine changed meanwhile; run again on a quieter "
        "one."
    )
    first, top = kept[0], kept[-1]
    figures: dict[str, Scalar] = {"speedup": top.speedup, "speedup_low": top.speedup_low}
    figures |= {"speedup_high": top.speedup_high, "again": again.speedup}
    figures |= {"again_low": again.speedup_low, "again_high": again.speedup_high}
    return found("gain.withheld", whose + said, first=first.rung, top=top.rung, **figures)


def _gain(kept: Sequence[RungRow], whose: str) -> Finding:
    first, last, there = kept[0], kept[-1], changes(kept)
    if first is last:
        said = "No change on the ladder made the step faster: {first} is the best found."
        if first.rung != BASELINE:
            return found("gain.none", whose + said, first=first.rung)
        said = "No change on the ladder made the step faster: the baseline is the best found."
        return found("gain.none", whose + said)
    named = tuple(row.rung for row, _ in there)
    low, high, is_one = numeric(last.speedup_low), numeric(last.speedup_high), len(named) == 1
    names = literal(listed(named))
    interval = f"({columns.INTERVAL} {{speedup_low:.2f}}–{{speedup_high:.2f}})"
    figures: dict[str, Scalar] = {"speedup": last.speedup, "speedup_low": low, "speedup_high": high}
    if low <= 1:
        called, both = "smaller", None not in (first.peak_gib, last.peak_gib)
        said = f"no difference in time that these samples can show {interval}, kept for what else "
        said += "it saves" if is_one else "they save"
        said = f": {said}" + (": peak memory {peak_before_gib:gib} → {peak_after_gib:gib}" if both else "")
    else:
        called = "faster"
        said = f" {'makes' if is_one else 'make'} the step {{speedup:.2f}}× faster {interval}"
        said += ": {before_ms:ms} → {after_ms:ms}" if times_agree(kept) else _MOVED
        if (later := after_precision(kept)) is not None:
            said += " ({after_precision:.2f}× of it after {precision_rung})"
            figures |= later
    unchecked = tuple(row.rung for row, names in there if "optimizer" in names and row.update_error is None)
    what = "loss and gradients" if last.update_error is None else "loss, gradients and updates"
    said = (
        f"{names[0].upper()}{names[1:]}{said}, with {what} within the error budget (gradients off by "
        "{gradient_error:.1g} of {error_budget:.1g} allowed)"
    )
    said += "; the updates of {unchecked:list} were not checked." if unchecked else "."
    figures |= {"gradient_error": numeric(last.gradient_error), "error_budget": numeric(last.error_budget)}
    figures |= {"before_ms": first.step_ms, "after_ms": last.step_ms}
    figures |= {"peak_before_gib": first.peak_gib, "peak_after_gib": last.peak_gib}
    return found(f"gain.{called}", whose + said, rungs=named, unchecked=unchecked, **figures)


_MOVED = (
    ", each change in turns with what was kept before it (between rungs the machine changed: the first took "
    "{before_ms:ms} when it was tried, the last {after_ms:ms})"
)


def times_agree(kept: Sequence[RungRow]) -> bool:
    """Whether the first rung's time over the last's is within the interval of the speed-up.

    Rungs are timed at different moments, and the speed-up is of pairs: where the machine changed in between, the two
    times beside it would belie it.
    """
    first, last = kept[0], kept[-1]
    if not (first.step_ms and last.step_ms):
        return True
    ratio = first.step_ms / last.step_ms
    return (last.speedup_low or 0.0) <= ratio <= (last.speedup_high or math.inf)


def after_precision(kept: Sequence[RungRow]) -> dict[str, Scalar] | None:
    """What the rungs after the last change of precision brought; None where there are none."""
    lower = next((row for row, names in reversed(changes(kept)) if "precision" in names), None)
    if lower is None or lower is kept[-1] or not (lower.step_ms and kept[-1].step_ms):
        return None
    return {"precision_rung": lower.rung, "after_precision": after(lower, kept).value}


def after(row: RungRow, kept: Sequence[RungRow]) -> Ratio:
    """The speed-up that the rungs kept after one of them brought together: the product of their gains."""
    later = itertools.islice(itertools.dropwhile(lambda each: each is not row, kept), 1, None)
    return product([_gain_of(each) for each in later])


def credited(kept: Sequence[RungRow]) -> list[tuple[RungRow, RungRow, Ratio]]:
    """Of each change that is there at the top: the rung kept before it, its own, and what it brought.

    The gain of a rung that another took the place of, as bf16 does of TF32, counts to that other.
    """
    steps = [
        (before, rung, {name for name in SETTINGS if rung.case.get(name) != before.case.get(name)})
        for before, rung in itertools.pairwise(kept)
    ]
    there = {id(rung) for rung, _ in changes(kept)}
    gone = [(rung, names) for _, rung, names in steps if id(rung) not in there]
    return [
        (before, rung, product([_gain_of(each) for each in (*(each for each, own in gone if own & names), rung)]))
        for before, rung, names in steps
        if id(rung) in there
    ]


def _gain_of(row: RungRow) -> Ratio:
    known = row.gain_low is not None and row.gain_high is not None
    return Ratio(numeric(row.gain), Interval(numeric(row.gain_low), numeric(row.gain_high)) if known else None)


def rejected(rows: Sequence[Row]) -> list[Finding]:
    """The changes that were kept nowhere, each by its last try, and why."""
    told = []
    for name, climb in climbs(rows).items():
        whose = f"{literal(name)}: " if name else ""
        for row in {base_name(row): row for row in climb if row.rung != BASELINE}.values():
            if row.status != "ok":
                why, said = row.status.replace(" ", "-"), f" ({row.status}): {{reason}}"
            elif row.verdict == "slower":
                why, said = "slower", f" makes the step {1 / numeric(row.gain):.2f}× slower here"
            elif row.verdict == "inconclusive" and not row.kept:
                why, said = "inconclusive", " makes no difference that these samples can show"
            else:
                continue
            figures = {"rung": row.rung, "gain": row.gain, "reason": row.reason or None}
            told.append(found(f"ladder.{why}", f"Not used: {whose}{{rung}}{said}.", **figures))
    return told


RULES = (baseline, gain, rejected)
