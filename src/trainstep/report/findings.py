"""Findings: what the figures say, in sentences, by rules. Each rule looks at records and says one thing, or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainstep.report.finding import Finding, in_gib, in_ms, listed
from trainstep.report.formula_findings import formula_findings
from trainstep.report.kernel_findings import kernel_findings
from trainstep.report.memory_findings import memory_findings
from trainstep.report.noise_findings import noise_findings
from trainstep.report.numbers import number, numeric
from trainstep.report.parallel_findings import parallel_findings
from trainstep.report.plan_findings import plan_findings
from trainstep.report.records import Record, of_kind
from trainstep.report.sweep_findings import sweep_findings

PHASE_NAMES = ("forward", "loss", "backward", "optimizer")
LAUNCH_BOUND_ISSUE = 0.95
"""A GPU forward whose launches alone take more than this share of its time is bound by the host."""
COLD_MEAN_EXCESS = 0.05
"""Leaving out warm-up is remarked on when it changes the mean by more than this share."""
LOW_UTILISATION = 0.35
"""Below this share of the matmul ceiling a step leaves much to win."""


def findings(records: Sequence[Record]) -> list[Finding]:
    """All that the rules find, the most important first."""
    found = [rule(records) for rule in _RULES]
    return [finding for each in found for finding in each]


def _full_steps(records: Sequence[Record]) -> list[Record]:
    """The rows of the one full step that was taken apart, one per warm-up; none where a grid of steps was measured."""
    rows = [row for row in of_kind(records, "step") if row.status == "ok" and row.case["mode"] == "step"]
    cases = {tuple((name, value) for name, value in row.case.items() if name != "warmup") for row in rows}
    return rows if len(cases) == 1 else []


def analysed_step(records: Sequence[Record]) -> Record | None:
    """The step that was taken apart: the row with the longest warm-up."""
    return max(_full_steps(records), key=lambda row: numeric(row.case["warmup"]), default=None)


def kept_rungs(records: Sequence[Record]) -> list[Record]:
    """The rungs the ladder was built on, the baseline first."""
    return [row for row in of_kind(records, "rung") if row.values.get("kept")]


def recommended_flags(records: Sequence[Record]) -> str:
    """The settings of the last kept rung that differ from the baseline's, as flags to paste; empty if none was kept."""
    kept = kept_rungs(records)
    if not kept:
        return ""
    start, end = kept[0].case, kept[-1].case
    names = ("precision", "attention", "optimizer", "compile", "loss")
    return " ".join(f"--{name} {end[name]}" for name in names if end.get(name) != start.get(name))


def _gain(records: Sequence[Record]) -> list[Finding]:
    kept = kept_rungs(records)
    if not kept:
        return []
    if len(kept) == 1:
        return [Finding("gain", "No change on the ladder made the step faster: the baseline is the best found.")]
    first, last = kept[0].values, kept[-1].values
    names = listed([str(row.case["rung"]) for row in kept[1:]])
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
            f"what else they save{memory}, {proof}."
        )
    else:
        verb = "make" if len(kept) > 2 else "makes"
        sentence = (
            f"{names[0].upper()}{names[1:]} {verb} the step {numeric(last['speedup']):.2f}× faster {interval}: "
            f"{in_ms(first['step_ms'])} → {in_ms(last['step_ms'])}, {proof}."
        )
    return [Finding("gain", sentence)]


def _diverged(records: Sequence[Record]) -> list[Finding]:
    """The first row whose training loss stops being a number; records have None for such a loss."""
    for row in [*_full_steps(records), *of_kind(records, "rung")]:
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


def _dominance(records: Sequence[Record]) -> list[Finding]:
    step = analysed_step(records)
    if step is None:
        return []
    times = {name: numeric(step.values[f"{name}_ms"]) for name in PHASE_NAMES}
    total = sum(times.values())
    first, second = sorted(times, key=times.__getitem__, reverse=True)[:2]
    ratio = times["backward"] / times["forward"]
    remark = ""
    if not 1.5 <= ratio <= 3.5:
        remark = (
            f" Backward takes {ratio:.1f}× forward, where the matrix products alone would make it 2×: "
            "look there first (memory spilling, a slow backward kernel, or a forward bound by launches)."
        )
    return [
        Finding(
            "phases",
            f"{first.capitalize()} dominates: {times[first] / total:.0%} of the step "
            f"({in_ms(times[first])} of {in_ms(total)}), then {second} with {times[second] / total:.0%}.{remark}",
        )
    ]


def _utilisation(records: Sequence[Record]) -> list[Finding]:
    step, ceilings = analysed_step(records), of_kind(records, "ceiling")
    if step is None or step.values.get("achieved_tflops") is None:
        return []
    achieved = numeric(step.values["achieved_tflops"])
    ceiling = next((row for row in ceilings if row.case["what"] == f"matmul {step.case['precision']}"), None)
    if ceiling is None:
        return []
    share = achieved / numeric(ceiling.values["tflops"])
    judgement = (
        "most of the step is not matrix products at full speed"
        if share < LOW_UTILISATION
        else "the matrix products set the pace; a lower precision moves that limit"
    )
    return [
        Finding(
            "utilisation",
            f"The step reaches {number(achieved)} TFLOP/s, {share:.0%} of what a large {step.case['precision']} matrix "
            f"product reaches on this device ({number(ceiling.values['tflops'])} TFLOP/s): {judgement}.",
        )
    ]


def _launch_bound(records: Sequence[Record]) -> list[Finding]:
    """Told by the forward phase, which starts with an empty queue; later ones start when the host is already ahead."""
    step = analysed_step(records)
    if step is None or step.values.get("forward_issue_ms") is None:
        return []
    issue, forward = numeric(step.values["forward_issue_ms"]), numeric(step.values["forward_ms"])
    if issue < LAUNCH_BOUND_ISSUE * forward:
        return []
    return [
        Finding(
            "launches",
            f"The host needs {in_ms(issue)} to launch the forward pass, which takes {in_ms(forward)}: launches set the "
            "pace, not the GPU. Larger batches, torch.compile or CUDA graphs help; faster kernels will not.",
        )
    ]


def _memory(records: Sequence[Record]) -> list[Finding]:
    step = analysed_step(records)
    if step is None or step.values.get("peak_gib") is None:
        return []
    values = step.values
    peak, rest = numeric(values["peak_gib"]), numeric(values["at_rest_gib"])
    known = [name for name in PHASE_NAMES if values.get(f"{name}_peak_gib") is not None]
    phase = max(known, key=lambda name: numeric(values[f"{name}_peak_gib"]))
    share = (peak - rest) / peak
    ours = "a fused attention, a chunked loss, " if step.case.get("batch") is not None else ""  # flags of our models
    advice = (
        f"activations and temporaries own most of it, so {ours}activation checkpointing or a smaller batch shrink it"
        if share > 0.5
        else "weights and optimizer state own most of it, so sharding or a smaller optimizer state shrink it"
    )
    return [
        Finding(
            "memory",
            f"Memory peaks in {phase} at {in_gib(peak)}; {in_gib(rest)} of that is there before the step "
            f"(weights, optimizer state and the batch), {share:.0%} comes and goes with it: {advice}.",
        )
    ]


def _warmup(records: Sequence[Record]) -> list[Finding]:
    rows = {row.case["warmup"]: row for row in _full_steps(records)}
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


def _rejected(records: Sequence[Record]) -> list[Finding]:
    found = []
    for row in of_kind(records, "rung"):
        name, called = row.case["rung"], row.values.get("verdict")
        if row.status != "ok":
            found.append(Finding("ladder", f"Not used: {name} ({row.status}): {row.reason}."))
        elif called == "slower":
            gain = numeric(row.values["gain"])
            found.append(Finding("ladder", f"Not used: {name} makes the step {1 / gain:.2f}× slower here."))
        elif called == "inconclusive" and not row.values["kept"]:
            found.append(Finding("ladder", f"Not used: {name} makes no difference that these samples can show."))
    return found


_RULES: tuple[Callable[[Sequence[Record]], list[Finding]], ...] = (
    _gain,
    _diverged,
    _dominance,
    _utilisation,
    _launch_bound,
    formula_findings,
    kernel_findings,
    parallel_findings,
    sweep_findings,
    _memory,
    _warmup,
    _rejected,
    memory_findings,
    plan_findings,
    lambda records: noise_findings(analysed_step(records), records),
)
