"""The ladder: its rungs, what they gain, and the proof that they compute the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainstep.kinds import ControlRow, RungRow
from trainstep.records import Row, of_kind
from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Finding, Section, found, listed, literal, span
from trainstep.report.charts import SERIES
from trainstep.report.charts.lines import Series, lines
from trainstep.report.charts.rows import Fall, Outcome, waterfall
from trainstep.report.columns import Cell, Column, ratio_cell, value_cell
from trainstep.report.numbers import NONE, gib, number, numeric, power_of_ten, typeset
from trainstep.report.tables import define, make_table
from trainstep.stats import WITHIN_RUN


def _rung(row: Row) -> Cell:
    return Cell(str(row.case["rung"]), is_text=True)


def _error(row: Row) -> Cell:
    """The gradients' error, on the page with the budget it is a part of."""
    error, budget = (value_cell(row, name, partial(number, digits=2)) for name in ("gradient_error", "error_budget"))
    return error if error.value is None else replace(error, of=budget)


def _verdict(row: Row) -> Cell:
    """The verdict: in files its word, on the page what followed from it."""
    called, kept = str(row.values.get("verdict", row.status)), bool(row.values.get("kept"))
    cell = Cell("no clear gain, not kept", called, "verdict", tone="quiet", is_text=True, in_files=called)
    if row.status != "ok":
        return replace(cell, text=row.status, note=row.reason, tone="bad")
    if called == "baseline":
        return replace(cell, text="baseline")
    if kept:
        return replace(cell, text="kept" if called == "faster" else "kept: no slower, and smaller", tone="good")
    return replace(cell, text="slower, not kept", tone="bad") if called == "slower" else cell


LADDER = define(
    RungRow,
    "The ladder: one change per rung, each checked against the first rung's loss and gradients",
    *map(columns.files_only, columns.SETTINGS[:3]),
    Column("rung", _rung),
    columns.median("step (ms) [95 %]", "step"),
    columns.ratio("speed-up", "speedup"),
    columns.ratio("against the rung before", "gain", brief=False),
    columns.value("peak (GiB)", "peak_gib"),
    columns.value("utilisation (%)", "utilisation", brief=False, page=False),
    Column("gradient error", _error),
    columns.value("budget", "error_budget", digits=2, page=False),
    Column("verdict", _verdict),
    Column("kept", lambda row: "yes" if row.values.get("kept") else "no", brief=False, page=False),
    Column("reason", lambda row: row.reason, brief=False, page=False),
    key=lambda row: str(row.case["rung"]),
    is_strong=lambda row: bool(row.values.get("kept")),
)
CONTROL = define(
    ControlRow,
    "The baseline at the start of the ladder and at its end: the interval of their ratio should contain 1",
    *columns.SETTINGS[:3],
    *columns.values({"start (ms)": "first_ms", "end (ms)": "again_ms"}),
    columns.ratio("end / start", "ratio"),
    columns.OUTCOME,
)


def _used(row: Row) -> Cell:
    error, budget = row.values.get("gradient_error"), row.values.get("error_budget")
    if not budget:
        return Cell(NONE)
    used = numeric(error) / numeric(budget)
    return Cell(f"{used:.0%}", tone="bad" if used > 1 else "")


ERRORS = define(
    RungRow,
    "Relative errors on the first batch, against the first rung",
    Column("Rung", _rung),
    *columns.values({"Loss": "loss_error", "Gradients": "gradient_error", "Budget": "error_budget"}, digits=2),
    Column("Used", _used),
    columns.value("Worst parameter’s", "worst_gradient_error", digits=2),
    Column("Which", lambda row: Cell(str(row.values.get("worst_parameter") or NONE), is_text=True, tone="quiet")),
    key=lambda row: str(row.case["rung"]),
    name="errors",
)
TABLES = (LADDER, CONTROL)


def kept_rungs(rows: Sequence[Row]) -> list[RungRow]:
    """The rungs the ladder was built on, the baseline first."""
    return [row for row in of_kind(rows, RungRow) if row.kept]


def recommended_flags(rows: Sequence[Row]) -> str:
    """The settings of the last kept rung that differ from the baseline's, as flags to paste; empty if none was kept."""
    kept = kept_rungs(rows)
    if not kept:
        return ""
    start, end = kept[0].case, kept[-1].case
    names = ("precision", "attention", "optimizer", "compile", "loss")
    return " ".join(f"--{name} {end[name]}" for name in names if end.get(name) != start.get(name))


def gain(rows: Sequence[Row]) -> list[Finding]:
    """What the kept rungs bring together, and how right they are."""
    kept = kept_rungs(rows)
    if not kept:
        return []
    if len(kept) == 1:
        return [found("gain.none", "No change on the ladder made the step faster: the baseline is the best found.")]
    first, last, named = kept[0], kept[-1], tuple(row.rung for row in kept[1:])
    low, high, is_one = numeric(last.speedup_low), numeric(last.speedup_high), len(named) == 1
    names = literal(listed(named))
    interval = f"({columns.INTERVAL} {{speedup_low:.2f}}–{{speedup_high:.2f}})"
    if low <= 1:
        called, both = "smaller", None not in (first.peak_gib, last.peak_gib)
        said = f"no difference in time that these samples can show {interval}, kept for what else "
        said += "it saves" if is_one else "they save"
        said = f": {said}" + (": peak memory {peak_before_gib:gib} → {peak_after_gib:gib}" if both else "")
    else:
        called = "faster"
        said = f" {'makes' if is_one else 'make'} the step {{speedup:.2f}}× faster {interval}: {{before_ms:ms}} → "
        said += "{after_ms:ms}"
    said = (
        f"{names[0].upper()}{names[1:]}{said}, with loss and gradients within the error budget (off by "
        "{gradient_error:.1g} of {error_budget:.1g} allowed)."
    )
    figures = {"speedup": last.speedup, "speedup_low": low, "speedup_high": high}
    figures |= {"gradient_error": numeric(last.gradient_error), "error_budget": numeric(last.error_budget)}
    figures |= {"before_ms": first.step_ms, "after_ms": last.step_ms}
    figures |= {"peak_before_gib": first.peak_gib, "peak_after_gib": last.peak_gib}
    return [found(f"gain.{called}", said, rungs=named, **figures)]


def rejected(rows: Sequence[Row]) -> list[Finding]:
    """The rungs that were not kept, and why."""
    every = []
    for row in of_kind(rows, RungRow):
        if row.status != "ok":
            why, said = row.status.replace(" ", "-"), f" ({row.status}): {{reason}}"
        elif row.verdict == "slower":
            why, said = "slower", f" makes the step {1 / numeric(row.gain):.2f}× slower here"
        elif row.verdict == "inconclusive" and not row.kept:
            why, said = "inconclusive", " makes no difference that these samples can show"
        else:
            continue
        figures = {"rung": row.rung, "gain": row.gain, "reason": row.reason or None}
        every.append(found(f"ladder.{why}", f"Not used: {{rung}}{said}.", **figures))
    return every


RULES = (gain, rejected)

_OUTCOMES = (
    ("baseline", "neutral", "baseline"),
    ("kept", "accent", "kept"),
    ("left", "hollow", "no clear gain, not kept"),
    ("slower", "hatched", "slower, not kept"),
    ("failed", "cross", "wrong or could not run"),
)  # Outcome, swatch and words of the waterfall's key


def ladder(rows: Sequence[Row]) -> Section | None:
    """One change per rung."""
    rungs = of_kind(rows, RungRow)
    if not rungs:
        return None
    falls, before, has_baseline = [], 0.0, False
    for row in rungs:
        falls.append(_fall(row, before))
        if row.kept:
            before, has_baseline = row.step_ms or before, True
    shown = {fall.outcome for fall in falls}
    chart = Chart(
        "ladder",
        "From the plain step to the recommended one",
        "Each bar runs from the time kept so far to the rung’s own; thin lines carry the kept time on.",
        partial(waterfall, falls, "ms per step"),
        [(swatch, words) for outcome, swatch, words in _OUTCOMES if outcome in shown],
    )
    lead = (
        "One change per rung. Every rung is rebuilt from the same seed, and its loss and gradients on the same batch "
        "are checked against the first rung’s before it is timed; a wrong or slower one is not built upon. Speed-up is "
        "against the baseline, gain against the rung kept before; brackets are 95 % intervals."
    )
    lead += "" if has_baseline else " No rung could run here."
    blocks: list[Block] = [Charts([chart]), make_table(LADDER, rungs, "page", name="ladder")]
    return Section("ladder", "Ladder", "The ladder", lead, blocks)


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
        if row.verdict != "baseline" and cell.value is not None:
            told.append(f"{words} {cell.plain} {WITHIN_RUN if cell.low else '(too few samples)'}")
    if row.peak_gib is not None:
        told.append(f"peak memory {gib(row.peak_gib)}")
    return "\n".join([*told, _verdict(row).text])


def correctness(rows: Sequence[Row]) -> Section | None:
    """Losses of the kept rungs over the same batches, and how far gradients are off."""
    kept = [row for row in kept_rungs(rows) if row.samples.get("training_loss")]
    checked = [row for row in of_kind(rows, RungRow) if row.gradient_error is not None]
    if not kept and len(checked) < 2:
        return None
    blocks: list[Block] = [Charts(_loss_charts(kept))] if kept else []
    blocks += [make_table(ERRORS, checked, "page")] if checked else []
    lead = (
        "A step that computes something else is no faster. The budget is the error that rounding explains, "
        "in that precision."
    )
    return Section("correctness", "Correctness", "The maths is still right", lead, blocks)


def _loss_charts(kept: Sequence[RungRow]) -> list[Chart]:
    length = min(len(row.samples["training_loss"]) for row in kept)
    steps = [float(index + 1) for index in range(length)]
    styles = [_line_style(index, len(kept)) for index in range(len(kept))]
    curves = [
        Series(row.rung, steps, row.samples["training_loss"][:length], *style)
        for row, style in zip(kept, styles, strict=True)
    ]
    legend = [(f"line {one.role} {one.dash}", one.name) for one in curves]
    title, caption = "Training loss of every kept rung", "Same seed, same batches: right curves lie on one another."
    charts = [Chart("losses", title, caption, partial(lines, curves, "batch", "loss"), legend)]
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
        charts.append(Chart("loss-differences", title, caption, plot, legend[1:]))
    return charts


def _line_style(index: int, count: int) -> tuple[str, float, str]:
    """Role, width and dash of one of `count` lines that should coincide: the first broad and pale, the last on top."""
    if index == 0:
        return "neutral", 7, "solid"
    if index == count - 1:
        return "accent", 1.8, "solid"
    return SERIES[(index - 1) % len(SERIES)], 1.8, ("dashed", "dotted", "dotdash", "dashdot")[index % 4]


SECTIONS = (ladder, correctness)
