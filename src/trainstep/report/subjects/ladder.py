"""Ladders, of workloads and of scripts: their changes, what they gain, and the proof that training is the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainstep.base.cores import busy
from trainstep.base.stats import WITHIN_RUN
from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Section, section, span
from trainstep.report.charts import SERIES
from trainstep.report.charts.lines import Series, lines
from trainstep.report.charts.rows import Fall, Outcome, waterfall
from trainstep.report.columns import Cell, Column, ratio_cell, value_cell
from trainstep.report.findings import Claim, Finding, found, listed, literal
from trainstep.report.numbers import NONE, gib, number, numeric, power_of_ten, typeset
from trainstep.report.subjects.climbs import Climb, after_precision, climbs, of_steps, times_agree
from trainstep.report.subjects.run import measured
from trainstep.report.tables import Definition, make_table, page_table
from trainstep.rows import BASELINE, FIRST_THAT_FITS, ChangeRow
from trainstep.rows.records import Row, Scalar

# Tables.
_LIMITS = {
    "loss_error": "",
    "gradient_error": "error_budget",
    "worst_gradient_error": "worst_allowed",
    "float32_error": "float32_allowed",
    "update_error": "update_allowed",
    "losses_error": "losses_allowed",
    "moved_error": "moved_allowed",
    "shown_error": "shown_allowed",
}
"""Column of an error → that of what is allowed."""


def _limited(row: Row, name: str) -> Cell:
    """An error, on the page with what is allowed, a part of which it is."""
    error, budget = (value_cell(row, each, partial(number, digits=2)) for each in (name, _LIMITS[name]))
    if error.value is None:
        return error
    if budget.value is None:
        is_known = name in ("losses_error", "moved_error", "shown_error")
        return replace(error, note="not compared: rounding alone does as much", tone="quiet") if is_known else error
    return replace(error, of=budget, tone="bad" if not numeric(error.value) <= numeric(budget.value) else "")


def _used(row: Row, name: str) -> float:
    """The part of what is allowed that an error uses; 0 where either is unknown."""
    error, allowed = row.values.get(name), row.values.get(_LIMITS[name])
    return numeric(error) / numeric(allowed) if error is not None and allowed else 0.0


def _limit(title: str, name: str, *, brief: bool = False, page: bool = True) -> Column:
    return Column(title, lambda row: _limited(row, name), brief=brief, page=page)


def _verdict(row: Row) -> Cell:
    """The verdict, and what followed from it."""
    called, accepted = str(row.values.get("verdict", row.status)), bool(row.values.get("accepted"))
    cell = Cell(called, called, "verdict", is_text=True, in_files=called)
    if row.status != "ok":
        cell = replace(cell, note=row.reason, in_files=f"{called}: {row.reason}", tone="bad")
        return replace(cell, tone="quiet") if called == "not tried" else cell
    if called in (BASELINE, FIRST_THAT_FITS):
        return cell
    if accepted:
        words = "accepted: no slower, and smaller" if called == "inconclusive" else "accepted"
        note = f"of {number(row.values['updates'])} updates, in one epoch" if row.values.get("in_first_epoch") else ""
        return replace(cell, text=words, in_files=words, note=note, tone="good")
    words = "slower, rejected" if called == "slower" else "no clear gain, rejected"
    return replace(cell, text=words, in_files=words, tone="bad" if called == "slower" else "quiet")


def _slowed(row: Row) -> Cell:
    """Cell of what slowed the GPU, right after the last step."""
    reason = row.values.get("throttled_by")
    return Cell("" if reason in (None, "nothing") else str(reason), reason, "throttled_by", tone="bad", is_text=True)


def _change(row: Row) -> str:
    return str(row.case["change"])


_WHICH = Column("change", lambda row: Cell(_change(row), is_text=True))


def _columns(rows: Sequence[Row]) -> list[Column]:
    ratio = partial(columns.ratio, between_runs=any(row.values.get("between_runs") for row in rows))
    return [
        *map(columns.files_only, columns.SETTINGS[:3]),
        _WHICH,
        columns.median("step (ms) [95 %]", "step"),
        ratio("speed-up", "speedup"),
        ratio("against what was accepted", "gain", brief=False),
        columns.count("runs", "runs"),
        columns.value("peak (GiB)", "peak_gib"),
        columns.value("utilisation (%)", "utilisation", brief=False, page=False),
        _limit("gradient error", "gradient_error", brief=True),
        columns.value("budget", "error_budget", digits=2, page=False),
        *columns.values(
            {
                title: name
                for error in ("float32", "update", "losses", "moved")
                for title, name in ((f"{error} error", f"{error}_error"), (f"{error} budget", f"{error}_allowed"))
            },
            digits=2,
            brief=False,
            page=False,
        ),
        columns.value("power (W)", "power_w", brief=False),
        Column("slowed by", _slowed),
        Column("verdict", _verdict),
        Column("accepted", lambda row: "yes" if row.values.get("accepted") else "no", brief=False, page=False),
        Column("lines", lambda row: getattr(row, "lines", ""), brief=False, page=False),
    ]


LADDER = Definition(
    ChangeRow,
    "The ladder: one change at a time, each checked before it is timed",
    _columns,
    key=_change,
    is_strong=lambda row: bool(row.values.get("accepted")),
    name="ladder",
)


def _most_used(row: Row) -> Cell:
    if not row.values.get("error_budget"):
        return Cell(NONE)
    used = max(_used(row, name) for name in _LIMITS)
    return Cell(f"{used:.0%}", tone="bad" if used > 1 else "")


def _in_float32(row: Row) -> Cell:
    cell, why = _limited(row, "float32_error"), row.values.get("not_in_float32")
    return replace(cell, note=f"not compared: {why}", tone="quiet") if why else cell


ERRORS = Definition(
    ChangeRow,
    "Relative errors and what is allowed of each",
    [
        replace(_WHICH, title="Change"),
        columns.value("Loss", "loss_error", digits=2),
        _limit("Gradients", "gradient_error"),
        _limit("Worst parameter or row", "worst_gradient_error"),
        Column("Which", lambda row: Cell(str(row.values.get("worst_parameter") or NONE), is_text=True, tone="quiet")),
        Column("The same in float32", _in_float32),
        _limit("Updates", "update_error"),
        _limit("Losses", "losses_error"),
        _limit("Weights at the end", "moved_error"),
        _limit("Buffers, copies, evaluation", "shown_error"),
        Column("Used at most", _most_used),
        columns.value("Compared", "compared"),
    ],
    key=_change,
    name="errors",
)
TABLES = (LADDER,)


# Sections of the page.
_OUTCOMES = (
    ("baseline", "neutral", "baseline"),
    ("kept", "accent", "accepted"),
    ("left", "hollow", "no clear gain, rejected"),
    ("slower", "hatched", "slower, rejected"),
    ("failed", "cross", "failed the check or could not run"),
)  # Outcome, swatch and words of the waterfall's key
_OF_SCRIPT = (
    "The script itself is run for each change, or for several, which are made from outside on what was accepted. Its "
    "first update's gradients, its losses and its weights at the end are compared with the script as it is; allowed is "
    "twice what random roundings do to the script, plus one rounding. A change that fails the check is not timed. "
    "Ratios are between interleaved runs; brackets are 95 % intervals."
)


def ladder(rows: Sequence[Row]) -> Section | None:
    """Section of changes one at a time, ladder by ladder."""
    every, blocks, leads = climbs(rows), list[Block](), dict[str, None]()
    for place, climb in enumerate(every):
        suffix = f"-{place}" if place else ""
        table = replace(LADDER, caption=f"{LADDER.caption}: {climb.name}") if climb.name else LADDER
        shown = [*climb.rows, *(each for each in (climb.final, climb.patched) if each is not None)]
        blocks += [Charts([_waterfall(climb, suffix)])]
        blocks.append(make_table(table, shown, "page", name=f"ladder{suffix}"))
        leads[_OF_SCRIPT if climb.is_script else _of_steps(every)] = None
    lead = " ".join(leads)
    lead += "" if any(climb.accepted for climb in every) else " Nothing could run here."
    return section("ladder", "Ladder", "The ladder", lead, *blocks)


def _of_steps(every: Sequence[Climb]) -> str:
    return (
        f"One change at a time, each built from the same seed. {_checks(every)} Changes that fail the "
        "check or are slower are rejected. Speed-up is against the baseline, gain against the changes accepted before; "
        "brackets are 95 % intervals."
    )


def _checks(every: Sequence[Climb]) -> str:
    """Say what was checked of these changes: those of earlier versions were checked for less."""
    # Files of earlier versions have no errors of updates: the page must not claim a check that was not made.
    if all(row.update_error is None for climb in every if not climb.is_script for row in climb.rows):
        return "Its loss and gradients on the first batch were compared with the first one’s before it was timed."
    return (
        "Before it is timed it is compared with the plain step: in float32, in its own precision per parameter and "
        "row, and by updates of its optimizer; after that once more with trained weights."
    )


def _waterfall(climb: Climb, suffix: str) -> Chart:
    falls, before = [], 0.0
    # Each bar starts at the time accepted before it, so a rejected change leaves the level as it was.
    for row in climb.rows:
        if row.verdict != "not tried":
            falls.append(_fall(row, before))
            before = row.step_ms or before if row.accepted else before
    shown = {fall.outcome for fall in falls}
    title = f"From the first to the final configuration{f': {climb.name}' if climb.name else ''}"
    caption = "Each bar runs from the time accepted so far to the change’s own; thin lines carry the accepted time on."
    legend = [(swatch, words) for outcome, swatch, words in _OUTCOMES if outcome in shown]
    return Chart(f"ladder{suffix}", title, caption, partial(waterfall, falls, "ms per step"), legend)


def _fall(row: ChangeRow, before: float) -> Fall:
    outcome: Outcome = "slower" if row.verdict == "slower" else "left"
    if row.status != "ok":
        outcome = "failed"
    elif row.verdict == BASELINE:
        outcome = "baseline"
    elif row.accepted:
        outcome = "kept"
    label = f"{number(row.step_ms)} ms"
    if outcome == "failed":
        label = row.status
    elif outcome != "baseline":
        label += f" · {NONE if row.speedup is None else f'{row.speedup:.2f}×'}"
    step = row.times.get("step")
    low, high = (step.low, step.high) if step else (None, None)
    return Fall(row.change, before, row.step_ms, outcome, label, _tip(row), low, high)


def _tip(row: ChangeRow) -> str:
    if row.status != "ok":
        return f"{row.status}: {row.reason}"
    told, where = [f"step {span(row, 'step')}"], "between runs" if row.between_runs else WITHIN_RUN
    for name, words in (("speedup", "speed-up"), ("gain", "against what was accepted before")):
        cell = ratio_cell(row, name)
        if row.verdict not in (BASELINE, FIRST_THAT_FITS) and cell.value is not None:
            told.append(f"{words} {cell.plain} {where if cell.low else '(too few samples)'}")
    if row.peak_gib is not None:
        told.append(f"peak memory {gib(row.peak_gib)}")
    return "\n".join([*told, _verdict(row).text])


def correctness(rows: Sequence[Row]) -> Section | None:
    """Losses of what was accepted over the same batches, and how far gradients and updates are off; by ladder."""
    every, blocks = climbs(rows), list[Block | None]()
    for place, climb in enumerate(every):
        suffix = f"-{place}" if place else ""
        # One checked row alone is the first step, which is held against nothing.
        accepted = [row for row in climb.accepted if row.samples.get("training_loss")]
        checked = [row for row in climb.rows if row.gradient_error is not None]
        if accepted or len(checked) > 1:
            beside = dict.fromkeys(row.reference for row in checked if row.reference)
            of = [climb.name] * bool(climb.name) + [f"compared with {each}" for each in beside]
            table = replace(ERRORS, caption=": ".join([f"{ERRORS.caption}", *of]))
            blocks += [Charts(_loss_charts(accepted, suffix)) if accepted else None]
            blocks += [page_table(table, checked, f"errors{suffix}")]
    lead = "A step that computes something else is no faster."
    if own := [climb for climb in every if not climb.is_script]:
        lead += f" {_checks(own)}"
        if all(row.worst_allowed is None for climb in own for row in climb.rows):
            lead += " Allowed is twice the error of the first step in that precision, plus one rounding; of that first "
            lead += "step, what independent roundings add up to."
        else:
            lead += (
                " Allowed is twice what the plain step was measured to be off by in that precision, plus one rounding."
            )
    return section("correctness", "Correctness", "Is it still the same training?", lead, *blocks)


def _loss_charts(accepted: Sequence[ChangeRow], suffix: str) -> list[Chart]:
    length = min(len(row.samples["training_loss"]) for row in accepted)
    steps = [float(index + 1) for index in range(length)]
    curves = [
        Series(row.change, steps, row.samples["training_loss"][:length], *_line_style(index, len(accepted)))
        for index, row in enumerate(accepted)
    ]
    legend = [(f"line {one.role} {one.dash}", one.name) for one in curves]
    title, caption = "Training loss of everything accepted", "Same seed, same batches: right curves lie on one another."
    charts = [Chart(f"losses{suffix}", title, caption, partial(lines, curves, "batch", "loss"), legend)]
    if len(curves) > 1:
        apart = [
            replace(one, y=[loss / first - 1 for loss, first in zip(one.y, curves[0].y, strict=True)])
            for one in curves[1:]
        ]
        power = math.floor(math.log10(max((abs(y) for one in apart for y in one.y), default=0) or 1))
        scaled = [
            replace(one, y=[y / 10**power for y in one.y], texts=[typeset(number(y, 2)) for y in one.y])
            for one in apart
        ]
        unit = f"relative difference, ×{power_of_ten(power)}" if power else "relative difference"
        title = "Relative difference from the baseline’s loss"
        caption = "Rounding shows as noise around 0; a mistake would drift away."
        plot = partial(lines, scaled, "batch", unit, around_zero=True)
        charts.append(Chart(f"loss-differences{suffix}", title, caption, plot, legend[1:]))
    return charts


def _line_style(index: int, count: int) -> tuple[str, float, str]:
    """Role, width and dash of one of `count` lines that should coincide: the first broad and pale, the last on top."""
    if index == 0:
        return "neutral", 7, "solid"
    if index == count - 1:
        return "accent", 1.8, "solid"
    return SERIES[(index - 1) % len(SERIES)], 1.8, ("dashed", "dotted", "dotdash", "dashdot")[index % 4]


# Findings.
def baseline(rows: Sequence[Row]) -> Iterator[Finding]:
    """A ladder without a baseline, which comes before all else."""
    for climb in of_steps(rows):
        first = climb.first
        if first.status not in ("ok", "out of memory"):
            said = "the baseline failed ({status}): {reason}. "
            said += "There is nothing to compare with, and no change was tried."
            said = climb.whose + said if climb.name else f"T{said[1:]}"
            claim = Claim("The baseline failed: nothing can be compared", ("ladder",), severity="alarm")
            yield found("gain.no-baseline", said, claim, status=first.status, reason=first.reason or None)
        elif first.status != "ok" and climb.accepted:
            said = "the baseline is too large ({reason}): speed-ups are over {first}, the first that fits."
            said = climb.whose + said if climb.name else f"T{said[1:]}"
            yield found("gain.too-large", said, reason=first.reason, first=climb.accepted[0].change)


def gain(rows: Sequence[Row]) -> Iterator[Finding]:
    """Findings on what the accepted changes of each ladder bring together, and what was checked of them."""
    for climb in climbs(rows):
        if climb.is_script:
            yield from _gain_of_script(climb, rows)
        elif climb.accepted:
            yield _withheld(climb) if climb.is_disputed else _gain(climb, rows)


def _withheld(climb: Climb) -> Finding:
    said = (
        "No speed-up is claimed: in turns with {first} at the end, {top} was {again:.2f}× as fast "
        f"({columns.INTERVAL} {{again_low:.2f}}–{{again_high:.2f}}), and by the gains up to it {{speedup:.2f}}× "
        "({speedup_low:.2f}–{speedup_high:.2f}). The machine changed meanwhile; run again on a quieter one."
    )
    first, top, final = climb.accepted[0], climb.accepted[-1], climb.final
    assert final is not None, "which disputes it"
    figures: dict[str, Scalar] = {"speedup": top.speedup, "speedup_low": top.speedup_low}
    figures |= {"speedup_high": top.speedup_high, "again": final.speedup}
    figures |= {"again_low": final.speedup_low, "again_high": final.speedup_high}
    return found("gain.withheld", climb.whose + said, first=first.change, top=top.change, **figures)


UNDECIDED = 0.1
"""Width of the interval of a gain, as a share of it, above which "inconclusive" says nothing of the change."""


def _nothing_accepted(climb: Climb, rows: Sequence[Row]) -> Finding:
    """Say what was tried, and that nothing is better only where that was decided; else how busy the machine was."""
    tried = {row.names[0]: row for row in climb.rows if row.gain is not None and not row.accepted}
    open_ = [row for row in tried.values() if row.verdict == "inconclusive" and _width(row) > UNDECIDED]
    figures: dict[str, Scalar] = {"tried": tuple(tried), "undecided": tuple(row.change for row in open_)}
    first, whose = climb.accepted[0].change, climb.whose
    figures |= {} if first == BASELINE else {"first": first}
    which = "the baseline" if first == BASELINE else "{first}"
    if not tried:
        said = f"No change was timed, so nothing is known of what is faster than {which}."
    elif open_:
        spans = [f"{row.change} ({row.gain_low or 0:.2f}–{row.gain_high or math.inf:.2f})" for row in open_]
        machine = next((busy(row.load, row.environment.get("cores"), row.cpu_share) for row in measured(rows)), "")
        said = f"No change was accepted, and nothing could be decided of {literal(listed(spans))}"
        said += f"{machine}. Run again on a quieter machine, or with more steps."
    else:
        said = f"No change made the step faster: {which} is the best found. Tried: {{tried:list}}."
    return found("gain.script_none" if climb.is_script else "gain.none", whose + said, **figures)


def _width(row: ChangeRow) -> float:
    """Width of the interval of its gain, as a share of it."""
    known = row.gain and row.gain_low and row.gain_high
    return (numeric(row.gain_high) - numeric(row.gain_low)) / numeric(row.gain) if known else math.inf


def _gain(climb: Climb, rows: Sequence[Row]) -> Finding:
    first, last, there = climb.accepted[0], climb.accepted[-1], climb.there
    if first is last:
        return _nothing_accepted(climb, rows)
    named = tuple(row.change for row in there)
    low, high, is_one = numeric(last.speedup_low), numeric(last.speedup_high), len(named) == 1
    names = literal(listed(named))
    interval = f"({columns.INTERVAL} {{speedup_low:.2f}}–{{speedup_high:.2f}})"
    known: dict[str, Scalar] = {"speedup": last.speedup, "speedup_low": low, "speedup_high": high}
    if low <= 1:
        called, both = "smaller", None not in (first.peak_gib, last.peak_gib)
        said = f"no difference in time that these samples can show {interval}, accepted for what else "
        said += "it saves" if is_one else "they save"
        said = f": {said}" + (": peak memory {peak_before_gib:gib} → {peak_after_gib:gib}" if both else "")
    else:
        called = "faster"
        said = f" {'makes' if is_one else 'make'} the step {{speedup:.2f}}× faster {interval}"
        said += ": {before_ms:ms} → {after_ms:ms}" if times_agree(climb) else _MOVED
        if (later := after_precision(climb)) is not None:
            said += " ({after_precision:.2f}× of it after {precision_change})"
            known |= later
    set_by = {id(row): names for row, names in zip(climb.accepted[1:], climb.settings, strict=True)}
    unchecked = tuple(row.change for row in there if "optimizer" in set_by[id(row)] and row.update_error is None)
    what = "Loss and gradients" if last.update_error is None else "Loss, gradients and updates"
    said = (
        f"{names[0].upper()}{names[1:]}{said}. {what} pass the check: relative gradient error {{gradient_error:.1g}} "
        "(tolerance {error_budget:.1g})"
    )
    said += ". The updates of {unchecked:list} were not checked." if unchecked else "."
    known |= {"gradient_error": numeric(last.gradient_error), "error_budget": numeric(last.error_budget)}
    known |= {"before_ms": first.step_ms, "after_ms": last.step_ms}
    known |= {"peak_before_gib": first.peak_gib, "peak_after_gib": last.peak_gib}
    claim = _faster(numeric(first.step_ms) - numeric(last.step_ms)) if called == "faster" else Claim()
    return found(f"gain.{called}", climb.whose + said, claim, changes=named, unchecked=unchecked, **known)


def _faster(saved_ms: float) -> Claim:
    said = "{speedup:.2f}× faster with {changes:list}"
    return Claim(said, ("ladder",), ms=saved_ms, is_part=False, severity="aside")


_MOVED = ". The machine changed: the first took {before_ms:ms} when it was tried, the last {after_ms:ms}"


CALLED = {"wrong": "failed the check", "unsupported": "not tried"}
"""Status → the words for it."""


def rejected(rows: Sequence[Row]) -> Iterator[Finding]:
    """The changes that were accepted nowhere, each by its last try, and why."""
    for climb in of_steps(rows):
        for row in {row.names[0]: row for row in climb.rows if row.change != BASELINE}.values():
            if row.status != "ok":
                why, said = row.status.replace(" ", "-"), f" ({CALLED.get(row.status, row.status)}): {{reason}}"
            elif row.verdict == "slower":
                why, said = "slower", f" makes the step {1 / numeric(row.gain):.2f}× slower here"
            elif row.verdict == "inconclusive" and not row.accepted:
                why, said = "inconclusive", " makes no difference that these samples can show"
            else:
                continue
            figures: dict[str, Scalar] = {"change": row.change, "gain": row.gain, "reason": row.reason or None}
            yield found(f"ladder.{why}", f"Not used: {climb.whose}{{change}}{said}.", **figures)


def _gain_of_script(climb: Climb, rows: Sequence[Row]) -> Iterator[Finding]:
    """Findings on a script: what was accepted, what it brings together, the lines to add for it, and the
    patch."""
    if climb.first.status != "ok":
        return
    last, there = climb.top, climb.there
    names = tuple(row.change for row in there)
    if last is None:
        yield _nothing_accepted(climb, rows)
    elif last.speedup_low is not None and last.speedup_low > 1:
        figures: dict[str, Scalar] = {"speedup": last.speedup, "low": last.speedup_low, "high": last.speedup_high}
        said = (
            f"Proven: with {literal(listed(names))} the script's steps are {{speedup:.2f}}× faster (between runs, "
            "{low:.2f}–{high:.2f}), and its first gradients, losses and weights are within their budgets."
        )
        if (seen := next((row for row in reversed(there) if row.updates), None)) is not None:
            figures["updates"] = seen.updates
            reaches = f"{'all' if seen.is_whole else 'the first'} {{updates:n}} updates of the script"
            epoch = "; the loader has not begun a second epoch" if seen.in_first_epoch else ""
            said += f" Proven for {reaches}{epoch}."
        claim = _faster((1 - 1 / numeric(last.speedup)) * (climb.first.step_ms or 0.0))
        yield found("gain.script", said, claim, changes=names, **figures)
    else:
        said = f"With {literal(listed(names))} together no gain was certain between runs."
        yield found("gain.script_open", said, changes=names)
    for row in there if last is not None else ():
        yield found("gain.line", f"{{change}}: {literal(row.lines)}", change=row.change)
    patched = climb.patched
    if patched is not None and patched.status == "ok" and patched.accepted:
        said = "The patched script, run with nothing from outside, is {speedup:.2f}× faster ({low:.2f}–{high:.2f})."
        figures = {"low": patched.speedup_low, "high": patched.speedup_high}
        yield found("gain.patch", said, speedup=patched.speedup, **figures)


RULES = (baseline, gain, rejected)
SECTIONS = (ladder, correctness)
