"""What figures of memory and precision say, in sentences; each remedy is followed by the rung that tried it, if any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainstep.kinds import (
    AccumulationRow,
    AllocationRow,
    CheckpointingRow,
    DtypeRow,
    MemoryTimelineRow,
    OwnerRow,
    PeakRow,
    ResidualRow,
    RungRow,
)
from trainstep.records import Row, belonging, by_case, of_kind
from trainstep.report.finding import Finding, in_gib, listed
from trainstep.report.numbers import numeric
from trainstep.stats import RUN_SPREAD, ratio_of_medians

AGREES = 0.05
"""A prediction of the peak that is off by more than this share is remarked on."""
_OWNERS = 3
"""Owners of the peak that are named."""


def memory_findings(records: Sequence[Row]) -> list[Finding]:
    """The findings about memory, checkpointing and precision."""
    return [
        *_owners(records),
        *_residuals(records),
        *_predictions(records),
        *_does_not_fit(records),
        *_checkpointing(records),
        *_dtypes(records),
        *_accumulation(records),
    ]


def _owners(records: Sequence[Row]) -> list[Finding]:
    """Who owns the peak of the first recorded step, and what of it can be had back."""
    step = next((row for row in of_kind(records, MemoryTimelineRow) if row.status == "ok"), None)
    if step is None or step.values.get("peak_phase") is None:
        return []
    own = belonging(records, OwnerRow, step)
    owners = [row for row in own if row.case["part"] == "all"]
    if not owners:
        return []
    shares = listed([f"{row.case['owner']} {numeric(row.values['share']):.0%}" for row in owners[:_OWNERS]])
    sentence = (
        f"At its peak, {in_gib(numeric(step.values['peak_gib']))} in {step.values['peak_phase']}, memory is {shares}"
    )
    parts = [row for row in own if row.case["owner"] == "activations" and row.case["part"] != "all"]
    if parts:
        part, share = parts[0].case["part"], numeric(parts[0].values["share"])
        sentence += f"; of the activations, those of {part} are the most ({share:.0%} of the peak)"
    sentence += "."
    largest = next(iter(belonging(records, AllocationRow, step)), None)
    if largest is not None and largest.values.get("line"):
        count = numeric(largest.values["count"])
        times = f", {count:.0f} times a step" if count > 1 else ""
        sentence += (
            f" The largest allocation, {in_gib(numeric(largest.values['mib']) / 1024)}{times}, is made by "
            f"{largest.values['line']} ({largest.values['made_in']})."
        )
    return [Finding("memory", sentence + _proof(records))]


def _proof(records: Sequence[Row]) -> str:
    """The rung of the ladder that made the peak smaller by most, against the rung it was built on, in words."""
    base: Row | None = None
    best: tuple[str, float, float] | None = None
    for row in of_kind(records, RungRow):
        if row.status != "ok" or row.values.get("peak_gib") is None:
            continue
        if base is not None:
            before, after = numeric(base.values["peak_gib"]), numeric(row.values["peak_gib"])
            if before - after > max(RUN_SPREAD * before, best[1] - best[2] if best else 0):
                best = (str(row.case["rung"]), before, after)
        base = row if row.values.get("kept") else base
    if best is None:
        return ""
    return f" On the ladder, {best[0]} took the peak from {in_gib(best[1])} to {in_gib(best[2])}."


def _residuals(records: Sequence[Row]) -> list[Finding]:
    """What one block keeps, and what compilation leaves of it and of the whole step; case by case."""
    rows = [row for row in of_kind(records, ResidualRow) if row.status == "ok"]
    found, cases = [], by_case(rows, "part", "what", "compile")
    for own in cases:
        for sentence in _kept(own):
            under = f"Under {own[0].case.get('precision')}, {sentence}" if len(cases) > 1 else sentence
            found.append(Finding("kept for backward", under[0].upper() + under[1:]))
    return found


def _kept(rows: Sequence[Row]) -> list[str]:
    found = []
    blocks = [row for row in rows if row.case["part"] == "first block"]
    alone = {row.case["compile"]: row for row in blocks if row.case["what"] == "all"}
    first = next(
        (row for row in blocks if row.case["compile"] == "off" and str(row.case["what"]).startswith("1. ")), None
    )
    if "off" in alone and first is not None:
        where = str(first.case["what"]).removeprefix("1. ")
        found.append(
            f"forward keeps {in_gib(numeric(alone['off'].values['mib']) / 1024)} for the backward of one block; the "
            f"largest part, {numeric(first.values['share']):.0%}, is kept for {first.values['operation']} in {where} "
            f"({first.values['tensor']})."
        )
    if "off" in alone and "blocks" in alone:
        eager, compiled = (numeric(alone[name].values["mib"]) / 1024 for name in ("off", "blocks"))
        found.append(f"compiled, one block keeps {in_gib(compiled)} instead of {in_gib(eager)}.")
    wholes = {row.case["compile"]: row for row in rows if row.case["part"] == "step" and row.case["what"] == "all"}
    if "off" in wholes and "model" in wholes:
        eager, compiled = (numeric(wholes[name].values["mib"]) / 1024 for name in ("off", "model"))
        found.append(
            f"of the whole step, eager code keeps {in_gib(eager)} and compiled code {in_gib(compiled)} "
            f"({compiled / eager - 1:+.0%})."
        )
    return found


def _predictions(records: Sequence[Row]) -> list[Finding]:
    """How far the plan's peaks are from the measured ones."""
    rows = [*of_kind(records, PeakRow), *of_kind(records, CheckpointingRow)]
    errors = [(abs(numeric(error)), row) for row in rows if (error := row.values.get("prediction_error")) is not None]
    if not errors:
        return []
    worst, row = max(errors, key=lambda each: each[0])
    count = f"{len(errors)} measured peaks" if len(errors) > 1 else "the measured peak"
    if worst <= AGREES:
        return [Finding("memory", f"The plan predicts {count} to within {max(worst, 1e-4):.2%}.")]
    over = sum(error > AGREES for error, _ in errors)
    at = ", ".join(
        f"{name} {row.case[name]}" for name in ("context", "precision", "checkpointing") if row.case.get(name)
    )
    return [
        Finding(
            "memory",
            f"The plan is off by more than {AGREES:.0%} for {over} of {len(errors)} measured peaks, at worst by "
            f"{worst:.1%} ({at}); for small models the CUDA libraries' own workspaces, which it leaves out, are that "
            "large.",
        )
    ]


def _does_not_fit(records: Sequence[Row]) -> list[Finding]:
    """Cases of the grid that ran out of memory, with what they would have needed."""
    found = []
    for row in of_kind(records, PeakRow):
        if row.status == "out of memory":
            case = ", ".join(f"{name} {row.case[name]}" for name in ("context", "precision") if row.case.get(name))
            needed = row.values.get("predicted_gib")
            why = f": it needs {in_gib(numeric(needed))} by prediction" if needed is not None else ""
            found.append(Finding("memory", f"Does not fit: a {row.case['mode']} at {case}{why}."))
    return found


def _checkpointing(records: Sequence[Row]) -> list[Finding]:
    cases = by_case(of_kind(records, CheckpointingRow), "checkpointing")
    found = []
    for own in cases:
        told = ", ".join(f"{own[0].case[name]}" for name in ("precision", "attention") if own[0].case.get(name))
        for sentence in _best_policy(own):
            found.append(Finding("checkpointing", f"{told}: {sentence}" if len(cases) > 1 else sentence))
    return found


def _best_policy(study: Sequence[Row]) -> list[str]:
    """The best K for the memory given: none if that fits, else the smallest peak, as every K costs the same."""
    rows = {str(row.case["checkpointing"]): row for row in study}
    peaks = {name: numeric(row.values["peak_gib"]) for name, row in rows.items() if row.values.get("peak_gib")}
    sizes = sorted(int(name.removeprefix("every-")) for name in peaks if name.startswith("every-"))
    if not sizes:
        return []
    limit = next(iter(rows.values())).values.get("memory_gib")
    peak = min(peaks[f"every-{size}"] for size in sizes)
    best = [size for size in sizes if in_gib(peaks[f"every-{size}"]) == in_gib(peak)]  # alike, as they are printed
    which = listed([str(size) for size in best], "or")
    nearest = [*[size for size in sizes if size < best[0]][-1:], *[size for size in sizes if size > best[-1]][:1]]
    beside = listed([f"every-{size} {in_gib(peaks[f'every-{size}'])}" for size in nearest]) if nearest else ""
    beside = f" (beside it {beside})" if beside else ""
    cost = _time_against_none(rows, best[0])
    if "none" in peaks and (peaks["none"] <= peak or in_gib(peaks["none"]) == in_gib(peak)):
        return [
            f"No checkpoint every K blocks makes the peak smaller: {in_gib(peaks['none'])} without, {in_gib(peak)} "
            f"at best."
        ]
    if "none" in peaks and limit is not None and peaks["none"] <= numeric(limit):
        room = f"{in_gib(peaks['none'])} of {in_gib(numeric(limit))}"
        return [
            f"No checkpointing is needed: the step fits without ({room}). For a larger batch or context "
            f"the best K is {which}: {in_gib(peak)}{beside}.{cost}",
        ]
    if limit is not None and peak > numeric(limit):
        sentence = (
            f"No policy of every K blocks fits into {in_gib(numeric(limit))}: the smallest peak is {in_gib(peak)}"
        )
    else:
        every = f"{which} blocks" if best != [1] else "block"
        alike = " alike" if len(best) > 1 else ""
        sentence = f"The best K is {which}: a checkpoint every {every} peaks at {in_gib(peak)}{alike}"
    against = f"; without checkpointing {in_gib(peaks['none'])}" if "none" in peaks else ""
    return [f"{sentence}{beside}{against}.{cost}"]


def _time_against_none(rows: Mapping[str, Row], size: int) -> str:
    """What a checkpoint every `size` blocks costs in time; nothing without the samples that an interval needs."""
    policy = f"every-{size}"
    if any(name not in rows or not rows[name].samples.get("step") for name in ("none", policy)):
        return ""
    ratio = ratio_of_medians(rows[policy].samples["step"], rows["none"].samples["step"])
    if ratio.interval is None:
        return " Too few steps were timed to say what that costs in time."
    interval = f"(95 % interval {ratio.interval.low:.2f}–{ratio.interval.high:.2f})"
    every = "every block" if size == 1 else f"every {size} blocks"
    if 1 in ratio.interval:
        return f" With a checkpoint {every} these samples show no difference in time {interval}."
    return f" With a checkpoint {every} a step takes {ratio.value:.2f}× the time without {interval}."


def _dtypes(records: Sequence[Row]) -> list[Finding]:
    """Logits, loss, parameters and gradients under each precision."""
    found = []
    rows = [row for row in of_kind(records, DtypeRow) if row.status == "ok"]
    for precision in dict.fromkeys(row.case["precision"] for row in rows):
        own = {str(row.case["module"]): row.values for row in rows if row.case["precision"] == precision}
        result, loss = (own.get(name, {}).get("outputs") for name in ("(forward's result)", "(loss)"))
        weights, gradients = (
            listed(sorted({str(values[name]) for values in own.values() if values.get(name)}) or ["none"])
            for name in ("parameters", "gradients")
        )
        found.append(
            Finding(
                "precision",
                f"Under {precision}, forward's result is {result} and the loss {loss}; parameters are {weights}, their "
                f"gradients {gradients}.",
            )
        )
    return found


def _accumulation(records: Sequence[Row]) -> list[Finding]:
    rows = {(row.case["accumulator"], row.case["addend"]): row for row in of_kind(records, AccumulationRow)}
    half, full = rows.get(("fp16", "fp16")), rows.get(("fp32", "fp16"))
    if half is None or full is None:
        return []
    return [
        Finding(
            "precision",
            f"0.01 added a thousand times is {numeric(half.values['total']):.4f} in fp16, and "
            f"{numeric(full.values['total']):.4f} if only the running sum is fp32: sums need the wide type, "
            "addends less.",
        )
    ]
