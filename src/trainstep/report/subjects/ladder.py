"""The ladder: its rungs, what they gain, and the proof that they compute the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainstep.base.stats import WITHIN_RUN
from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Section, span
from trainstep.report.charts import SERIES
from trainstep.report.charts.lines import Series, lines
from trainstep.report.charts.rows import Fall, Outcome, waterfall
from trainstep.report.columns import Cell, Column, ratio_cell, value_cell
from trainstep.report.numbers import NONE, gib, number, numeric, power_of_ten, typeset
from trainstep.report.subjects import ladder_findings
from trainstep.report.subjects.ladder_findings import BASELINE, climbs, control_name, kept_rungs
from trainstep.report.tables import define, make_table
from trainstep.rows import FIRST_THAT_FITS, ControlRow, RungRow
from trainstep.rows.records import Row, of_kind


def _rung(row: Row) -> Cell:
    return Cell(str(row.case["rung"]), is_text=True)


def _limited(row: Row, name: str, allowed: str) -> Cell:
    """An error, on the page with what is allowed, a part of which it is."""
    error, budget = (value_cell(row, each, partial(number, digits=2)) for each in (name, allowed))
    if error.value is None or budget.value is None:
        return error
    return replace(error, of=budget, tone="bad" if _used(row, name) > 1 else "")


_LIMITS = {
    "loss_error": "",
    "gradient_error": "error_budget",
    "worst_gradient_error": "worst_allowed",
    "float32_error": "float32_allowed",
    "update_error": "update_allowed",
}
"""Column of an error → that of what is allowed."""


def _used(row: Row, name: str) -> float:
    """The part of what is allowed that an error uses; 0 where either is unknown."""
    error, allowed = row.values.get(name), row.values.get(_LIMITS[name])
    return numeric(error) / numeric(allowed) if error is not None and allowed else 0.0


def _limit(title: str, name: str, *, page: bool = True) -> Column:
    return Column(title, lambda row: _limited(row, name, _LIMITS[name]), brief=False, page=page)


def _verdict(row: Row) -> Cell:
    """The verdict: in files its word, on the page what followed from it."""
    called, kept = str(row.values.get("verdict", row.status)), bool(row.values.get("kept"))
    cell = Cell("no clear gain, not kept", called, "verdict", tone="quiet", is_text=True, in_files=called)
    if row.status != "ok":
        return replace(cell, text=row.status, note=row.reason, tone="bad")
    if called in (BASELINE, FIRST_THAT_FITS):
        return replace(cell, text=called)
    if kept:
        return replace(cell, text="kept" if called == "faster" else "kept: no slower, and smaller", tone="good")
    return replace(cell, text="slower, not kept", tone="bad") if called == "slower" else cell


def _slowed(row: Row) -> Cell:
    """What slowed the GPU, right after the last step."""
    reason = row.values.get("throttled_by")
    return Cell("" if reason in (None, "nothing") else str(reason), reason, "throttled_by", tone="bad", is_text=True)


LADDER = define(
    RungRow,
    "The ladder: one change per rung, each checked beside the plain step before it is timed",
    *map(columns.files_only, columns.SETTINGS[:3]),
    Column("rung", _rung),
    columns.median("step (ms) [95 %]", "step"),
    columns.ratio("speed-up", "speedup"),
    columns.ratio("against the rung before", "gain", brief=False),
    columns.value("peak (GiB)", "peak_gib"),
    columns.value("utilisation (%)", "utilisation", brief=False, page=False),
    replace(_limit("gradient error", "gradient_error"), brief=True),
    columns.value("budget", "error_budget", digits=2, page=False),
    *columns.values(
        {
            title: name
            for error in ("float32", "update")
            for title, name in ((f"{error} error", f"{error}_error"), (f"{error} budget", f"{error}_allowed"))
        },
        digits=2,
        brief=False,
        page=False,
    ),
    columns.value("power (W)", "power_w", brief=False),
    Column("slowed by", _slowed),
    Column("verdict", _verdict),
    Column("kept", lambda row: "yes" if row.values.get("kept") else "no", brief=False, page=False),
    Column("reason", lambda row: row.reason, brief=False, page=False),
    key=lambda row: str(row.case["rung"]),
    is_strong=lambda row: bool(row.values.get("kept")),
)


CONTROL = define(
    ControlRow,
    "Rungs measured again at the end of the ladder: the interval of their ratio should contain 1",
    *columns.SETTINGS,
    *columns.values({"first (ms)": "first_ms", "again (ms)": "again_ms"}),
    columns.ratio("again / first", "ratio"),
    columns.ratio("over the first rung, in turns", "speedup"),
    columns.OUTCOME,
)


def _most_used(row: Row) -> Cell:
    if not row.values.get("error_budget"):
        return Cell(NONE)
    used = max(_used(row, name) for name in _LIMITS)
    return Cell(f"{used:.0%}", tone="bad" if used > 1 else "")


def _in_float32(row: Row) -> Cell:
    cell = _limited(row, "float32_error", "float32_allowed")
    why = row.values.get("not_in_float32")
    return replace(cell, note=f"not compared: {why}", tone="quiet") if why else cell


ERRORS = define(
    RungRow,
    "Relative errors and what is allowed of each, against the plain step",
    Column("Rung", _rung),
    columns.value("Loss", "loss_error", digits=2),
    _limit("Gradients", "gradient_error"),
    _limit("Worst parameter or row", "worst_gradient_error"),
    Column("Which", lambda row: Cell(str(row.values.get("worst_parameter") or NONE), is_text=True, tone="quiet")),
    Column("The same in float32", _in_float32),
    _limit("Updates", "update_error"),
    Column("Used at most", _most_used),
    columns.value("Compared", "compared"),
    key=lambda row: str(row.case["rung"]),
    name="errors",
)
TABLES = (LADDER, CONTROL)


RULES = ladder_findings.RULES

_OUTCOMES = (
    ("baseline", "neutral", "baseline"),
    ("kept", "accent", "kept"),
    ("left", "hollow", "no clear gain, not kept"),
    ("slower", "hatched", "slower, not kept"),
    ("failed", "cross", "wrong or could not run"),
)  # Outcome, swatch and words of the waterfall's key


def ladder(rows: Sequence[Row]) -> Section | None:
    """One change per rung, ladder by ladder, and the rungs that were measured again."""
    every = climbs(rows)
    if not every:
        return None
    blocks: list[Block] = []
    for place, (name, climb) in enumerate(every.items()):
        suffix = f"-{place}" if place else ""
        table = replace(LADDER, caption=f"{LADDER.caption}: {name}") if name else LADDER
        blocks += [Charts([_waterfall(climb, name, suffix)]), make_table(table, climb, "page", name=f"ladder{suffix}")]
    if controls := of_kind(rows, ControlRow):
        which = Column("Rung", lambda row: Cell(control_name(row, rows), is_text=True))  # type: ignore[arg-type]
        again = replace(CONTROL, columns=(which, *CONTROL.columns))  # type: ignore[misc]
        blocks.append(make_table(again, controls, "page"))
    rungs = of_kind(rows, RungRow)
    lead = (
        f"One change per rung, each built from the same seed. {_checks(rungs)} A wrong or slower rung is not built "
        "upon. Speed-up is against the baseline, gain against the rung kept before; brackets are 95 % intervals."
    )
    lead += "" if kept_rungs(rungs) else " No rung could run here."
    return Section("ladder", "Ladder", "The ladder", lead, blocks)


def _checks(rungs: Sequence[RungRow]) -> str:
    """What was checked of these rungs, in words: those of earlier versions were checked for less."""
    if all(row.update_error is None for row in rungs):
        return "Its loss and gradients on the first batch were compared with the first rung’s before it was timed."
    return (
        "Before it is timed it is judged beside the plain step: in float32, in its own precision per parameter and "
        "row, and by updates of its optimizer; after that once more with trained weights."
    )


def _waterfall(rungs: Sequence[RungRow], name: str, suffix: str) -> Chart:
    falls, before = [], 0.0
    for row in rungs:
        falls.append(_fall(row, before))
        before = row.step_ms or before if row.kept else before
    shown = {fall.outcome for fall in falls}
    caption = "Each bar runs from the time kept so far to the rung’s own; thin lines carry the kept time on."
    return Chart(
        f"ladder{suffix}",
        f"From the plain step to the recommended one{f': {name}' if name else ''}",
        caption,
        partial(waterfall, falls, "ms per step"),
        [(swatch, words) for outcome, swatch, words in _OUTCOMES if outcome in shown],
    )


def _fall(row: RungRow, before: float) -> Fall:
    outcome: Outcome = "slower" if row.verdict == "slower" else "left"
    if row.status != "ok":
        outcome = "failed"
    elif row.verdict == "baseline":
        outcome = "baseline"
    elif row.kept:
        outcome = "kept"
    label = f"{number(row.step_ms)} ms"
    if outcome == "failed":
        label = row.status
    elif outcome != "baseline":
        label += f" · {NONE if row.speedup is None else f'{row.speedup:.2f}×'}"
    step = row.times.get("step")
    low, high = (step.low, step.high) if step else (None, None)
    return Fall(row.rung, before, row.step_ms, outcome, label, _tip(row), low, high)


def _tip(row: RungRow) -> str:
    if row.status != "ok":
        return f"{row.status}: {row.reason}"
    told = [f"step {span(row, 'step')}"]
    for name, words in (("speedup", "speed-up"), ("gain", "against the kept rung before")):
        cell = ratio_cell(row, name)
        if row.verdict not in (BASELINE, FIRST_THAT_FITS) and cell.value is not None:
            told.append(f"{words} {cell.plain} {WITHIN_RUN if cell.low else '(too few samples)'}")
    if row.peak_gib is not None:
        told.append(f"peak memory {gib(row.peak_gib)}")
    return "\n".join([*told, _verdict(row).text])


def correctness(rows: Sequence[Row]) -> Section | None:
    """Losses of the kept rungs over the same batches, and how far gradients and updates are off; ladder by ladder."""
    every, blocks = climbs(rows), list[Block]()
    for place, (name, climb) in enumerate(every.items()):
        suffix = f"-{place}" if place else ""
        kept = [row for row in kept_rungs(climb) if row.samples.get("training_loss")]
        checked = [row for row in climb if row.gradient_error is not None]
        if kept or len(checked) > 1:
            beside = dict.fromkeys(row.reference for row in checked if row.reference)
            of = [name] * bool(name) + [f"held against {each}" for each in beside]
            table = replace(ERRORS, caption=": ".join([f"{ERRORS.caption}", *of]))
            blocks += [Charts(_loss_charts(kept, suffix))] if kept else []
            blocks += [make_table(table, checked, "page", name=f"errors{suffix}")] if checked else []
    if not blocks:
        return None
    lead = f"A step that computes something else is no faster. {_checks(of_kind(rows, RungRow))} "
    if all(row.worst_allowed is None for row in of_kind(rows, RungRow)):
        lead += "Allowed is twice the error of the first rung in that precision, plus one rounding; of that first "
        lead += "rung, what independent roundings add up to."
    else:
        lead += "Allowed is twice what the plain step was measured to be off by in that precision, plus one rounding."
    return Section("correctness", "Correctness", "Is it still the same training?", lead, blocks)


def _loss_charts(kept: Sequence[RungRow], suffix: str) -> list[Chart]:
    length = min(len(row.samples["training_loss"]) for row in kept)
    steps = [float(index + 1) for index in range(length)]
    styles = [_line_style(index, len(kept)) for index in range(len(kept))]
    curves = [
        Series(row.rung, steps, row.samples["training_loss"][:length], *style)
        for row, style in zip(kept, styles, strict=True)
    ]
    legend = [(f"line {one.role} {one.dash}", one.name) for one in curves]
    title, caption = "Training loss of every kept rung", "Same seed, same batches: right curves lie on one another."
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


SECTIONS = (ladder, correctness)
