"""The allocations of one step, or of a snapshot: the stacked timeline, who owns the peak, the largest of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainstep.base import operators
from trainstep.base.config import CASE, PHASES, settings_with
from trainstep.base.stats import RUN_SPREAD
from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Section, section, told_apart
from trainstep.report.charts.allocations import allocation_chart, layout_data, roles
from trainstep.report.columns import Cell, Column
from trainstep.report.findings import Claim, Finding, found, listed, literal
from trainstep.report.numbers import as_float, gib, number, numeric, unit_of
from trainstep.report.subjects.climbs import of_steps
from trainstep.report.subjects.steps import analysed_step, is_same_step
from trainstep.report.tables import define, make_table, outcome_table
from trainstep.rows import AllocationRow, MemoryTimelineRow, OwnerRow, StepRow
from trainstep.rows.records import Row, Scalar, belonging, of_kind

MOST = 0.5  # Owners are named, the largest first, until together they own more than this share of the peak
WORTH = 0.05  # Share of the peak from which a part of the model is worth a change that shrinks it alone
FUSED_OPTIMIZER, FUSED_ATTENTION, CHUNKED_LOSS = "the fused optimizer", "a fused attention", "a chunked loss"
_TRIED = {FUSED_OPTIMIZER: "memory.optimizer", FUSED_ATTENTION: "memory.attention", CHUNKED_LOSS: "memory.loss"}
"""Advice → what changes that try it answer, whose result then takes its place."""
UNFUSED_OPTIMIZER = (None, "adamw-foreach")  # None: a user's own, whose form is not known
UNFUSED = [name for name, each in operators.ATTENTION.items() if each.memory == "scores"]
ATTENTION = frozenset({"attention", "Softmax"})
LOSS = frozenset({"(loss)", "head", "NllLoss", "LogSoftmax"})
"""Modules of our models and autograd nodes that hold scores, or logits; activations that only the loss made."""
_NAMED = 3  # Owners of a recorded step's peak that are named

_TELLING = ("workload", *settings_with(CASE))
_SETTINGS = tuple(map(columns.files_only, (*columns.SETTINGS, *columns.named("mode", "device"))))


def owner_part(row: Row) -> str:
    """The part of an owner in words, `all` for the whole."""
    assert isinstance(row, OwnerRow)
    if row.is_total or row.line:
        return row.line or "all"
    if row.owner == "activations":
        return row.module or ("the loss" if row.phase == "loss" else "the model itself")
    made = " of ".join(filter(None, (row.operation, row.phase)))
    return f"{row.module}, {made}" if row.module else made


def _owner_cell(row: Row) -> Cell:
    part = owner_part(row)
    if part == "all":
        return Cell(str(row.case["owner"]), is_text=True)
    return Cell(f"· {part}", tone="quiet", is_text=True)


def made_in(row: Row) -> str:
    """`backward: Softmax`: the phase that made an allocation, and its operation where that is known."""
    return ": ".join(str(row.values[name]) for name in ("phase", "operation") if row.values.get(name))


TIMELINES = define(
    MemoryTimelineRow,
    "Every allocation of one step",
    *(each for each in columns.SETTINGS if each.title in _TELLING),
    *columns.named("mode", "device"),
    columns.value("at rest (GiB)", "at_rest_gib"),
    *columns.values({"peak (GiB)": "peak_gib", "by the allocator (GiB)": "allocator_gib"}, digits=4),
    columns.value("peak in", "peak_phase"),
    columns.value("no owner at the peak (%)", "unknown_share", digits=2),
    columns.value("allocations", "allocations"),
    columns.value("events", "events", brief=False),
    columns.value("snapshot", "snapshot"),
    columns.OUTCOME,
)
OWNERS = define(
    OwnerRow,
    "Who owns the peak",
    *_SETTINGS,
    columns.word("owner", "owner", page=False),
    Column("part", owner_part, page=False),
    Column("owner", _owner_cell, files=False),
    *columns.values({"MiB": "mib", "share of the peak (%)": "share", "allocations": "allocations"}),
    key=lambda row: f"{row.case['owner']}: {owner_part(row)}",
    is_strong=lambda row: owner_part(row) == "all",
)
LARGEST = define(
    AllocationRow,
    "The largest allocations of the step, and the line of code that made them",
    *_SETTINGS,
    columns.word("rank", "rank", page=False),
    *columns.values({"MiB": "mib", "times": "count"}),
    *columns.words({"owner": "owner", "module": "module"}),
    Column("made in", made_in),
    columns.value("line", "line"),
    key=lambda row: str(row.case["rank"]),
)
TABLES = (TIMELINES, OWNERS, LARGEST)


def allocations(records: Sequence[Row]) -> Section | None:
    """All memory timelines, where there are any."""
    rows, blocks = of_kind(records, MemoryTimelineRow), list[Block]()
    for place, row in enumerate(rows):
        title = told_apart(row, rows)
        if row.status != "ok":
            blocks.append(outcome_table("Not recorded", title, row))
            continue
        owners, largest = belonging(records, OwnerRow, row), belonging(records, AllocationRow, row)
        owners_of = replace(OWNERS, caption=f"Who owns the peak: {title}")
        largest_of = replace(LARGEST, caption=f"The largest allocations: {title}")
        blocks += [Charts([_chart(row, title, place)])] if row.series else []  # a file may keep the figures alone
        blocks += [
            make_table(owners_of, owners, "page", name=f"owners-{place}"),
            make_table(largest_of, largest, "page", name=f"largest-{place}"),
        ]
    lead = (
        "Every allocation, from the event that made it to the event that freed it. Drag over a part to see it closer; "
        "hover for an allocation’s size and the line of code that made it. What always stays is drawn as one at first; "
        "the slider shows more."
    )
    is_drawn = any(isinstance(block, Charts) for block in blocks)
    return section("allocations", "Allocations", "Every allocation of the step", lead if is_drawn else "", *blocks)


SECTIONS = (allocations,)


def _chart(row: MemoryTimelineRow, title: str, place: int) -> Chart:
    peak = row.peak_gib or 0
    unit, scale = unit_of(peak)
    groups = [str(name) for name in row.series["groups"]]
    order = sorted(range(len(groups)), key=lambda index: -int(str(row.series["bands"][index])))
    caption = (
        f"The dashed line is the peak: {gib(peak)}{f', in {row.peak_phase}' if row.peak_phase else ''}. The black line "
        "is the total, small allocations included."
    )
    left_out = (row.allocations or 0) - (row.drawn or 0)
    if left_out > 0:
        caption += (
            f" Of {number(row.allocations)} allocations, the {number(left_out)} below {number(row.smallest_drawn_mib)} "
            "MiB are only in sums."
        )
    swatches = roles(groups)
    plot, legend = partial(allocation_chart, row, unit, scale), [(swatches[index], groups[index]) for index in order]
    layout = layout_data(row, unit, scale)
    return Chart(f"allocations-{place}", f"Live memory: {title}", caption, plot, legend, layout)


def phase_peaks(row: Row) -> dict[str, float]:
    """Phase → its peak in GiB, of a row that has them."""
    return {name: peak for name in PHASES if (peak := as_float(row.values.get(f"{name}_peak_gib"))) is not None}


def peak_findings(records: Sequence[Row]) -> list[Finding]:
    """Findings on the peak of the analysed step's memory, what owns most of it, and what would shrink it."""
    step = analysed_step(records)
    if step is None or step.peak_gib is None or step.at_rest_gib is None:
        return []
    peaks, transient = phase_peaks(step), (step.peak_gib - step.at_rest_gib) / step.peak_gib
    phase = max(peaks, key=peaks.__getitem__)
    state = "" if step.optimizer_state_gib == 0 else ", optimizer state"
    said = (
        "Memory peaks in {phase} at {peak_gib:gib}. {at_rest_gib:gib} of that is there before the step "
        f"(weights{state} and the batch). {transient:.0%} comes and goes with it"
    )
    figures: dict[str, Scalar] = {"peak_gib": step.peak_gib, "at_rest_gib": step.at_rest_gib, "phase": phase}
    owners, parts = _owners(step, phase, records)
    remedies: Sequence[str] = ()
    if owners:
        figures |= {"owners": tuple(row.owner for row in owners)}
        names = listed(["allocations without a known owner" if row.owner == "unknown" else row.owner for row in owners])
        verb = "makes" if names in ("optimizer state", "batch") else "make"
        said += f". {names[0].upper()}{literal(names[1:])} {verb} up most of the peak"
        remedies = list(dict.fromkeys(each for row in owners for each in _remedies(row.owner, parts, step, phase)))
    elif 1 - transient > MOST:
        said += ": most of it stays"
        remedies = ("sharding", "a smaller optimizer state") if state else ("sharding",)
    else:
        said += " (activations, gradients and temporaries)"
    without = max((peak for name, peak in peaks.items() if name != phase), default=0.0)
    if phase == "optimizer" and step.optimizer in UNFUSED_OPTIMIZER and 1 - without / step.peak_gib >= WORTH:
        remedies, figures["without_gib"] = [FUSED_OPTIMIZER], without  # what is there at rest is there without it too
        said += ". The other phases peak at {without_gib:gib}"
    results = {each: _results(records, _TRIED.get(each, "nothing"), step.workload) for each in remedies}
    remedies = tuple(each for each in remedies if not results[each])
    those = listed(remedies, "or") if remedies else ""
    said += f". {those[0].upper()}{those[1:]} {'shrinks' if len(remedies) == 1 else 'shrink'} it." if remedies else "."
    proof = {change: peaks for each in results.values() for change, peaks in each.items()}
    if proof:
        told = [
            f"{change} took the peak from {gib(before)} to {gib(after)}"
            if abs(after - before) > RUN_SPREAD * before
            else f"{change} left the peak at {gib(after)}"
            for change, (before, after) in proof.items()
        ]
        said += literal(f" On the ladder, {listed(told)}.")
    figures |= {f"peak with {change}": after for change, (_, after) in proof.items()}
    claimed = f"{transient:.0%} of the memory’s peak comes and goes with the step"
    claim = Claim(claimed, ("memory",), gib=step.peak_gib - step.at_rest_gib)
    return [found("memory.peak", said, claim, **figures, remedies=remedies)]


def _results(rows: Sequence[Row], answers: str | None, workload: str | None) -> dict[str, tuple[float, float]]:
    """The peak before and after each change that answers this, or any, of its last try on ladders of this workload."""
    found = {}
    for climb in of_steps(rows):
        before: float | None = None
        for row in climb.rows:
            if row.status == "ok" and row.peak_gib is not None:
                is_meant = answers is None or answers in (row.answers or ())
                if before is not None and is_meant and row.workload in (None, workload):
                    found[row.names[0]] = before, row.peak_gib
                before = row.peak_gib if row.accepted else before
    return found


def _owners(step: StepRow, phase: str, records: Sequence[Row]) -> tuple[list[OwnerRow], list[OwnerRow]]:
    """Who owns most of the peak, the largest first, and the parts of all owners; empty without such a timeline."""
    for timeline in of_kind(records, MemoryTimelineRow):
        if timeline.status == "ok" and timeline.peak_phase == phase and is_same_step(step, timeline):
            rows = [row for row in belonging(records, OwnerRow, timeline) if row.share is not None]
            owners = sorted((row for row in rows if row.is_total), key=lambda row: numeric(row.share), reverse=True)
            sums = itertools.accumulate((numeric(row.share) for row in owners), initial=0.0)
            named = [row for row, before in zip(owners, sums, strict=False) if before <= MOST]
            return named, [row for row in rows if not row.is_total]
    return [], []


def _remedies(owner: str, parts: Sequence[OwnerRow], step: StepRow, phase: str) -> list[str]:
    """Remedies that shrink an owner, of what this step does not do already."""
    own = [row for row in parts if row.owner == owner]
    match owner:
        case "optimizer state":
            return ["sharding", "a smaller optimizer state"]
        case "parameters" | "gradients":
            return ["sharding"]
        case "batch":
            return ["a smaller batch"]
        case "temporaries" if phase == "optimizer":
            return [FUSED_OPTIMIZER] if step.optimizer in UNFUSED_OPTIMIZER else []
        case "activations" | "temporaries":
            found = []
            if step.attention in UNFUSED and _has(own, ATTENTION):
                found.append(FUSED_ATTENTION)
            if step.loss == "dense" and _has(own, LOSS):
                found.append(CHUNKED_LOSS)
            if owner == "activations" and step.checkpointing is None:
                found.append("activation checkpointing")
            return [*found, "a smaller batch"]
        case _:
            return []


def _has(parts: Sequence[OwnerRow], names: frozenset[str]) -> bool:
    """True if parts of these names own enough of the peak: the last of a module's name, or what made a temporary."""
    return sum(numeric(row.share) for row in parts if _maker(row) in names) >= WORTH


def _maker(row: OwnerRow) -> str | None:
    if row.owner == "activations":
        return row.module.rpartition(".")[2] if row.module else f"({row.phase})"
    return row.operation


def owner_findings(records: Sequence[Row]) -> list[Finding]:
    """Says who owns the peak of the first recorded step, a whole one if there is one, and the ladder's change of it."""
    recorded = [row for row in of_kind(records, MemoryTimelineRow) if row.status == "ok"]
    step = next((row for row in recorded if row.mode in (None, "step")), next(iter(recorded), None))
    if step is None or step.peak_phase is None or step.peak_gib is None:
        return []
    own = [(row, row.share) for row in belonging(records, OwnerRow, step) if row.share is not None]
    shares = {row.owner: share for row, share in [each for each in own if each[0].is_total][:_NAMED]}
    if not shares:
        return []
    said = "At its peak, {peak_gib:gib} in {phase}, memory is "
    said += literal(listed([f"{owner} {share:.0%}" for owner, share in shares.items()]))
    figures: dict[str, Scalar] = {f"share of {owner}": share for owner, share in shares.items()}
    part = next(((row, share) for row, share in own if row.owner == "activations" and not row.is_total), None)
    if part is not None:
        said += ". Activations of {part} are the most ({share of the part:.0%} of the peak)"
        figures |= {"part": owner_part(part[0]), "share of the part": part[1]}
    said += "."
    largest = next(iter(belonging(records, AllocationRow, step)), None)
    if largest is not None and largest.line and largest.mib is not None:
        times = f", {largest.count} times a step" if (largest.count or 1) > 1 else ""
        said += f" The largest allocation, {{largest_gib:gib}}{times}, is made by {{line}}"
        said += literal(f" ({made_in(largest)}).")
        figures |= {"largest_gib": largest.mib / 1024, "line": largest.line}
    proof, proven = _proof(records, step.workload)
    figures = {"peak_gib": step.peak_gib, "phase": step.peak_phase, **figures, **proven}
    owner = max(shares, key=shares.__getitem__)
    claimed = f"At the memory’s peak: {shares[owner]:.0%} {literal(owner)}"
    claim = Claim(claimed, ("allocations", "memory"), gib=shares[owner] * step.peak_gib)
    is_told = bool(peak_findings(records))  # of the same peak
    return [found("memory.owners", said + proof, None if is_told else claim, **figures)]


def _proof(records: Sequence[Row], workload: str | None) -> tuple[str, dict[str, Scalar]]:
    """The change that made the peak smaller by most, against what it was built on."""
    smaller: list[dict[str, Scalar]] = [
        {"change": change, "before_gib": before, "after_gib": after}
        for change, (before, after) in _results(records, None, workload).items()
        if before - after > RUN_SPREAD * before
    ]
    if not smaller:
        return "", {}
    best = max(smaller, key=lambda each: numeric(each["before_gib"]) - numeric(each["after_gib"]))
    return " On the ladder, {change} took the peak from {before_gib:gib} to {after_gib:gib}.", best


RULES = (peak_findings, owner_findings)
