"""The page's first screen: what was gained or how long a step takes and how far that can be believed, where the time
goes, what matters most, and what to write for it; then all findings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from trainstep.config import CHANGES, Change
from trainstep.kinds import ControlRow, ProfileRow, RatioRow, RungRow, ScriptRungRow, StepRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report.blocks import (
    TOPICS,
    Advice,
    Block,
    Finding,
    Flags,
    Headline,
    Line,
    Section,
    Sentences,
    listed,
    span,
    told_apart,
)
from trainstep.report.breakdown import breakdown
from trainstep.report.cards import alarms, cards
from trainstep.report.columns import Cell, ratio_cell
from trainstep.report.numbers import NONE, as_float, gib, number
from trainstep.report.subjects import run, script_ladder
from trainstep.report.subjects.ladder_findings import (
    BASELINE,
    after_precision,
    base_name,
    changes,
    climbs,
    control_name,
    disputing,
    gains_between,
    kept_rungs,
    recommended_flags,
    with_controls,
)
from trainstep.report.subjects.noise import TIMED
from trainstep.report.subjects.steps import analysed_step
from trainstep.stats import WITHIN_RUN

UNMEASURED = "not measured"


def summary(records: Sequence[Row], found: Sequence[Finding], sections: Sequence[Section]) -> Section | None:
    """What dominates, what to change, what was gained.

    Args:
        records: all rows.
        found: what the rules say of them.
        sections: the page's others, for links to the evidence.
    """
    blocks: list[Block] = [
        block
        for block in (alarms(found, sections), *_headlines(records, found), breakdown(records))
        if block is not None
    ]
    chosen = cards(records, found, sections)
    blocks += [chosen] if chosen is not None else []
    blocks += _advice(records)
    if found:
        topics: dict[str, list[str]] = {}
        for finding in found:
            topic = TOPICS[finding.topic]
            topics.setdefault(topic, []).append(finding.sentence.removeprefix(f"{topic}: "))
        blocks.append(Sentences(topics, is_folded=chosen is not None))
    return Section("summary", "Summary", "Summary", "", blocks) if blocks else None


def _headlines(records: Sequence[Row], found: Sequence[Finding]) -> list[Headline]:
    """Of every ladder; else of the step that was taken apart or profiled, of a script, of two arms; else of all."""
    told = []
    for name, climb in climbs(records).items():
        own = with_controls(climb, records)
        if kept := kept_rungs(climb):
            again = disputing(kept, own)
            told.append(_disputed(kept, again, name) if again is not None else _gain(kept, own, name, found))
    step, script = analysed_step(records), run.headline(records)
    if not told and step is not None:
        told.append(_step(step, found))
    told += [script] if script is not None else []
    if not told:
        profile = next((row for row in of_kind(records, ProfileRow) if row.status == "ok" and row.step_ms), None)
        pairs = [row for row in of_kind(records, RatioRow) if row.verdict is not None]
        if profile is not None:
            told.append(_profile(profile, records))
        elif pairs:
            told += [_pair(row) for row in pairs[:1]]
        elif (counted := _counted(records, found)) is not None:
            told.append(counted)
    return told


def _disputed(kept: Sequence[RungRow], again: ControlRow, name: str) -> Headline:
    detail = "The ladder’s top, in turns with its first rung, was not what its rungs’ gains say."
    says = "no speed-up is claimed: the machine changed meanwhile"
    in_turns, claimed = ratio_cell(again, "speedup").plain, ratio_cell(kept[-1], "speedup").plain
    confidence = f"In turns at the end {in_turns}, by the gains of the rungs {claimed}: run again on a quieter machine."
    return Headline(Cell(NONE), says, f"{name}: {detail}" if name else detail, [], confidence)


def _gain(kept: Sequence[RungRow], own: Sequence[Row], name: str, found: Sequence[Finding]) -> Headline:
    first, last = kept[0], kept[-1]
    speedup = ratio_cell(last, "speedup")
    stats = [
        ("Step", _change(first, last, "step_ms", number, "ms"), f"median, from {first.precision}"),
        ("Throughput", _change(first, last, "tokens_per_s", number, ""), "tokens/s"),
        ("Achieved", _change(first, last, "achieved_tflops", number, ""), "TFLOP/s" + _of_peak(last)),
        ("Peak memory", _change(first, last, "peak_gib", gib, "") or UNMEASURED, "of one step"),
    ]
    error, budget = last.gradient_error, last.error_budget
    if len(kept) > 1 and error is not None and budget:
        stats.append(("Gradients", number(error, 2), f"relative error, {number(budget, 2)} allowed"))
    stats = [stat for stat in stats if stat[1]]
    confidence = _of_ladder(kept, own, found)
    if len(kept) == 1:
        which = "the baseline" if first.rung == BASELINE else f"{first.rung}, the first that fits,"
        says, detail = f"per step: {which} is the fastest found", "No change on the ladder made the step faster."
        detail = f"{name}: {detail}" if name else detail
        return Headline(Cell(f"{number(first.step_ms)} ms"), says, detail, stats, confidence)
    is_faster = speedup.low is not None and (as_float(speedup.low.value) or 0) > 1
    checked = "loss and gradients" if last.update_error is None else "loss, gradients and updates"
    says = f"faster, {checked} within their budgets" if is_faster else "the baseline’s speed, in less memory"
    detail = f"{_change(first, last, 'step_ms', number, 'ms')} per step"
    if (later := after_precision(kept)) is not None:
        detail += f"; {later['after_precision']:.2f}× of it after {later['precision_rung']}"
    return Headline(speedup, says, f"{name}: {detail}" if name else detail, stats, confidence)


def _of_ladder(kept: Sequence[RungRow], own: Sequence[Row], found: Sequence[Finding]) -> str:
    """Interval, samples, control and noise of a ladder's speed-up, in one line."""
    last, parts = kept[-1], list[str]()
    turns = " taken in turns" if last.in_turns else ""
    samples = f"{number(last.n)} steps{turns}" if last.n is not None else ""
    speedup = ratio_cell(last, "speedup")
    if len(kept) > 1:
        has_interval = speedup.low is not None and speedup.low.value is not None and speedup.high is not None
        bounds = f"{speedup.low.text}–{speedup.high.text}×" if has_interval else ""  # type: ignore[union-attr]
        parts.append(f"95 % interval {WITHIN_RUN} {bounds}" if has_interval else "no interval: too few samples for one")
    parts.append(f"one process{f', {samples}' if samples else ''}")
    controls = [row for row in of_kind(own, ControlRow) if row.status == "ok" and row.ratio is not None]
    for row in controls:
        cell = ratio_cell(row, "ratio")
        is_same = row.ratio_low is None or row.ratio_high is None or row.ratio_low <= 1 <= row.ratio_high
        which = f"control: {control_name(row, own)} again at the end took {cell.plain} its first time"
        parts.append(
            which
            + (
                ", as it should"
                if is_same and row.ratio_low is not None
                else ""
                if is_same
                else ", so the machine changed"
            )
        )
        if row.speedup is not None:
            parts.append(f"in turns with the first rung {ratio_cell(row, 'speedup').plain}")
    parts += [] if controls else ["no control was measured"]
    return _sentence([*parts, *_noise(found, "rungs"), *_quiet(kept)])


def _quiet(rows: Sequence[RungRow | StepRow]) -> list[str]:
    known = [row.throttled_by for row in rows if row.throttled_by is not None]
    return ["the GPU was not slowed"] if known and set(known) == {"nothing"} else []


def _noise(found: Sequence[Finding], *many: str) -> list[str]:
    """What the rules about noise found, in few words; of these kinds of rows alone where some are named."""
    parts = []
    for each in found:
        if each.topic != "noise":
            continue
        what, _, kind = each.id.removeprefix("noise.").partition("-")
        rows, of = each.figures.get("rows"), each.figures.get("of")
        if what in ("unsteady", "throttled") and (not many or kind in many):
            words = "times are unsteady" if what == "unsteady" else "the GPU was slowed"
            parts.append(f"{words} in {rows} of {of} {kind if kind.endswith('s') else 'rows'}")
        elif each.id == "noise.same-step":
            parts.append(f"the same step was measured {number(each.figures['apart'], 2)}× apart")
    return parts


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _of_peak(row: RungRow | StepRow) -> str:
    return "" if row.utilisation is None else f", {row.utilisation:.0%} of the device’s peak"


def _change(first: Row, last: Row, name: str, text: Callable[[Scalar], str], unit: str) -> str:
    """`196 → 146 ms`, the one value where nothing changed, `196 ms → not measured`, or nothing of what is unknown."""
    values = [row.values.get(name) for row in (first, last)]
    if values == [None, None]:
        return ""
    if None in values:
        return " → ".join(UNMEASURED if value is None else f"{text(value)} {unit}".strip() for value in values)
    shown = [text(value) for value in values]
    units = {part.rpartition(" ")[2] for part in shown}
    if text is gib and len(units) == 1:
        shown, unit = [part.rpartition(" ")[0] for part in shown], units.pop()
    return f"{' → '.join(dict.fromkeys(shown))} {unit}".strip()


def _step(step: StepRow, found: Sequence[Finding]) -> Headline:
    stats = [
        ("Throughput", number(step.tokens_per_s), "tokens/s"),
        ("Achieved", number(step.achieved_tflops), "TFLOP/s" + _of_peak(step)),
        ("Peak memory", UNMEASURED if step.peak_gib is None else gib(step.peak_gib), "of one step"),
    ]
    return Headline(
        Cell(f"{number(step.step_ms)} ms", step.step_ms, "step_ms"),
        "per training step",
        f"median of {number(step.n)} steps: {span(step, 'step')}",
        [stat for stat in stats if stat[1] != NONE],
        _sentence([f"one process, {number(step.n)} steps", *_noise(found, "steps"), *_quiet([step])]),
    )


def _profile(profile: ProfileRow, records: Sequence[Row]) -> Headline:
    """The profiled step, as it was without the profiler."""
    profiles = of_kind(records, ProfileRow)
    stats = [
        ("Kernels", number(profile.kernels), "per step" if profile.has_steps is not False else "in the trace"),
        ("Device busy", f"{number(profile.busy_ms)} ms", "in a kernel or a transfer"),
    ]
    if profile.idle_share is not None:
        stats.append(("Device idle", f"{profile.idle_share:.0%}", "without the profiler"))
    if profile.matmul_share_step is not None:
        stats.append(("Matrix products", f"{profile.matmul_share_step:.0%}", "of the kernel time"))
    told = f"{told_apart(profile, profiles)}: " if len(profiles) > 1 else ""
    cost = "" if profile.profiler_cost is None else f"; the profiler cost {profile.profiler_cost:.0%} of it"
    steps = f"median of {number(profile.n)} steps without the profiler, {span(profile, 'step')}"
    return Headline(
        Cell(f"{number(profile.step_ms)} ms", profile.step_ms, "step_ms"),
        "per training step",
        told + steps,
        stats,
        _sentence([f"one process, {number(profile.profiled_n)} steps under the profiler{cost}"]),
    )


def _pair(row: RatioRow) -> Headline:
    """One arm against the other."""
    speedup = ratio_cell(row, "speedup")
    old, new = (each if row.flag == "nothing" else f"--{row.flag} {each}" for each in (row.old, row.new))
    says = f"as fast: {new} against {old}" if row.verdict != "inconclusive" else f"no difference found: {new}, {old}"
    stats = [("Step", f"{number(row.old_ms)} → {number(row.new_ms)} ms", "medians of the runs’ medians")]
    bounds = (
        f"95 % interval between runs {speedup.low.text}–{speedup.high.text}×" if speedup.low and speedup.high else ""
    )
    return Headline(speedup, says, "", stats, _sentence([bounds, f"{number(row.runs)} processes each"]))


def _counted(records: Sequence[Row], found: Sequence[Finding]) -> Headline | None:
    """How much was measured, of rows that have no one step; of the kind that most rows are of."""
    counts = Counter(type(row) for row in records if type(row) in TIMED)
    if not counts:
        return None
    kind, count = counts.most_common(1)[0]
    own = [row for row in records if type(row) is kind]
    failed = Counter(row.status for row in own if row.status != "ok")
    outcomes = [f"{number(times)} {status}" for status, times in failed.items()]
    detail = f"{number(count - failed.total())} ran{f', {listed(outcomes)}' if outcomes else ''}"
    stats = [(TIMED[each].capitalize(), number(times), "") for each, times in counts.items() if each is not kind]
    return Headline(Cell(number(count)), f"{TIMED[kind]} measured", detail, stats, _sentence(_noise(found)))


def _advice(records: Sequence[Row]) -> list[Block]:
    """Lines for the user's own script, with what each was measured to bring, and flags for trainstep's commands."""
    blocks: list[Block] = []
    for place, (name, climb) in enumerate(climbs(records).items()):
        own, suffix = with_controls(climb, records), f"-{place}" if place else ""
        whose, kept = f" ({name})" if name else "", kept_rungs(climb)
        if len(kept) > 1 and disputing(kept, own) is None and (lines := _lines(kept)):
            note = f"Each gain is over the lines above it, {WITHIN_RUN}, with its 95 % interval."
            blocks.append(Advice(f"What to write in your own script{whose}", note, lines, f"lines{suffix}"))
        if flags := recommended_flags(own):
            says = f"The same as flags of trainstep’s commands{whose}"
            blocks.append(Flags(re.split(r" (?=--)", flags), says, f"flags{suffix}"))
    climbed = script_ladder.rungs(records)
    kept_here = [row for row in climbed if row.kept and row.verdict != "baseline"]
    if kept_here and climbed[0].status == "ok":
        own_lines = [_script_line(row) for row in kept_here]
        note = "Each gain is over the lines above it, between runs, with its 95 % interval."
        blocks.append(Advice("What to write in the script", note, own_lines, "script-lines"))
    return blocks


def _lines(kept: Sequence[RungRow]) -> list[Line]:
    """One line per kept rung whose change is still there at the top; a rung that it took the place of counts to it."""
    lines, before = [], kept[0]
    for row, _ in changes(kept):
        ratio = gains_between(before, row, kept)
        bounds = (ratio.interval.low, ratio.interval.high) if ratio.interval else None
        low, high = (Cell(f"{end:.2f}", end) for end in bounds) if bounds else (None, None)
        saves = _change(before, row, "peak_gib", gib, "")
        is_certain = bounds is not None and bounds[0] > 1
        note = f"peak {saves}" if not is_certain and "→" in saves else ""
        change = CHANGES.get(base_name(row)) or Change(row.rung, "a change of the ladder’s own")
        gain = Cell(f"{ratio.value:.2f}×", ratio.value, "gain", low, high, note=note)
        lines.append(Line(row.rung, change.code, change.where, gain))
        before = row
    return lines


def _script_line(row: ScriptRungRow) -> Line:
    change = CHANGES.get(row.rung) or Change(row.lines or row.rung, "")
    return Line(row.rung, change.code, change.where, ratio_cell(row, "gain"))
