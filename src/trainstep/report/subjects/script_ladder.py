"""The ladder of a script under `trainstep run --ladder`: its rungs, what they gain, and that training is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Finding, Section, found, listed, literal, span
from trainstep.report.charts.rows import Fall, Outcome, waterfall
from trainstep.report.columns import Cell, Column, value_cell
from trainstep.report.numbers import number, numeric
from trainstep.report.tables import define, make_table
from trainstep.rows import ANOTHER_STEP, ScriptRungRow
from trainstep.rows.records import Row, Scalar, of_kind

TOP, PATCHED = "all that was kept", "the patched script"
"""Rows that are no rungs: the top against the script as it is, and the script with its patch."""
_LIMITS = {
    "gradient_error": "error_budget",
    "worst_gradient_error": "worst_allowed",
    "update_error": "update_allowed",
    "losses_error": "losses_allowed",
    "moved_error": "moved_allowed",
}
"""Column of an error → that of what is allowed."""


def _limited(title: str, name: str, *, brief: bool = False) -> Column:
    """An error, on the page with what is allowed."""

    def cell(row: Row) -> Cell:
        error, budget = (value_cell(row, each, partial(number, digits=2)) for each in (name, _LIMITS[name]))
        if error.value is None:
            return error
        if budget.value is None:
            return replace(error, note="not judged: rounding alone does as much", tone="quiet")
        return replace(error, of=budget, tone="bad" if not numeric(error.value) <= numeric(budget.value) else "")

    return Column(title, cell, brief=brief)


def _verdict(row: Row) -> Cell:
    called, kept = str(row.values.get("verdict")), bool(row.values.get("kept"))
    cell = Cell(called, called, "verdict", is_text=True, in_files=called)
    if row.status != "ok":
        in_files = f"{called}: {row.reason}"
        return replace(cell, note=row.reason, in_files=in_files, tone="bad" if row.status == "wrong" else "quiet")
    if called == "baseline":
        return cell
    if called == ANOTHER_STEP:
        return replace(cell, in_files=f"{called}, not judged", note="not judged")
    if kept:
        words = "kept" if called == "faster" else "kept: no slower, and smaller"
        note = f"of {number(row.values['updates'])} updates, in one epoch" if row.values.get("in_first_epoch") else ""
        return replace(cell, text=words, in_files=words, note=note, tone="good")
    words = "slower, not kept" if called == "slower" else "no clear gain, not kept"
    return replace(cell, text=words, in_files=words, tone="bad" if called == "slower" else "quiet")


LADDER = define(
    ScriptRungRow,
    "The script's ladder: it is run once per rung, judged, and timed where training is the same",
    *columns.cases({"script": "workload"}),
    Column("rung", lambda row: Cell(str(row.case["rung"]), is_text=True)),
    columns.median("step (ms) [95 %]", "step"),
    columns.ratio("speed-up", "speedup", between_runs=True),
    columns.ratio("against what was kept", "gain", brief=False, between_runs=True),
    columns.ratio("samples per second", "throughput", between_runs=True),
    *columns.values({"before (samples/s)": "samples_per_s_before", "samples/s": "samples_per_s"}, brief=False),
    *columns.values({"before (samples)": "samples_per_step_before", "samples a step": "samples_per_step"}, brief=False),
    columns.count("runs", "runs"),
    _limited("gradients off", "gradient_error", brief=True),
    columns.value("allowed", "error_budget", digits=2, page=False),
    _limited("worst parameter or row", "worst_gradient_error"),
    _limited("first update from equal gradients", "update_error"),
    _limited("losses", "losses_error"),
    columns.value("losses allowed", "losses_allowed", digits=2, brief=False, page=False),
    _limited("weights at the end", "moved_error"),
    columns.value("weights allowed", "moved_allowed", digits=2, brief=False, page=False),
    columns.value("compared", "compared", brief=False),
    columns.value("peak (GiB)", "peak_gib", brief=False),
    Column("verdict", _verdict),
    Column("lines", lambda row: Cell(str(row.values.get("lines") or ""), is_text=True), brief=False),
    key=lambda row: str(row.case["rung"]),
    is_strong=lambda row: bool(row.values.get("kept")),
)
TABLES = (LADDER,)


def rungs(rows: Sequence[Row]) -> list[ScriptRungRow]:
    """Those that are changes, the script as it is first."""
    return [row for row in of_kind(rows, ScriptRungRow) if row.rung not in (TOP, PATCHED)]


def _kept(rows: Sequence[Row]) -> list[ScriptRungRow]:
    return [row for row in rungs(rows) if row.kept and row.verdict != "baseline"]


def _together(rows: Sequence[Row]) -> ScriptRungRow | None:
    return next((row for row in of_kind(rows, ScriptRungRow) if row.rung == TOP), None)


def top(rows: Sequence[Row]) -> ScriptRungRow | None:
    """All that was kept, together: measured once more, or else the last rung that was kept; None where nothing was."""
    kept = _kept(rows)
    return (_together(rows) or kept[-1]) if kept and rungs(rows)[0].status == "ok" else None


def kept_lines(rows: Sequence[Row]) -> tuple[list[ScriptRungRow], list[ScriptRungRow]]:
    """The kept rungs whose lines are there at the top, and those that a later one took the place of."""
    kept, together = _kept(rows), _together(rows)
    lines = together.lines if together is not None else None
    there = [row for row in kept if not lines or not row.lines or row.lines in lines]
    return there, [row for row in kept if row not in there]


def proven(rows: Sequence[Row]) -> Iterator[Finding]:
    """What was kept, what it brings together, and the lines to add for it."""
    climbed, (kept, _) = rungs(rows), kept_lines(rows)
    if not climbed or climbed[0].status != "ok":
        return
    last = top(rows)
    if last is None:
        yield found("gain.script_none", "No change from outside made the script faster: it is the best found.")
        return
    names = tuple(row.rung for row in kept)
    if last.speedup_low is not None and last.speedup_low > 1:
        figures: dict[str, Scalar] = {"speedup": last.speedup, "low": last.speedup_low, "high": last.speedup_high}
        said = (
            f"Proven: with {literal(listed(names))} the script's steps are {{speedup:.2f}}× faster (between runs, "
            "{low:.2f}–{high:.2f}), and its first gradients, losses and weights are within their budgets."
        )
        judged = next((row for row in reversed(kept) if row.in_first_epoch), None)
        if judged is not None:
            figures["updates"] = judged.updates
            said += " Proven for {updates:n} updates; the loader has not begun a second epoch."
        yield found("gain.script", said, rungs=names, **figures)
    else:
        said = f"With {literal(listed(names))} together no gain was certain between runs."
        yield found("gain.script_open", said, rungs=names)
    for row in kept:
        yield found("gain.line", f"{{rung}}: {literal(row.lines or '')}", rung=row.rung)


def larger(rows: Sequence[Row]) -> Iterator[Finding]:
    """What another step brings in samples per second: never a speed-up."""
    for row in of_kind(rows, ScriptRungRow):
        if row.verdict != ANOTHER_STEP or row.throughput is None or row.throughput_low is None:
            continue
        figures: dict[str, Scalar] = {
            "throughput": row.throughput,
            "low": row.throughput_low,
            "high": row.throughput_high,
            "before": row.samples_per_step_before,
            "samples": row.samples_per_step,
        }
        step = "{rung}: another step, of {samples:.4g} samples in place of {before:.4g},"
        ratio = "{throughput:.2f}× (between runs, {low:.2f}–{high:.2f})"
        if row.throughput_low > 1:
            lines = literal(row.lines or "")
            said = f"{step} computes {ratio} as many per second; whether it learns as well is not known. {lines}"
            yield found("gain.throughput", said, rung=row.rung, **figures)
        else:
            said = f"{step} was not shown to compute more of them per second: {ratio}."
            yield found("gain.throughput_open", said, rung=row.rung, **figures)


def patched(rows: Sequence[Row]) -> Iterator[Finding]:
    """The patch, run and measured."""
    for row in of_kind(rows, ScriptRungRow):
        if row.rung == PATCHED and row.status == "ok" and row.kept:
            said = "The patched script, run with nothing from outside, is {speedup:.2f}× faster ({low:.2f}–{high:.2f})."
            figures: dict[str, Scalar] = {"low": row.speedup_low, "high": row.speedup_high}
            yield found("gain.patch", said, speedup=row.speedup, **figures)


def script_ladder(rows: Sequence[Row]) -> Section | None:
    """The changes that were made from outside."""
    every = of_kind(rows, ScriptRungRow)
    if not every:
        return None
    falls = _falls([row for row in rungs(rows) if row.status == "ok" and "step" in row.times])
    blocks: list[Block] = []
    if len(falls) > 1:
        title, caption = "From the script as it is to what was kept", "Each bar is the median of the runs."
        blocks.append(Charts([Chart("script-ladder", title, caption, partial(waterfall, falls, "ms per step"))]))
    blocks.append(make_table(LADDER, every, "page"))
    lead = (
        "The script itself is run for each rung, with one change or several made from outside on what was kept. "
        "Its first update's gradients, its losses and its weights at the end are held against the script as it is; "
        "allowed is twice what random roundings do to the script, plus one rounding. What is wrong is not timed. "
        "Ratios are between runs, which take turns; brackets are 95 % intervals. A larger batch is another step: "
        "nothing is held against it, and it has no speed-up, but samples per second."
    )
    return Section("script-ladder", "Script's ladder", "What makes the script faster", lead, blocks)


def _falls(climbed: Sequence[ScriptRungRow]) -> list[Fall]:
    falls, before = [], 0.0
    for row in climbed:
        outcome: Outcome = "slower" if row.verdict == "slower" else "left"
        outcome = "baseline" if row.verdict == "baseline" else "kept" if row.kept else outcome
        step = row.times["step"]
        ratio = "" if row.speedup is None else f" · {row.speedup:.2f}×"
        label = f"{number(row.step_ms)} ms{ratio}"
        falls.append(Fall(row.rung, before, row.step_ms, outcome, label, span(row, "step"), step.low, step.high))
        before = row.step_ms or before if row.kept else before
    return falls


RULES = (proven, larger, patched)
SECTIONS = (script_ladder,)
