"""Steps: where the time of one goes, what warm-up changes, and the grid where several were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from trainstep.base import advice
from trainstep.base.config import PHASES
from trainstep.base.precision import PRECISIONS
from trainstep.report import columns
from trainstep.report.blocks import Chart, Charts, Facts, Section, facts_of, section
from trainstep.report.charts.lines import Series, lines
from trainstep.report.columns import Cell, Column, median_cell, value_cell
from trainstep.report.findings import Claim, Finding, found, literal
from trainstep.report.numbers import number, numeric
from trainstep.report.subjects.climbs import advised, changes, tried
from trainstep.report.tables import Table, TableRow, define, page_table
from trainstep.rows import CeilingRow, ChangeRow, StepRow, WorkloadRow
from trainstep.rows.records import Row, Scalar, Times, of_kind


def _outcome(row: Row) -> Cell:
    """Cell as of all rows; and of a step that ran unchecked, why nothing says that it is right."""
    why = row.values.get("not_checked")
    if row.status != "ok" or why is None:
        return columns.outcome_cell(row)
    return Cell("not checked", note=str(why), tone="quiet", is_text=True, in_files=f"not checked: {why}")


STEPS = define(
    StepRow,
    "Time of one step and its phases, ms",
    *columns.SETTINGS,
    *columns.cases({"mode": "mode", "warm-up": "warmup", "pass": "repeat"}),
    replace(columns.COUNTED, page=False),
    *(columns.value(name, f"{name}_ms", page=False) for name in PHASES),
    columns.median("step [95 %]", "step"),
    *(columns.files_only(columns.mean(f"{name}, mean ± std", name)) for name in (*PHASES, "step")),
    *columns.values({"host waits": "wait_ms", "next batch": "batch_ms"}, brief=False, page=False),
    columns.value("first step", "first_step_ms", page=False),
    *columns.values({"tokens/s": "tokens_per_s", "TFLOP/s": "achieved_tflops"}, brief=False),
    columns.value("utilisation (%)", "utilisation", brief=False, page=False),
    columns.value("peak (GiB)", "peak_gib"),
    *columns.values({"gradient error": "gradient_error", "budget": "error_budget"}, digits=2, brief=False),
    Column("outcome", _outcome, setting=True),
)
WARMUP = define(
    StepRow,
    "The step as it is reported after so many warm-up steps",
    Column("Warm-up", lambda row: Cell(number(row.case["warmup"]), row.case["warmup"], "warmup")),
    columns.median("Median, ms [95 %]", "step"),
    *columns.values({"Mean, ms": "step_mean_ms", "Std, ms": "step_std_ms", "Max, ms": "step_max_ms"}),
    *columns.values({"Outliers": "step_outliers", "n": "n"}),
    key=lambda row: number(row.case["warmup"]),
    name="warmup",
)
TABLES = (STEPS,)

LAUNCH_BOUND_ISSUE = 0.95
"""A GPU forward whose launches alone take more than this share of its time is bound by the host."""
COLD_MEAN_EXCESS = 0.05  # Leaving out warm-up is remarked on when it changes the mean by more than this share
PRODUCTS_SET_PACE = 0.5
"""Share of the matmul ceiling from which matrix products are said to set the pace: the step's arithmetic at that rate
takes the same share of the step, so from here on more than half of it cannot be anything else."""
BACKWARD_OVER_FORWARD = 2.0  # Each product y = x·W has two in backward: one for the gradient of x, one for that of W
ODD = (0.75, 1.75)  # A ratio of backward to forward outside of these multiples of the expected one is remarked on


def full_steps(rows: Sequence[Row]) -> list[StepRow]:
    """The rows of the one full step that was taken apart, one per warm-up; none where a grid of steps was measured."""
    steps = [row for row in of_kind(rows, StepRow) if row.status == "ok" and row.mode == "step"]
    same = {**steps[0].case, "warmup": None} if steps else {}
    return steps if all({**row.case, "warmup": None} == same for row in steps) else []


def analysed_step(rows: Sequence[Row]) -> StepRow | None:
    """The step that was taken apart: the row with the longest warm-up."""
    return max(full_steps(rows), key=lambda row: row.warmup or 0, default=None)


def is_same_step(step: Row, other: Row) -> bool:
    """True if `other` (a profile, a change, an allocation timeline) is of the step with the settings of `step`."""
    own = {name: value for name, value in other.case.items() if name != "change"}
    return bool(own) and all(name in step.case and step.case[name] == value for name, value in own.items())


def not_finite(rows: Sequence[Row]) -> list[Finding]:
    """The first row whose training loss stops being a number; files have None for such a loss."""
    for row in [*full_steps(rows), *changes(rows)]:
        losses = row.samples.get("training_loss", ())
        broken = next((at for at, loss in enumerate(losses, start=1) if loss is None or not math.isfinite(loss)), None)
        if broken is not None:
            which = row.change if isinstance(row, ChangeRow) else f"{row.workload} in {row.precision}"
            said = (
                "The loss is not finite from step {step} of {steps} on ({row}): the steps that are timed do not train. "
                "Look at the learning rate, the batch and the initial weights."
            )
            seen = ("phases", "correctness", "ladder")
            claim = Claim("The loss is not finite from step {step} on", seen, severity="alarm")
            return [found("loss.not-finite", said, claim, step=broken, steps=len(losses), row=which)]
    return []


def phase_findings(rows: Sequence[Row]) -> list[Finding]:
    """The longest phases, with a remark where backward and forward do not fit together."""
    step = analysed_step(rows)
    if step is None:
        return []
    times = {name: step.times[name].median for name in PHASES}
    total = sum(times.values())
    first, second = sorted(times, key=times.__getitem__, reverse=True)[:2]
    ratio, expected = times["backward"] / times["forward"], expected_ratio(step, rows)
    is_odd = expected is not None and not ODD[0] * expected <= ratio <= ODD[1] * expected
    said = (
        f"{first.capitalize()} dominates: {{first_share:.0%}} of the phases together ({{first_ms:ms}} of "
        "{total_ms:ms}), then {second} with {second_share:.0%}."
    )
    longest = "The longest phase is {first}, {first_share:.0%} of the step"
    claim = Claim(longest, ("phases",), ms=times[first], severity="aside")
    if is_odd:
        odd = "Backward takes {backward_over_forward:.1f}× forward, {expected_backward_over_forward:.2g}× expected"
        claim = Claim(odd, ("phases",), ms=times["backward"])
        chunked, recomputes = step.loss == "chunked", step.checkpointing not in (None, "selective")
        under = " and ".join(["with checkpointing"] * recomputes + ["with a chunked loss"] * chunked)
        said += (
            " Backward takes {backward_over_forward:.1f}× forward, where matmuls alone would make it "
            f"{{expected_backward_over_forward:.2g}}×{f' {under}' if under else ''}: look there first (memory "
            "spilling, a slow backward kernel, or a forward bound by launches)."
        )
    shares = {"first_share": times[first] / total, "second_share": times[second] / total}
    figures: dict[str, Scalar] = {"first": first, "second": second, "first_ms": times[first], **shares}
    figures |= {"total_ms": total, "backward_over_forward": ratio, "expected_backward_over_forward": expected}
    return [found("phases.longest", said, claim, is_odd=is_odd, **figures)]


def expected_ratio(step: StepRow, rows: Sequence[Row]) -> float | None:
    """Backward over forward if matrix products took all the time and ran equally fast; None where that is unknown.

    A chunked loss moves the head's product from forward to the loss, and backward computes it once more; every-1 runs
    the blocks once more in backward. Both need the FLOPs of the model's parts, which only our models have. Selective
    checkpointing computes no product twice.
    """
    is_chunked, recomputes = step.loss == "chunked", step.checkpointing not in (None, "selective")
    case = (step.workload, step.batch, step.context)
    facts = next((row for row in of_kind(rows, WorkloadRow) if (row.workload, row.batch, row.context) == case), None)
    if facts is not None and facts.trainable_parameters != facts.parameters:
        return None  # frozen weights need no gradient
    if step.loss == "fused":
        return None  # the loss computes gradients, which are no part of either
    if not is_chunked and not recomputes:
        return BACKWARD_OVER_FORWARD
    if facts is None or (recomputes and not str(step.checkpointing).startswith("every-")):
        return None
    parts, head = (facts.projections_tflop, facts.feed_forward_tflop, facts.attention_tflop), facts.head_tflop
    if head is None or None in parts:
        return None
    blocks = sum(map(numeric, parts))
    backward = BACKWARD_OVER_FORWARD * (blocks + head) + blocks * recomputes + head * is_chunked
    return backward / (blocks + head * (not is_chunked))


def utilisation(rows: Sequence[Row]) -> list[Finding]:
    """The step's rate beside that of a large matrix product in its precision."""
    step = analysed_step(rows)
    rates = {row.precision: row.tflops for row in of_kind(rows, CeilingRow) if row.operation == "matmul"}
    if step is None or step.achieved_tflops is None or (ceiling := rates.get(step.precision)) is None:
        return []
    share = step.achieved_tflops / ceiling
    figures: dict[str, Scalar] = {"achieved_tflops": step.achieved_tflops, "ceiling_tflops": ceiling, "share": share}
    claim, seen, whole = Claim(), ("ceilings", "phases"), step.step_ms or 0.0
    if share < PRODUCTS_SET_PACE:
        judgement, judged = "low", "most of the step is not matmuls at full speed."
        said = "Most of the step is not matmuls at full speed"
        claim = Claim(said, seen, ms=(1 - share) * whole, severity="aside")
    elif share > 1:
        judgement, judged = "beyond", "more than can be, so the machine was slower when the large product was measured."
    else:
        judgement, judged = "high", "matmuls set the pace"
        claim = Claim("Matmuls set the pace", seen, ms=share * whole)
        entry = PRECISIONS.get(str(step.precision))  # None for one that only another version knows
        is_wide, end = entry is not None and not entry.is_half, "."
        if is_wide:
            lower = f"utilisation.high-{step.precision}"
            end, gains = advised("; a lower precision moves that limit.", rows, lower, step.workload)
            figures |= gains
        judged += end
    said = (
        "The step reaches {achieved_tflops:n} TFLOP/s, {share:.0%} of a large "
        f"{literal(str(step.precision))} matmul’s rate on this device ({{ceiling_tflops:n}} TFLOP/s): {judged}"
    )
    return [found(f"utilisation.{judgement}", said, claim, **figures)]


def uncounted(rows: Sequence[Row]) -> list[Finding]:
    """Operators of a user's step that are in no count of its FLOPs."""
    step = analysed_step(rows)
    if step is None or not step.flops_uncounted:
        return []
    said = "{uncounted:list} may multiply matrices and is in no count of FLOPs: the step’s rate is not told."
    return [found("utilisation.uncounted", said, uncounted=step.flops_uncounted)]


def launch_bound(rows: Sequence[Row]) -> list[Finding]:
    """Told by the forward phase, which starts with an empty queue; later ones start when the host is already ahead."""
    step = analysed_step(rows)
    if step is None or "forward_issue" not in step.times:
        return []
    issue, forward = step.times["forward_issue"].median, step.times["forward"].median
    if issue < LAUNCH_BOUND_ISSUE * forward:
        return []
    is_compiled = step.compile != "off"
    result, gains = ("", {}) if is_compiled else tried(rows, "launches.bound", step.workload)
    compiling = "" if is_compiled or result else ", torch.compile"
    said = (
        "The host needs {forward_issue_ms:ms} to launch the forward pass, which takes {forward_ms:ms}: launches set "
        f"its pace, not the GPU. Larger batches{compiling} or CUDA graphs help; faster kernels will not.{result}"
    )
    figures = {"forward_issue_ms": issue, "forward_ms": forward, "is_compiled": is_compiled, **gains}
    claimed, mend = "Forward is launch-bound", advice.COMPILED_BLOCKS
    claim = Claim(claimed, ("phases",), issue, action="" if is_compiled else mend)
    return [found("launches.bound", said, claim, **figures)]


def cold_mean(rows: Sequence[Row]) -> list[Finding]:
    """Says by how much the first step raises the mean of its own run, where it is slower than every warm step."""
    steps = {row.warmup: row for row in full_steps(rows)}
    if len(steps) < 2 or 0 not in steps:
        return []
    cold, warm = steps[0], steps[max(steps, key=numeric)]
    mean, first, n = numeric(cold.times["step"].mean), numeric(cold.first_step_ms), cold.n or 1
    if n < 2 or first <= (warm.times["step"].max or math.inf):
        return []
    excess = mean / ((n * mean - first) / (n - 1)) - 1  # the other rows may be processes at another load
    if excess < COLD_MEAN_EXCESS:
        return []
    said = (
        "Without warm-up the mean would be {excess:.0%} too high: the first step took {first_step_ms:ms}, a warm one "
        "takes {step_ms:ms}."
    )
    high, ms = "Without warm-up the mean would be {excess:.0%} too high", excess * (warm.step_ms or 0.0)
    claim = Claim(high, ("warmup", "warm-up"), ms=ms, is_part=False, severity="aside")
    figures = {"excess": excess, "first_step_ms": cold.first_step_ms, "step_ms": warm.step_ms}
    return [found("warm-up.needed", said, claim, **figures)]


RULES = (not_finite, phase_findings, utilisation, uncounted, launch_bound, cold_mean)


def phases(rows: Sequence[Row]) -> Section | None:
    """The analysed step, phase by phase."""
    step = analysed_step(rows)
    if step is None:
        return None
    names = [name for name in PHASES if name in step.times]
    total = sum(step.times[name].median for name in names)
    has_issue = any(f"{name}_issue" in step.times for name in names)
    table_rows = [_phase_row(step, name, total, has_issue) for name in (*names, "step")]
    titles = ["Phase", "Median, ms [95 %]", "Of the phases", "Mean ± std, ms", "Min–max, ms", "Outliers"]
    titles += ["To issue, ms"] if has_issue else []
    lead = (
        f"Median of {number(step.n)} steps after {number(step.warmup)} warm-up steps, {_settings(step)}; brackets are "
        "95 % intervals of the median."
    )
    if "wait" in step.times:
        lead += (
            " Phases are stamped by the GPU; issuing is what the host needs to launch their work. "
            f"Of the whole step, the host waited {number(step.times['wait'].median)} ms for the GPU."
        )
    facts = ("tokens_per_s", "achieved_tflops", "utilisation", "wait_ms", "batch_ms", "first_step_ms", "model_tflop")
    table = Table("The step and its phases", titles, table_rows, name="phases")
    known = Facts(facts_of(step, facts), name="step")
    return section("phases", "Phases", "Where the step’s time goes", lead, table, known)


def _phase_row(step: StepRow, name: str, total: float, has_issue: bool) -> TableRow:
    times = step.times.get(name) or Times(0.0)
    cells = [
        Cell("whole step" if name == "step" else name, is_text=True),
        median_cell(step, name),
        Cell(f"{times.median / total:.0%}" if name != "step" else ""),
        Cell(f"{number(times.mean)} ± {number(times.std, 2)}", times.mean, f"{name}_mean_ms"),
        Cell(f"{number(times.min)}–{number(times.max)}", times.min, f"{name}_min_ms"),
        value_cell(step, f"{name}_outliers"),
    ]
    cells += [value_cell(step, f"{name}_issue_ms")] if has_issue else []
    return TableRow(cells, name, is_strong=name == "step")


def _settings(step: StepRow) -> str:
    forms = {"batch": "batch {}", "context": "context {}", "precision": "{}", "compile": "compiled {}"}
    forms |= {"compile": "not compiled"} if step.compile == "off" else {}
    forms |= {"attention": "{} attention"}
    return ", ".join(form.format(step.case[name]) for name, form in forms.items() if name in step.case)


def warmup(rows: Sequence[Row]) -> Section | None:
    """Section on what leaving out the first steps changes."""
    steps = list({row.warmup: row for row in full_steps(rows)}.values())
    if len(steps) < 2:
        return None
    charts = []
    cold = min(steps, key=lambda row: row.warmup or 0)  # the others may be runs of their own
    if y := list(cold.samples.get("step", ())):
        x = [float((cold.warmup or 0) + index) for index in range(1, len(y) + 1)]
        is_steep, line = max(y) > 4 * min(y), Series("step", x, y, "accent", markers=True)
        caption = "The first step also pays for allocation, tuning and loading of kernels."
        caption += " The scale is logarithmic." if is_steep else ""
        drawn = partial(lines, [line], "step", "ms", log=is_steep)
        charts.append(Chart("steps-in-order", "Every step, in the order it ran", caption, drawn))
    return section("warm-up", "Warm-up", "What warm-up changes", "", Charts(charts), page_table(WARMUP, steps))


def grid(rows: Sequence[Row]) -> Section | None:
    """All measured steps, where they are more than the analysed one."""
    measured, step = of_kind(rows, StepRow), analysed_step(rows)
    others = [row for row in measured if step is None or {**row.case, "warmup": 0} != {**step.case, "warmup": 0}]
    if not others:
        return None
    return section("grid", "Grid", "All measured steps", "", page_table(STEPS, measured, "grid"))


SECTIONS = (phases, warmup, grid)
