"""Where the analysed step's memory peaks, what owns most of that peak, and what would shrink it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.kinds import MemoryTimelineRow, OwnerRow
from trainstep.records import Row, belonging, of_kind
from trainstep.report.analysed import PHASE_NAMES, is_same_step
from trainstep.report.finding import Finding, in_gib, listed
from trainstep.report.numbers import numeric

MOST = 0.5
"""Owners are named, the largest first, until together they own more than this share of the peak."""
WORTH = 0.05
"""Share of the peak from which a part of the model is worth a change that shrinks it alone."""
UNFUSED = ("eager", "eager-compiled", "sdpa-math")
"""Attention that keeps its scores for backward."""
NAMELESS = "allocations without a known owner"
ATTENTION = frozenset({"attention", "Softmax"})
LOSS = frozenset({"the loss", "head", "NllLoss", "LogSoftmax"})
"""Modules of our models and autograd nodes that hold scores, or logits."""


@dataclass(frozen=True)
class Owner:
    """What an owner has of the peak, and its largest parts."""

    name: str
    share: float
    parts: dict[str, float]
    """Part → share of the peak."""


def peak_findings(step: Row | None, records: Sequence[Row]) -> list[Finding]:
    """About the analysed step alone; none where its memory was not measured."""
    if step is None or step.values.get("peak_gib") is None:
        return []
    values = step.values
    peak, rest = numeric(values["peak_gib"]), numeric(values["at_rest_gib"])
    known = [name for name in PHASE_NAMES if values.get(f"{name}_peak_gib") is not None]
    phase = max(known, key=lambda name: numeric(values[f"{name}_peak_gib"]))
    state = "" if values.get("optimizer_state_gib") == 0 else ", optimizer state"
    owners = _owners(step, phase, records)
    sentence = (
        f"Memory peaks in {phase} at {in_gib(peak)}; {in_gib(rest)} of that is there before the step "
        f"(weights{state} and the batch), {(peak - rest) / peak:.0%} comes and goes with it"
    )
    if owners:
        return [Finding("memory", f"{sentence}: {_owned(owners, step, phase)}.")]
    advice = ""
    if rest / peak > MOST:
        advice = ": most of it stays, so sharding" + (" or a smaller optimizer state shrink it" if state else " helps")
    else:
        sentence += " (activations, gradients and temporaries)"
    return [Finding("memory", f"{sentence}{advice}.")]


def _owners(step: Row, phase: str, records: Sequence[Row]) -> list[Owner]:
    """Who owns the peak, the largest first; empty where no timeline of this step was recorded or it peaks elsewhere."""
    for timeline in of_kind(records, MemoryTimelineRow):
        if timeline.status != "ok" or timeline.values.get("peak_phase") != phase or not is_same_step(step, timeline):
            continue
        parts: dict[str, dict[str, float]] = {}
        for row in belonging(records, OwnerRow, timeline):
            if row.values.get("share") is not None:
                parts.setdefault(str(row.case["owner"]), {})[str(row.case["part"])] = numeric(row.values["share"])
        owners = [
            Owner(name, own["all"], {part: share for part, share in own.items() if part != "all"})
            for name, own in parts.items()
            if "all" in own
        ]
        return sorted(owners, key=lambda owner: -owner.share)
    return []


def _owned(owners: Sequence[Owner], step: Row, phase: str) -> str:
    """The owners of most of the peak with their shares, and what shrinks them."""
    named = [owners[0]]
    for owner in owners[1:]:
        if sum(each.share for each in named) > MOST:
            break
        named.append(owner)
    remedies = list(dict.fromkeys(each for owner in named for each in _remedies(owner, step, phase)))
    names = listed([NAMELESS if owner.name == "unknown" else owner.name for owner in named])
    verb = "makes" if names in ("optimizer state", "batch") else "make"
    advice = f", so {listed(remedies, 'or')} {'shrinks' if len(remedies) == 1 else 'shrink'} it" if remedies else ""
    return f"{names} {verb} up most of the peak{advice}"


def _remedies(owner: Owner, step: Row, phase: str) -> list[str]:
    """What shrinks an owner, of what this step does not do already."""
    case = step.case
    match owner.name:
        case "optimizer state":
            return ["sharding", "a smaller optimizer state"]
        case "parameters" | "gradients":
            return ["sharding"]
        case "batch":
            return ["a smaller batch"]
        case "temporaries" if phase == "optimizer":
            return ["the fused optimizer"] if case.get("optimizer") == "adamw-foreach" else []
        case "activations" | "temporaries":
            found = []
            if case.get("attention") in UNFUSED and _has(owner, ATTENTION):
                found.append("a fused attention")
            if case.get("loss") == "dense" and _has(owner, LOSS):
                found.append("a chunked loss")
            if owner.name == "activations" and case.get("checkpointing") is None:
                found.append("activation checkpointing")
            return [*found, "a smaller batch"]
        case _:
            return []


def _has(owner: Owner, names: frozenset[str]) -> bool:
    """Whether parts of these names own enough of the peak: the last of a module's name, or what made a temporary."""
    lasts = {part: part.partition(" of ")[0].rpartition(", ")[2].rpartition(".")[2] for part in owner.parts}
    return sum(share for part, share in owner.parts.items() if lasts[part] in names) >= WORTH
