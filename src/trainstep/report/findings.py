"""Findings: what the figures say, in sentences, by rules. Each rule looks at records and says one thing, or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainstep.kinds import CeilingRow, RungRow
from trainstep.precision import PRECISIONS
from trainstep.records import Row, of_kind
from trainstep.report.analysed import analysed_step, full_steps
from trainstep.report.finding import Finding, in_gib, in_ms, listed
from trainstep.report.formula_findings import formula_findings
from trainstep.report.kernel_findings import kernel_findings
from trainstep.report.memory_findings import memory_findings
from trainstep.report.noise_findings import noise_findings
from trainstep.report.numbers import number, numeric
from trainstep.report.peak_findings import peak_findings
from trainstep.report.phase_findings import phase_findings
from trainstep.report.subjects import parallel
from trainstep.report.subjects.plan import findings as plan_findings
from trainstep.report.subjects.sweep import findings as sweep_findings

LAUNCH_BOUND_ISSUE = 0.95
"""A GPU forward whose launches alone take more than this share of its time is bound by the host."""
COLD_MEAN_EXCESS = 0.05
"""Leaving out warm-up is remarked on when it changes the mean by more than this share."""
LOW_UTILISATION = 0.35
"""Below this share of the matmul ceiling a step leaves much to win."""


def findings(records: Sequence[Row]) -> list[Finding]:
    """All that the rules find, the most important first."""
    found = [rule(records) for rule in _RULES]
    return [finding for each in found for finding in each]


def kept_rungs(records: Sequence[Row]) -> list[Row]:
    """The rungs the ladder was built on, the baseline first."""
    return [row for row in of_kind(records, RungRow) if row.values.get("kept")]


def recommended_flags(records: Sequence[Row]) -> str:
    """The settings of the last kept rung that differ from the baseline's, as flags to paste; empty if none was kept."""
    kept = kept_rungs(records)
    if not kept:
        return ""
    start, end = kept[0].case, kept[-1].case
    names = ("precision", "attention", "optimizer", "compile", "loss")
    return " ".join(f"--{name} {end[name]}" for name in names if end.get(name) != start.get(name))


def _gain(records: Sequence[Row]) -> list[Finding]:
    kept = kept_rungs(records)
    if not kept:
        return []
    if len(kept) == 1:
        return [Finding("gain", "No change on the ladder made the step faster: the baseline is the best found.")]
    first, last = kept[0].values, kept[-1].values
    names_kept = [str(row.case["rung"]) for row in kept[1:]]
    names = listed(names_kept)
    low, high = numeric(last["speedup_low"]), numeric(last["speedup_high"])
    interval = f"(95 % interval {low:.2f}–{high:.2f})"
    proof = (
        f"with loss and gradients within the error budget (off by {numeric(last['gradient_error']):.1g} of "
        f"{numeric(last['error_budget']):.1g} allowed)"
    )
    if low <= 1:
        peaks = [first.get("peak_gib"), last.get("peak_gib")]
        memory = "" if None in peaks else f": peak memory {in_gib(numeric(peaks[0]))} → {in_gib(numeric(peaks[1]))}"
        sentence = (
            f"{names[0].upper()}{names[1:]}: no difference in time that these samples can show {interval}, kept for "
            f"what else {'they save' if len(names_kept) > 1 else 'it saves'}{memory}, {proof}."
        )
    else:
        verb = "make" if len(names_kept) > 1 else "makes"
        sentence = (
            f"{names[0].upper()}{names[1:]} {verb} the step {numeric(last['speedup']):.2f}× faster {interval}: "
            f"{in_ms(first['step_ms'])} → {in_ms(last['step_ms'])}, {proof}."
        )
    return [Finding("gain", sentence)]


def _diverged(records: Sequence[Row]) -> list[Finding]:
    """The first row whose training loss stops being a number; records have None for such a loss."""
    for row in [*full_steps(records), *of_kind(records, RungRow)]:
        losses = row.samples.get("training_loss", ())
        broken = next((at for at, loss in enumerate(losses, start=1) if loss is None or not math.isfinite(loss)), None)
        if broken is not None:
            which = row.case.get("rung") or f"{row.case['workload']} in {row.case['precision']}"
            sentence = (
                f"The loss is not finite from step {broken} of {len(losses)} on ({which}): the steps that are timed do "
                "not train. Look at the learning rate, the batch and the initial weights."
            )
            return [Finding("loss", sentence)]
    return []


def _utilisation(records: Sequence[Row]) -> list[Finding]:
    step, ceilings = analysed_step(records), of_kind(records, CeilingRow)
    if step is None or step.values.get("achieved_tflops") is None:
        return []
    achieved = numeric(step.values["achieved_tflops"])
    ceiling = next((row for row in ceilings if row.case["what"] == f"matmul {step.case['precision']}"), None)
    if ceiling is None:
        return []
    share = achieved / numeric(ceiling.values["tflops"])
    if share < LOW_UTILISATION:
        judgement = "most of the step is not matrix products at full speed"
    elif share > 1:
        judgement = "more than can be, so the machine was slower when the large product was measured"
    else:
        judgement = "the matrix products set the pace"
        judgement += (
            "; a lower precision moves that limit" if not PRECISIONS[str(step.case["precision"])].is_half else ""
        )
    return [
        Finding(
            "utilisation",
            f"The step reaches {number(achieved)} TFLOP/s, {share:.0%} of what a large {step.case['precision']} matrix "
            f"product reaches on this device ({number(ceiling.values['tflops'])} TFLOP/s): {judgement}.",
        )
    ]


def _launch_bound(records: Sequence[Row]) -> list[Finding]:
    """Told by the forward phase, which starts with an empty queue; later ones start when the host is already ahead."""
    step = analysed_step(records)
    if step is None or step.values.get("forward_issue_ms") is None:
        return []
    issue, forward = numeric(step.values["forward_issue_ms"]), numeric(step.values["forward_ms"])
    if issue < LAUNCH_BOUND_ISSUE * forward:
        return []
    compiling = ", torch.compile" if step.case.get("compile") == "off" else ""
    return [
        Finding(
            "launches",
            f"The host needs {in_ms(issue)} to launch the forward pass, which takes {in_ms(forward)}: launches set the "
            f"pace, not the GPU. Larger batches{compiling} or CUDA graphs help; faster kernels will not.",
        )
    ]


def _warmup(records: Sequence[Row]) -> list[Finding]:
    rows = {row.case["warmup"]: row for row in full_steps(records)}
    if len(rows) < 2 or 0 not in rows:
        return []
    cold, warm = rows[0], rows[max(rows, key=numeric)]
    excess = numeric(cold.values["step_mean_ms"]) / numeric(warm.values["step_mean_ms"]) - 1
    first = numeric(cold.values["first_step_ms"])
    if excess < COLD_MEAN_EXCESS:
        return []
    return [
        Finding(
            "warm-up",
            f"Without warm-up the mean would be {excess:.0%} too high: the first step took {in_ms(first)}, "
            f"a warm one takes {in_ms(warm.values['step_ms'])}.",
        )
    ]


def _rejected(records: Sequence[Row]) -> list[Finding]:
    found = []
    for row in of_kind(records, RungRow):
        name, called = row.case["rung"], row.values.get("verdict")
        if row.status != "ok":
            found.append(Finding("ladder", f"Not used: {name} ({row.status}): {row.reason}."))
        elif called == "slower":
            gain = numeric(row.values["gain"])
            found.append(Finding("ladder", f"Not used: {name} makes the step {1 / gain:.2f}× slower here."))
        elif called == "inconclusive" and not row.values["kept"]:
            found.append(Finding("ladder", f"Not used: {name} makes no difference that these samples can show."))
    return found


_RULES: tuple[Callable[[Sequence[Row]], list[Finding]], ...] = (
    _gain,
    _diverged,
    lambda records: phase_findings(analysed_step(records), records),
    _utilisation,
    _launch_bound,
    formula_findings,
    kernel_findings,
    *parallel.RULES,
    sweep_findings,
    lambda records: peak_findings(analysed_step(records), records),
    _warmup,
    _rejected,
    memory_findings,
    plan_findings,
    lambda records: noise_findings(analysed_step(records), records),
)
