"""The ladder, and the proof that its rungs compute the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from trainstep.kinds import RungRow
from trainstep.records import Row, of_kind
from trainstep.report import plots
from trainstep.report.blocks import Block, Cell, Chart, Charts, Section, Table, TableRow
from trainstep.report.cells import SUPERSCRIPT, cell_of, get, gib, median_of, number, ratio_of, span, times
from trainstep.report.findings import kept_rungs
from trainstep.report.numbers import NONE
from trainstep.report.plots import Fall, Outcome, Series


def ladder(records: Sequence[Row]) -> Section | None:
    """One change per rung."""
    rungs = of_kind(records, RungRow)
    if not rungs:
        return None
    falls, before, has_baseline = [], 0.0, False
    for row in rungs:
        outcome = _outcome(row)
        falls.append(
            Fall(
                str(row.case["rung"]),
                before,
                get(row, "step_ms"),
                outcome,
                _rung_label(row, outcome),
                _rung_tip(row),
                get(row, "step_low_ms"),
                get(row, "step_high_ms"),
            )
        )
        if row.values.get("kept"):
            before, has_baseline = get(row, "step_ms") or before, True
    shown = {fall.outcome for fall in falls}
    legend = [(swatch, words) for outcome, swatch, words in _OUTCOMES if outcome in shown]
    chart = Chart(
        "ladder",
        "From the plain step to the recommended one",
        "Each bar runs from the time kept so far to the rung’s own; thin lines carry the kept time on.",
        plots.waterfall(falls, "ms per step"),
        legend,
    )
    lead = (
        "One change per rung. Every rung is rebuilt from the same seed, and its loss and gradients on the same batch "
        "are checked against the first rung’s before it is timed; a wrong or slower one is not built upon."
    )
    lead += "" if has_baseline else " No rung could run here."
    return Section("ladder", "Ladder", "The ladder", lead, [Charts([chart]), _ladder_table(rungs)])


_OUTCOMES = (
    ("baseline", "neutral", "baseline"),
    ("kept", "accent", "kept"),
    ("left", "hollow", "no clear gain, not kept"),
    ("slower", "hatched", "slower, not kept"),
    ("failed", "cross", "wrong or could not run"),
)


def _outcome(row: Row) -> Outcome:
    if row.status != "ok":
        return "failed"
    called = row.values.get("verdict")
    if called == "baseline":
        return "baseline"
    if row.values.get("kept"):
        return "kept"
    return "slower" if called == "slower" else "left"


def _rung_label(row: Row, outcome: Outcome) -> str:
    if outcome == "failed":
        return row.status
    time = f"{number(row.values.get('step_ms'))} ms"
    return time if outcome == "baseline" else f"{time} · {times(get(row, 'speedup'))}"


def _rung_tip(row: Row) -> str:
    if row.status != "ok":
        return f"{row.status}: {row.reason}"
    speedup, gain = ratio_of(row, "speedup"), ratio_of(row, "gain")
    lines = [f"step {span(row, 'step')}"]
    for cell, words in ((speedup, "speed-up"), (gain, "against the kept rung before")):
        if row.values.get("verdict") != "baseline" and cell.value is not None:
            interval = f" [{cell.low.text}–{cell.high.text}]" if cell.low and cell.high else " (too few samples)"
            lines.append(f"{words} {cell.text}{interval}")
    if get(row, "peak_gib") is not None:
        lines.append(f"peak memory {gib(row.values['peak_gib'])}")
    lines.append(_verdict(row).text)
    return "\n".join(lines)


def _verdict(row: Row) -> Cell:
    called = str(row.values.get("verdict", row.status))
    if row.status != "ok":
        return Cell(row.status, called, "verdict", note=row.reason, tone="bad", is_text=True)
    if called == "baseline":
        return Cell("baseline", called, "verdict", tone="quiet", is_text=True)
    if row.values.get("kept"):
        words = "kept" if called == "faster" else "kept: no slower, and smaller"
        return Cell(words, called, "verdict", tone="good", is_text=True)
    if called == "slower":
        return Cell("slower, not kept", called, "verdict", tone="bad", is_text=True)
    return Cell("no clear gain, not kept", called, "verdict", tone="quiet", is_text=True)


def _ladder_table(rungs: Sequence[Row]) -> Table:
    rows = []
    for row in rungs:
        is_baseline = row.values.get("verdict") == "baseline"
        error = cell_of(row, "gradient_error", lambda value: number(value, 2))
        if error.value is not None:
            error = dataclasses.replace(error, of=cell_of(row, "error_budget", lambda value: number(value, 2)))
        rows.append(
            TableRow(
                [
                    Cell(str(row.case["rung"]), is_text=True),
                    median_of(row, "step"),
                    cell_of(row, "speedup", lambda value: "1×") if is_baseline else ratio_of(row, "speedup"),
                    Cell("", row.values.get("gain"), "gain") if is_baseline else ratio_of(row, "gain"),
                    cell_of(row, "peak_gib"),
                    error,
                    _verdict(row),
                ],
                str(row.case["rung"]),
                is_strong=bool(row.values.get("kept")),
            )
        )
    return Table(
        "Every rung. Speed-up is against the baseline, gain against the rung kept before; brackets are 95 % intervals",
        [
            "Rung",
            "Step, ms [95 %]",
            "Speed-up [95 %]",
            "Gain [95 %]",
            "Peak, GiB",
            "Gradient error of budget",
            "Outcome",
        ],
        rows,
        name="ladder",
    )


def correctness(records: Sequence[Row]) -> Section | None:
    """Losses of the kept rungs over the same batches, and how far gradients are off."""
    kept = [row for row in kept_rungs(records) if row.samples.get("training_loss")]
    checked = [row for row in of_kind(records, RungRow) if row.values.get("gradient_error") is not None]
    if not kept and len(checked) < 2:
        return None
    blocks: list[Block] = []
    if kept:
        length = min(len(row.samples["training_loss"]) for row in kept)
        steps = [float(index + 1) for index in range(length)]
        first = kept[0].samples["training_loss"]
        styles = [_line_style(index, len(kept)) for index in range(len(kept))]
        curves, apart = [], []
        for row, (role, width, dash) in zip(kept, styles, strict=True):
            losses, name = row.samples["training_loss"][:length], str(row.case["rung"])
            curves.append(Series(name, steps, losses, role, width, dash))
            if row is not kept[0]:
                off = [loss / start - 1 for loss, start in zip(losses, first, strict=False)]
                apart.append(Series(name, steps, off, role, width, dash))
        legend = [
            (f"line {role} {dash}", str(row.case["rung"])) for row, (role, _, dash) in zip(kept, styles, strict=True)
        ]
        charts = [
            Chart(
                "losses",
                "Training loss of every kept rung",
                "Same seed, same batches: right curves lie on one another.",
                plots.lines(curves, "batch", "loss"),
                legend,
            )
        ]
        if apart:
            power = math.floor(math.log10(max((abs(y) for one in apart for y in one.y), default=0) or 1))
            texts = [[number(y, 2) for y in one.y] for one in apart]
            apart = [
                dataclasses.replace(one, y=[y / 10**power for y in one.y], texts=text)
                for one, text in zip(apart, texts, strict=True)
            ]
            unit = f"relative difference, ×10{str(power).translate(SUPERSCRIPT)}" if power else "relative difference"
            charts.append(
                Chart(
                    "loss-differences",
                    "Relative difference from the baseline’s loss",
                    "Rounding shows as noise around 0; a mistake would drift away.",
                    plots.lines(apart, "batch", unit, around_zero=True),
                    legend[1:],
                )
            )
        blocks.append(Charts(charts))
    rows = []
    for row in checked:
        error, budget = get(row, "gradient_error") or 0.0, get(row, "error_budget") or 0.0
        rows.append(
            TableRow(
                [
                    Cell(str(row.case["rung"]), is_text=True),
                    cell_of(row, "loss_error", lambda value: number(value, 2)),
                    cell_of(row, "gradient_error", lambda value: number(value, 2)),
                    cell_of(row, "error_budget", lambda value: number(value, 2)),
                    Cell(f"{error / budget:.0%}" if budget else NONE, tone="bad" if budget and error > budget else ""),
                    cell_of(row, "worst_gradient_error", lambda value: number(value, 2)),
                    Cell(str(row.values.get("worst_parameter") or NONE), is_text=True, tone="quiet"),
                ],
                str(row.case["rung"]),
            )
        )
    if rows:
        columns = ["Rung", "Loss", "Gradients", "Budget", "Used", "Worst parameter’s", "Which"]
        blocks.append(Table("Relative errors on the first batch, against the first rung", columns, rows, name="errors"))
    lead = (
        "A step that computes something else is no faster. The budget is the error that rounding explains, "
        "in that precision."
    )
    return Section("correctness", "Correctness", "The maths is still right", lead, blocks)


def _line_style(index: int, count: int) -> tuple[str, float, str]:
    """Role, width and dash of one of `count` lines that should coincide: the first broad and pale, the last on top."""
    if index == 0:
        return "neutral", 7, "solid"
    if index == count - 1:
        return "accent", 1.8, "solid"
    return plots.SERIES[(index - 1) % len(plots.SERIES)], 1.8, ("dashed", "dotted", "dotdash", "dashdot")[index % 4]
