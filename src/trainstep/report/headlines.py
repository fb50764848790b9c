"""The page's headlines: what was gained or how long something takes, and how far that can be believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from trainstep.base.stats import WITHIN_RUN
from trainstep.report.blocks import Headline, span, told_apart
from trainstep.report.columns import Cell, ratio_cell
from trainstep.report.findings import Finding, listed
from trainstep.report.numbers import NONE, as_float, gib, in_ms, number, numeric
from trainstep.report.subjects import run, training
from trainstep.report.subjects.climbs import Climb, after_precision, of_script, of_steps, times_agree
from trainstep.report.subjects.noise import NOISY_INTERVAL, TIMED, same_step_twice, throttled, unsteady
from trainstep.report.subjects.parallel import label_among
from trainstep.report.subjects.steps import analysed_step
from trainstep.rows import (
    BASELINE,
    AttentionRow,
    ChangeRow,
    ParallelRow,
    PeakRow,
    ProfileRow,
    RatioRow,
    ScriptRow,
    StepRow,
)
from trainstep.rows.records import Row, Scalar, Times, of_kind
from trainstep.rows.row import Timed

TimedRow = TypeVar("TimedRow", bound=Timed)

UNMEASURED = "not measured"


def headlines(records: Sequence[Row], found: Sequence[Finding]) -> list[Headline]:
    """Headlines of every ladder; else of the step that was taken apart or profiled, of a script, of two arms; else of
    all."""
    told = []
    for climb in of_steps(records):
        if climb.accepted:
            told.append(_disputed(climb) if climb.is_disputed else _gain(climb, _noise_of(climb, records)))
    step, script = analysed_step(records), _script(records)
    if not told and step is not None:
        told.append(_step(step, found))
    told += [each for each in (_script_gain(records), script) if each is not None][:1]
    if not told:
        profile = next((row for row in of_kind(records, ProfileRow) if row.status == "ok" and row.step_ms), None)
        pairs = [row for row in of_kind(records, RatioRow) if row.verdict is not None]
        if profile is not None:
            told.append(_profile(profile, records))
        elif pairs:
            told += [_pair(row) for row in pairs[:1]]
        else:
            others = (training.headline(records), _fastest(records, found), _peak(records), _counted(records, found))
            told += [each for each in others if each is not None][:1]
    return told


def _disputed(climb: Climb) -> Headline:
    assert climb.final is not None, "which disputes it"
    detail = "The final configuration, in turns with the first, was not what the gains say."
    says = "no speed-up is claimed: the machine changed meanwhile"
    in_turns, claimed = ratio_cell(climb.final, "speedup").plain, ratio_cell(climb.accepted[-1], "speedup").plain
    confidence = f"In turns at the end {in_turns}, by the gains {claimed}: run again on a quieter machine."
    return Headline(Cell(NONE), says, _named(climb, detail), [], confidence)


def _named(climb: Climb, detail: str) -> str:
    return f"{climb.name}: {detail}" if climb.name else detail


def _gain(climb: Climb, found: Sequence[Finding]) -> Headline:
    accepted = climb.accepted
    first, last = accepted[0], accepted[-1]
    speedup = ratio_cell(last, "speedup")
    apart = "" if times_agree(climb) else "; the machine changed between them"
    stats = [
        ("Step", change_of(first, last, "step_ms", number, "ms"), f"median, from {first.precision}{apart}"),
        ("Throughput", change_of(first, last, "tokens_per_s", number, ""), "tokens/s"),
        ("Achieved", change_of(first, last, "achieved_tflops", number, ""), "TFLOP/s" + _of_peak(last)),
        ("Peak memory", change_of(first, last, "peak_gib", gib, "") or UNMEASURED, "of one step"),
    ]
    error, budget = last.gradient_error, last.error_budget
    if len(accepted) > 1 and error is not None and budget:
        stats.append(("Gradients", number(error, 2), f"relative error, {number(budget, 2)} allowed"))
    stats = [stat for stat in stats if stat[1]]
    confidence = _of_ladder(climb, found)
    if len(accepted) == 1:
        which = "the baseline" if first.change == BASELINE else f"{first.change}, the first that fits,"
        says, detail = f"per step of {which}", "No change was accepted."
        return Headline(Cell(f"{number(first.step_ms)} ms"), says, _named(climb, detail), stats, confidence)
    is_faster = speedup.low is not None and (as_float(speedup.low.value) or 0) > 1
    checked = "loss and gradients" if last.update_error is None else "loss, gradients and updates"
    says = f"faster, {checked} within their budgets" if is_faster else "the baseline’s speed, in less memory"
    detail = f"{change_of(first, last, 'step_ms', number, 'ms')} per step{apart}"
    if (later := after_precision(climb)) is not None:
        detail += f"; {later['after_precision']:.2f}× of it after {later['precision_change']}"
    return Headline(speedup, says, _named(climb, detail), stats, confidence)


def _of_ladder(climb: Climb, found: Sequence[Finding]) -> str:
    """Interval, samples, drift and noise of a ladder's speed-up, in one line."""
    last, final, parts = climb.accepted[-1], climb.final, list[str]()
    turns = ", interleaved" if last.in_turns else ""
    samples = f"{number(last.n)} steps{turns}" if last.n is not None else ""
    speedup = ratio_cell(last, "speedup")
    if len(climb.accepted) > 1:
        parts.append(_interval(speedup, WITHIN_RUN) or "no interval: too few samples for one")
    parts.append(f"one process{f', {samples}' if samples else ''}")
    drifts = [end for end in ("first", "top") if final is not None and f"{end}_drift" in final.values]
    for end in drifts:
        assert final is not None
        cell = ratio_cell(final, f"{end}_drift")
        which = f"drift check: {final.values[end]} again at the end took {cell.plain} its first time"
        if cell.low is not None and cell.high is not None:
            is_steady = numeric(cell.low.value) <= 1 <= numeric(cell.high.value)
            which += ", as it should" if is_steady else ", so the machine changed"
        parts.append(which)
    if final is not None and final.speedup is not None:
        parts.append(f"first and last interleaved at the end: {ratio_cell(final, 'speedup').plain}")
    parts += [] if drifts else ["no drift was checked"]
    return _sentence([*parts, *_noise(found, "changes"), *_quiet(climb.rows)])


def _quiet(rows: Sequence[ChangeRow | StepRow]) -> list[str]:
    """Say that the GPU was not slowed, where each of the rows that were measured says so."""
    limits = {row.throttled_by for row in rows if row.status == "ok"}
    return ["the GPU was not slowed"] if limits == {"nothing"} else []


def _noise_of(climb: Climb, records: Sequence[Row]) -> list[Finding]:
    """Findings of the rules about noise without the changes of other ladders."""
    own = {id(row) for row in climb.rows}
    rows = [row for row in records if not isinstance(row, ChangeRow) or id(row) in own]
    return [*unsteady(rows), *throttled(rows), *same_step_twice(rows)]


def _noise(found: Sequence[Finding], *many: str) -> list[str]:
    """Findings of the rules about noise, in few words; of these kinds of rows alone where some are named."""
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


def _of_peak(row: ChangeRow | StepRow) -> str:
    return "" if row.utilisation is None else f", {row.utilisation:.0%} of the device’s peak"


def change_of(first: Row, last: Row, name: str, text: Callable[[Scalar], str], unit: str) -> str:
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
    stats = [stat for stat in stats if stat[1] != NONE]
    confidence = _sentence([", ".join(["one process", *_steps(step.n)]), *_noise(found, "steps"), *_quiet([step])])
    return Headline(_per_step(step), "per training step", f"{_median(step.n)}: {span(step, 'step')}", stats, confidence)


def _per_step(row: StepRow | ProfileRow) -> Cell:
    return Cell(f"{number(row.step_ms)} ms", row.step_ms, "step_ms")


def _profile(profile: ProfileRow, records: Sequence[Row]) -> Headline:
    """The profiled step, as it was without the profiler."""
    profiles = of_kind(records, ProfileRow)
    known: list[tuple[str, float | None, Callable[[Any], str], str]] = [
        ("Kernels", profile.kernels, number, "in the trace" if profile.has_steps is False else "per step"),
        ("Device busy", profile.busy_ms, in_ms, "in a kernel or a transfer"),
        ("Device idle", profile.idle_share, "{:.0%}".format, "without the profiler"),
        ("Matmuls", profile.matmul_share_step, "{:.0%}".format, "of the kernel time"),
    ]
    stats = [(name, text(value), note) for name, value, text, note in known if value is not None]
    told = f"{told_apart(profile, profiles)}: " if len(profiles) > 1 else ""
    profiled = [] if profile.profiled_n is None else [f"{number(profile.profiled_n)} steps under the profiler"]
    cost = [] if profile.profiler_cost is None else [f"the profiler cost {profile.profiler_cost:.0%} of the step"]
    steps = f"{told}{_median(profile.n)} without the profiler, {span(profile, 'step')}"
    confidence = _sentence([", ".join(["one process", *profiled]), *cost])
    return Headline(_per_step(profile), "per training step", steps, stats, confidence)


def _steps(n: int | None) -> list[str]:
    return [] if n is None else [f"{number(n)} steps"]


def _median(n: int | None) -> str:
    return " of ".join(["median", *_steps(n)])


def _script(records: Sequence[Row]) -> Headline | None:
    """The step of a script, or of the first of its optimizers, and how far its median can be believed."""
    row = next(iter(run.first_rank(records)), None)
    if row is None:
        return None
    told = run.as_told(row)
    shares = {name: run.share_of(row, name) for name in run.PHASES if name in row.times}
    stats = [
        (run.PHASES[name].capitalize(), f"{number(told.times[name].median)} ms", f"{shares[name]:.0%} of the step")
        for name in sorted(shares, key=lambda name: -shares[name])[:4]
    ]
    whose = f"per step of {row.updates}" if row.updates else "per step"
    trend = run.slowing(row)
    of_step = f"{number(trend.first)} → {number(trend.last)} ms" if trend else span(row, "step")
    detail = f"median of {number(row.n)} steps: {of_step}"
    detail = detail if told is row else f"mean of {number(row.n)} steps; {detail}"
    figure = Cell(f"{number(told.step_ms)} ms", told.step_ms, "step_ms" if told is row else "step_mean_ms")
    return Headline(figure, whose, detail, stats, _of_script(row))


def _of_script(row: ScriptRow) -> str:
    processes = "one process" if (row.world_size or 1) == 1 else f"one of {number(row.world_size)} processes"
    left = [f"the first {number(row.left_out)} left out"] if row.left_out else []
    step = row.times["step"]
    is_wide = step.low is not None and step.high is not None and step.high - step.low > NOISY_INTERVAL * step.median
    how = ["steps slow down"] if run.slowing(row) else ["times are unsteady"] if is_wide else []
    return _sentence([", ".join([processes, *_steps(row.n), *left]), *how])


def _script_gain(records: Sequence[Row]) -> Headline | None:
    """Gain of a script's ladder in all, where that is certain; None otherwise."""
    climb = of_script(records)
    top = climb.top if climb is not None else None
    if climb is None or top is None or top.speedup_low is None or top.speedup_low <= 1:
        return None
    speedup, first = ratio_cell(top, "speedup"), climb.first
    stats = [
        ("Step", change_of(first, top, "step_ms", number, "ms"), "median of the runs"),
        ("Peak memory", change_of(first, top, "peak_gib", gib, "") or UNMEASURED, "of one step"),
    ]
    says = "faster, gradients, losses and weights within their budgets"
    detail = f"{change_of(first, top, 'step_ms', number, 'ms')} per step of {top.workload}"
    runs = [f"{number(top.runs)} processes"] if top.runs is not None else []
    confidence = _sentence([_interval(speedup, "between runs"), *runs])
    return Headline(speedup, says, detail, [stat for stat in stats if stat[1]], confidence)


def _interval(speedup: Cell, where: str) -> str:
    low, high = speedup.low, speedup.high
    return f"95 % interval {where} {low.text}–{high.text}×" if low is not None and high is not None else ""


def _pair(row: RatioRow) -> Headline:
    """Headline of one arm against the other."""
    speedup = ratio_cell(row, "speedup")
    old, new = (each if row.flag == "nothing" else f"--{row.flag} {each}" for each in (row.old, row.new))
    says = f"as fast: {new} against {old}" if row.verdict != "inconclusive" else f"no difference found: {new}, {old}"
    is_timed = row.old_ms is not None and row.new_ms is not None
    step = ("Step", f"{number(row.old_ms)} → {number(row.new_ms)} ms", "medians of the runs’ medians")
    runs = [] if row.runs is None else [f"{number(row.runs)} processes each"]
    parts = [part for part in (_interval(speedup, "between runs"), *runs) if part]
    return Headline(speedup, says, "", [step] if is_timed else [], _sentence(parts))


def _fastest(records: Sequence[Row], found: Sequence[Finding]) -> Headline | None:
    """The fastest implementation of attention in the largest case, or the fastest scheme on the most ranks, by their
    medians; and those that come next."""
    if timed := [row for row in of_kind(records, AttentionRow) if row.status == "ok" and "both" in row.times]:
        words = "forward and backward with {}, the fastest median of {} implementations"
        return _first_of(timed, lambda row: row.impl, ("impl",), "both", _attention_size, words, found)
    schemes = [row for row in of_kind(records, ParallelRow) if row.status == "ok" and row.scheme != "single"]
    if timed_schemes := [row for row in schemes if row.step_ms]:
        words = "per step with {} on {world_size} ranks, the fastest median of {} schemes"
        several = len({row.compile for row in timed_schemes}) > 1  # else what all have is told of the case
        names = ("scheme", "replicas", "blocks_per_group", *(["compile"] if several else []))
        label = partial(label_among, rows=timed_schemes)
        return _first_of(timed_schemes, label, names, "step", lambda row: row.world_size, words, found)
    return None


def _attention_size(row: AttentionRow) -> int:
    return row.seq**2 * row.batch * row.head_dim


def _first_of(
    rows: Sequence[TimedRow],
    label: Callable[[TimedRow], str],
    names: Sequence[str],
    time: str,
    size: Callable[[TimedRow], int],
    words: str,
    found: Sequence[Finding],
) -> Headline | None:
    cases: dict[tuple[tuple[str, Scalar], ...], dict[str, TimedRow]] = {}
    for row in (row for row in rows if row.times[time].median > 0):
        case = tuple((key, value) for key, value in row.case.items() if key not in names)
        cases.setdefault(case, {})[label(row)] = row
    compared = [each for each in cases.items() if len(each[1]) > 1]
    if not compared:
        return None
    case, own = max(compared, key=lambda each: (size(next(iter(each[1].values()))), len(each[1])))
    order = sorted(own, key=lambda each: own[each].times[time].median)
    first = own[order[0]]
    best = first.times[time]
    others = [(name, own[name].times[time]) for name in order[1:6]]
    stats = [(name, f"{number(other.median)} ms", _beside(best, other)) for name, other in others]
    samples = [] if first.n is None else [f"{number(first.n)} samples in one run"]
    told = ", ".join(f"{key} {value}" for key, value in case if key not in ("seed", "workload"))
    figure = Cell(f"{number(best.median)} ms", best.median, f"{time}_ms")
    says = words.format(order[0], len(order), **dict(case))
    return Headline(figure, says, f"{told}; median {span(first, time)}", stats, _sentence([*samples, *_noise(found)]))


def _beside(best: Times, other: Times) -> str:
    """Say how much longer another median is, and whether the intervals tell the two apart."""
    overlap = best.high is not None and other.low is not None and other.low <= best.high
    return f"{other.median / best.median:.2f}× the median{', intervals overlap' if overlap else ''}"


def _peak(records: Sequence[Row]) -> Headline | None:
    """The largest peak that was measured, and how many cases did not fit."""
    rows = of_kind(records, PeakRow)
    measured = [row for row in rows if row.status == "ok" and row.peak_gib]
    largest = max(measured, key=lambda row: row.peak_gib or 0.0, default=None)
    if largest is None:
        return None
    told = ", ".join(
        f"{name} {largest.case[name]}" for name in ("mode", "context", "precision") if name in largest.case
    )
    without = Counter("Do not fit" if row.status == "out of memory" else "Failed" for row in rows if row.status != "ok")
    stats = [("Measured", number(len(measured)), "peaks")]
    stats += [(says, number(cases), "cases") for says, cases in sorted(without.items())]
    figure = Cell(gib(largest.peak_gib), largest.peak_gib, "peak_gib")
    return Headline(figure, "the largest peak of memory measured", told, stats)


def _counted(records: Sequence[Row], found: Sequence[Finding]) -> Headline | None:
    """Say how much was measured, of rows that have no one step; of the kind that most rows are of."""
    counts = Counter(type(row) for row in records if type(row) in TIMED and not row.values.get("between_runs"))
    if not counts:
        return None
    kind, count = counts.most_common(1)[0]
    own = [row for row in records if type(row) is kind]
    failed = Counter(row.status for row in own if row.status != "ok")
    outcomes = [f"{number(times)} {status}" for status, times in failed.items()]
    detail = f"{number(count - failed.total())} ran{f', {listed(outcomes)}' if outcomes else ''}"
    words = {**TIMED, StepRow: "cases of a step"}  # a row of steps is one case of many
    stats = [(words[each].capitalize(), number(times), "") for each, times in counts.items() if each is not kind]
    says = f"{words[kind]} {'tried' if failed else 'measured'}"
    return Headline(Cell(number(count)), says, detail, stats, _sentence(_noise(found)))
