"""The findings that most is at stake in, as cards: a claim, its figure, where it is seen, and what to do.

At stake is the time, or the memory, that a finding is about. Where that is part of the step or of its peak, no mend
saves more, and its share is told; what was saved already, was predicted, or belongs to another step has a figure and no
share. Findings are made elsewhere; here stands for each rule how its finding is claimed in few words, and which of its
figures is at stake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainstep.base import advice
from trainstep.base.advice import Line
from trainstep.base.precision import PRECISIONS
from trainstep.report.blocks import Card, Cards, Finding, Section, found, in_gib, in_ms, percent
from trainstep.report.numbers import as_float
from trainstep.report.subjects.climbs import GAIN, climbs, of_steps
from trainstep.report.subjects.climbs import changes as changes_of
from trainstep.report.subjects.steps import analysed_step
from trainstep.report.subjects.uneven import as_told
from trainstep.report.tables import Table
from trainstep.rows import ChangeRow, PieceRow, ProfileRow, ScriptRow, StepRow
from trainstep.rows.records import Row, Scalar, belonging, of_kind

LEAST = 0.01  # share of the step or of the peak from which something is a card
MOST, FEWEST = 5, 3  # cards; fewer where there is less to say
MOST_OF_MEMORY = 2  # of them, where others are about time

Figures = Mapping[str, Scalar]


@dataclass(frozen=True)
class Whole:
    """What stakes are parts of, None where it was not measured."""

    step_ms: float | None
    kernels_ms: float | None
    softmax_ms: float | None
    peak_gib: float | None
    precision: str | None = None  # of the step whose kernels these are


@dataclass(frozen=True)
class Claim:
    """How one rule's finding is told as a card."""

    said: str  # a template over its figures, as those of `found`
    at_stake: Callable[[Figures, Whole], float | None] | None  # None: it comes before all else
    evidence: tuple[str, ...]  # names of tables or sections, the first that the page has
    in_gib: bool = False
    is_part: bool = True  # whether the stake is part of the step's time or of its peak
    is_mended: Callable[[Figures, Whole], bool] = lambda figures, whole: False  # whether the step has them already
    action: Line | None = None  # code, where no ladder tried a change that answers the finding
    fills: bool = False  # whether it is told only where there is little else


def _figure(name: str) -> Callable[[Figures, Whole], float | None]:
    return lambda figures, whole: as_float(figures.get(name))


def _product(share: float | None, of: float | None) -> float | None:
    return None if share is None or of is None else share * of


def _softmax(figures: Figures, whole: Whole) -> float | None:
    return whole.softmax_ms if "is_memory_bound" in figures else None  # elsewhere it is not slow


def _backward(figures: Figures, whole: Whole) -> float | None:
    """Backward's time, where it or forward is among the two longest phases."""
    second = _product(as_float(figures.get("second_share")), as_float(figures.get("total_ms")))
    known = {figures.get("first"): as_float(figures.get("first_ms")), figures.get("second"): second}
    ratio = as_float(figures.get("backward_over_forward"))
    return known["backward"] if "backward" in known else _product(ratio, known.get("forward"))


def _is_on_tensor_cores(figures: Figures, whole: Whole) -> bool:
    entry = PRECISIONS.get(whole.precision or "fp32")  # None for one that only another version knows
    return entry is None or entry.rate != "fp32"


def _is_compiled(figures: Figures, whole: Whole) -> bool:
    return bool(figures.get("is_compiled"))


def _of_kernels(figures: Figures, whole: Whole) -> float | None:
    return _product(as_float(figures.get("share")), whole.kernels_ms)


def _of_step(figures: Figures, whole: Whole) -> float | None:
    return _product(as_float(figures.get("share")), whole.step_ms)


def _exposed(figures: Figures, whole: Whole) -> float | None:
    return _product(1 - (as_float(figures.get("overlapped_share")) or 0.0), as_float(figures.get("ms")))


def _less(more: str, less: str) -> Callable[[Figures, Whole], float | None]:
    def apart(figures: Figures, whole: Whole) -> float | None:
        ends = as_float(figures.get(more)), as_float(figures.get(less))
        return None if ends[0] is None or ends[1] is None else ends[0] - ends[1]

    return apart


def _saved(figures: Figures, whole: Whole) -> float | None:
    speedup = as_float(figures.get("speedup"))
    return _product(1 - 1 / speedup, whole.step_ms) if speedup else None


def _largest_owner(figures: Figures, whole: Whole) -> float | None:
    return _product(max(_owners(figures).values(), default=None), as_float(figures.get("peak_gib")))


def _owners(figures: Figures) -> dict[str, float]:
    """Owner of memory → its share of the peak."""
    return {
        name.removeprefix("share of "): as_float(value) or 0.0
        for name, value in figures.items()
        if name.startswith("share of ") and name != "share of the part"
    }


_KERNELS = ("families", "kernels")

CLAIMS: Mapping[str, Claim] = {
    "gain.no-baseline": Claim("The baseline failed: nothing can be compared", None, ("ladder",)),
    "loss.not-finite": Claim("The loss is not finite from step {step} on", None, ("phases", "correctness", "ladder")),
    "data.bound": Claim("Steps wait for their batch", _figure("data_ms"), ("script",), action=advice.LOADER_WORKERS),
    "waits.line": Claim("The host waits for the device at {line}", _figure("ms"), ("wait", "waits")),
    "ranks.late": Claim("Rank {rank} is late", _figure("excess_ms"), ("script",)),
    "launches.bound": Claim(
        "Launches set the pace of forward, not the GPU",
        _figure("forward_issue_ms"),
        ("phases",),
        action=advice.COMPILED_BLOCKS,
        is_mended=_is_compiled,
    ),
    "launches.script": Claim(
        "Launches set the step’s pace, not the GPU",
        _figure("starved_ms"),
        ("script",),
        action=advice.COMPILED_MODEL,
    ),
    "utilisation.low": Claim(
        "Most of the step is not matrix products at full speed",
        lambda figures, whole: _product(1 - (as_float(figures.get("share")) or 0.0), whole.step_ms),
        ("ceilings", "phases"),
        fills=True,
    ),
    "utilisation.high": Claim("Matrix products set the pace", _of_step, ("ceilings", "phases")),
    "gain.faster": Claim(
        "{speedup:.2f}× faster with {changes:list}",
        _less("before_ms", "after_ms"),
        ("ladder",),
        is_part=False,
        fills=True,
    ),
    "gain.script": Claim("{speedup:.2f}× faster with {changes:list}", _saved, ("ladder",), is_part=False, fills=True),
    "phases.longest": Claim(
        "The longest phase is {first}, {first_share:.0%} of the step", _figure("first_ms"), ("phases",), fills=True
    ),
    "kernels.idle": Claim(
        "The device is idle for {idle_share:share} of the step", _figure("idle_ms"), ("phase-sums", "kernels")
    ),
    "kernels.unfused": Claim(
        "Small kernels read and write whole tensors", _of_kernels, _KERNELS, action=advice.COMPILED_BLOCKS
    ),
    "kernels.unfused-though-compiled": Claim("Small kernels are left though it is compiled", _of_kernels, _KERNELS),
    "kernels.optimizer-unfused": Claim(
        "The optimizer is not fused", _of_kernels, _KERNELS, action=advice.FUSED_OPTIMIZER
    ),
    "kernels.optimizer": Claim("The optimizer takes {share:share} of the kernel time", _of_kernels, _KERNELS),
    "kernels.softmax": Claim(
        "Softmax takes long for its arithmetic", _softmax, ("pieces",), action=advice.FUSED_ATTENTION
    ),
    "kernels.float32-products": Claim(
        "Products run in float32, off the tensor cores",
        _of_kernels,
        _KERNELS,
        action=advice.TF32,
        is_mended=_is_on_tensor_cores,
    ),
    "kernels.transfers": Claim("Kernels wait for copies between host and device", _exposed, ("profile", "kernels")),
    "kernels.communication": Claim(
        "{overlapped_share:.0%} of communication is hidden by compute", _exposed, ("profile", "kernels")
    ),
    "formulas.attention-written-out": Claim(
        "Attention is written out", _of_kernels, _KERNELS, action=advice.FUSED_ATTENTION
    ),
    "formulas.attention-not-fused": Claim("Attention runs in its math form", _of_kernels, _KERNELS),
    "formulas.cross-entropy-written-out": Claim(
        "Cross-entropy is written out",
        _of_kernels,
        _KERNELS,
        action=Line("F.cross_entropy(logits.flatten(0, 1), targets.flatten())"),
    ),
    "parallel.hidden": Claim(
        "With {least}, {least_hidden_share:.0%} of communication is hidden; with {most}, {most_hidden_share:.0%}",
        _figure("least_exposed_ms"),
        ("parallel-trace", "parallel"),
        is_part=False,
    ),
    "memory.owners": Claim("At the memory’s peak: {largest}", _largest_owner, ("allocations", "memory"), in_gib=True),
    "memory.peak": Claim(
        "{stake_share:.0%} of the memory’s peak comes and goes with the step",
        _less("peak_gib", "at_rest_gib"),
        ("memory",),
        in_gib=True,
    ),
    "memory.cache": Claim(
        "Forward fills a key-value cache",
        _figure("gib"),
        ("memory",),
        in_gib=True,
        action=Line("model.config.use_cache = False"),
    ),
    "memory.does-not-fit": Claim(
        "A {mode} does not fit", _figure("predicted_gib"), ("peak", "peaks"), in_gib=True, is_part=False
    ),
    "checkpointing.best": Claim(
        "A checkpoint every {best:list} blocks needs least",
        _less("without_gib", "peak_gib"),
        ("checkpointing",),
        in_gib=True,
        is_part=False,
    ),
    "residuals.block": Claim(
        "What one block keeps for backward", _figure("gib"), ("residuals",), in_gib=True, is_part=False, fills=True
    ),
    "plan.nothing-fits": Claim("Predicted: nothing fits", _figure("peak_gib"), ("plan",), in_gib=True, is_part=False),
    "plan.fastest": Claim(
        "Predicted: {strategy} is fastest of what fits", _figure("step_ms"), ("plan",), is_part=False
    ),
    "warm-up.needed": Claim(
        "Without warm-up the mean would be {excess:.0%} too high",
        lambda figures, whole: _product(as_float(figures.get("excess")), as_float(figures.get("step_ms"))),
        ("warmup", "warm-up"),
        is_part=False,
        fills=True,
    ),
    "kernels.top-of-step": Claim(
        "One kernel takes {share:share} of the kernel time", _figure("ms"), ("kernels",), fills=True
    ),
}
"""Rule, by its finding's id → its claim. What is not here is told among all findings alone."""


ODD_PHASES = Claim(
    "Backward takes {backward_over_forward:.1f}× forward, {expected_backward_over_forward:.2g}× expected",
    _backward,
    ("phases",),
)
"""Of the longest phases, where they do not fit together."""


def alarms(findings: Sequence[Finding], sections: Sequence[Section]) -> Cards | None:
    """What makes the rest worthless, to be told before it."""
    claimed = [(each, claim) for each in findings if (claim := CLAIMS.get(each.id)) and claim.at_stake is None]
    told = [_card(each, claim, None, None, sections) for each, claim in claimed]
    return Cards(told, is_alarm=True) if told else None


def cards(rows: Sequence[Row], findings: Sequence[Finding], sections: Sequence[Section]) -> Cards | None:
    """The largest stakes in time, then those in memory: at most `MOST`."""
    whole, there = _whole(rows), {row.names[0] for climb in of_steps(rows) for row in climb.there}
    measured = {None, *(row.workload for row in _measured(rows) if row is not None)}
    last = {name: row for climb in climbs(rows) for row in climb.rows for name in row.names}
    tried = {
        name: row for climb in climbs(rows) for row in climb.rows if row.workload in measured for name in row.names
    }
    staked, told = list[_Staked](), {each.id for each in findings}
    for each in findings:
        claim = ODD_PHASES if each.figures.get("is_odd") else CLAIMS.get(each.id)
        if each.id == "memory.owners" and "memory.peak" in told:
            continue  # the same peak
        if claim is None or claim.at_stake is None:
            continue
        stake = claim.at_stake(each.figures, whole)
        of = None if not claim.is_part else whole.peak_gib if claim.in_gib else whole.step_ms
        if stake is not None and stake > LEAST * (of or 0.0):
            action = _action(each, claim, whole, there, last, tried.values())
            card = _card(each, claim, stake, of, sections, action)
            staked.append(_Staked(stake, claim, card))
    once: dict[str, _Staked] = {}
    for one in sorted(staked, key=lambda one: (one.claim.in_gib, -one.stake)):
        once.setdefault(one.card.claim, one)
    ranked = list(once.values())
    time, memory = (
        [one for one in ranked if one.claim.in_gib is each and not one.claim.fills] for each in (False, True)
    )
    memory = memory[: MOST_OF_MEMORY if time else MOST]
    chosen = [*time[: MOST - len(memory)], *memory]
    chosen += [one for one in ranked if one.claim.fills][: max(0, FEWEST - len(chosen))]
    return Cards([one.card for one in ranked if one in chosen]) if chosen else None


@dataclass(frozen=True)
class _Staked:
    stake: float
    claim: Claim
    card: Card


def _card(
    each: Finding,
    claim: Claim,
    stake: float | None,
    whole: float | None,
    sections: Sequence[Section],
    action: str = "",
) -> Card:
    figures = dict(each.figures)
    if each.id == "memory.owners":
        shares = _owners(each.figures)
        owner = max(shares, key=shares.__getitem__)
        figures["largest"] = f"{shares[owner]:.0%} {owner}"
    figures["stake_share"] = stake / whole if stake and whole else None
    share = "" if not (stake and whole) else f"{percent(stake / whole)} of {'the peak' if claim.in_gib else 'the step'}"
    figure = "" if stake is None else in_gib(stake) if claim.in_gib else in_ms(stake)
    said = found(each.id, claim.said, **figures).sentence
    return Card(said, figure, share, each.sentence, _evidence(claim, sections), action)


def _action(
    each: Finding,
    claim: Claim,
    whole: Whole,
    there: Collection[str],
    last: Mapping[str, ChangeRow],
    tried: Iterable[ChangeRow],
) -> str:
    """The code of the change that brought most where a ladder tried some, of those that the top still has where there
    are; none where none helped, or where the step has the change already.

    Args:
        there: the changes that tops of ladders have.
        last: every change by its last try.
        tried: those on ladders of what was measured.
    """
    gains = {
        name.removeprefix(GAIN): as_float(gain) or 0 for name, gain in each.figures.items() if name.startswith(GAIN)
    }
    if gains:
        helped = [name for name, gain in gains.items() if gain > 1]
        best = max([name for name in helped if name in there] or helped or gains, key=gains.__getitem__)
        return (last[best].code or "") if gains[best] > 1 and best in last else ""
    if claim.is_mended(each.figures, whole):
        return ""
    own = [row for row in tried if each.id in (row.answers or ())]
    accepted = [row for row in own if row.accepted and row.verdict == "faster"]
    return (accepted[-1].code or "" if accepted else "") if own else claim.action.code if claim.action else ""


def _evidence(claim: Claim, sections: Sequence[Section]) -> tuple[str, str]:
    """The anchor and the words of the first that is there; the caption's first clause names a table."""
    tables = {
        block.name: (f"{section.name}-table-{place}", block.caption)
        for section in reversed(sections)
        for place, block in enumerate(section.blocks, start=1)
        if isinstance(block, Table) and block.name
    }
    titles = {section.name: (section.name, section.title) for section in sections}
    for name in claim.evidence:
        if name in tables:
            anchor, caption = tables[name]
            return anchor, caption.partition(":")[0].partition(" (")[0].partition(";")[0]
        if name in titles:
            return titles[name]
    return "", ""


def _measured(rows: Sequence[Row]) -> tuple[StepRow | None, ProfileRow | None, ScriptRow | None]:
    """The step, the profile and the script that findings are about."""
    profile = next((row for row in of_kind(rows, ProfileRow) if row.status == "ok"), None)
    script = next((row for row in of_kind(rows, ScriptRow) if row.step_ms), None)
    return analysed_step(rows), profile, script


def _whole(rows: Sequence[Row]) -> Whole:
    step, profile, seen = _measured(rows)
    script = as_told(seen) if seen is not None else None
    change = next((row for row in changes_of(rows) if row.step_ms), None)
    timed = next((row.step_ms for row in (step, profile, script, change) if row is not None and row.step_ms), None)
    pieces = belonging(rows, PieceRow, profile) if profile is not None else []
    softmax = (row.ms or 0.0 for row in pieces if row.piece == "softmax" and row.phase != "step")
    peaks = (as_float(row.values.get("peak_gib")) for row in (step, change) if row is not None)
    return Whole(
        timed,
        profile.kernels_ms if profile is not None else None,
        sum(softmax) or None,
        next((peak for peak in peaks if peak is not None), None),
        profile.precision if profile is not None else None,
    )
