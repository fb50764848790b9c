"""The summary: what dominates, what to change, what was gained."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trainstep.records import Row, Scalar
from trainstep.report.analysed import analysed_step
from trainstep.report.blocks import Block, Cell, Flags, Headline, Section, Sentences
from trainstep.report.cells import get, gib, number, ratio_of, span
from trainstep.report.findings import findings, kept_rungs, recommended_flags
from trainstep.report.numbers import NONE, as_float


def summary(records: Sequence[Row]) -> Section | None:
    """What dominates, what to change, what was gained."""
    kept, step, found = kept_rungs(records), analysed_step(records), findings(records)
    blocks: list[Block] = []
    if kept:
        blocks.append(_gain_headline(kept))
    elif step is not None:
        blocks.append(_step_headline(step))
    flags = recommended_flags(records)
    if flags:
        blocks.append(Flags(re.split(r" (?=--)", flags), "What to change: add these flags to your run"))
    if found:
        topics: dict[str, list[str]] = {}
        for finding in found:
            topic = _TOPICS.get(finding.topic, finding.topic[:1].upper() + finding.topic[1:])
            topics.setdefault(topic, []).append(finding.sentence.removeprefix(f"{topic}: "))
        blocks.append(Sentences(topics))
    return Section("summary", "Summary", "Summary", "", blocks) if blocks else None


_TOPICS = {
    "gain": "Gain proven",
    "phases": "What dominates",
    "utilisation": "Utilisation",
    "launches": "Launches",
    "kernels": "Kernels",
    "memory": "Memory",
    "kept for backward": "Kept for backward",
    "checkpointing": "Checkpointing",
    "precision": "Precision",
    "warm-up": "Warm-up",
    "ladder": "Not used",
    "noise": "Noise",
}


def _gain_headline(kept: Sequence[Row]) -> Headline:
    first, last = kept[0], kept[-1]
    speedup = ratio_of(last, "speedup")
    interval = f", 95 % interval {speedup.low.text}–{speedup.high.text}×" if speedup.low and speedup.high else ""
    stats = [
        ("Step", _change(first, last, "step_ms", number, "ms"), "median"),
        ("Throughput", _change(first, last, "tokens_per_s", number, ""), "tokens/s"),
        ("Achieved", _change(first, last, "achieved_tflops", number, ""), "TFLOP/s" + _of_peak(last)),
        (
            "Peak memory",
            _change(first, last, "peak_gib", gib, ""),
            "of one step" + _unmeasured(first, last, "peak_gib"),
        ),
    ]
    if len(kept) == 1:
        return Headline(
            Cell(f"{number(first.values.get('step_ms'))} ms"),
            "per step: the baseline is the fastest found",
            "No change on the ladder made the step faster.",
            [(name, value, note) for name, value, note in stats if value],
        )
    error, budget = get(last, "gradient_error"), get(last, "error_budget")
    if error is not None and budget:
        stats.append(("Gradients", f"{number(error, 2)}", f"relative error, {number(budget, 2)} allowed"))
    is_faster = speedup.low is not None and (as_float(speedup.low.value) or 0) > 1
    return Headline(
        speedup,
        "faster, and the maths is still right" if is_faster else "the baseline’s speed, in less memory",
        f"{_change(first, last, 'step_ms', number, 'ms')} per step{interval}",
        [(name, value, note) for name, value, note in stats if value],
    )


def _of_peak(row: Row) -> str:
    share = get(row, "utilisation")
    return f", {share:.0%} of the device’s peak" if share is not None else ""


def _unmeasured(first: Row, last: Row, name: str) -> str:
    return ", – not measured" if (first.values.get(name) is None) != (last.values.get(name) is None) else ""


def _change(first: Row, last: Row, name: str, text: Callable[[Scalar], str], unit: str) -> str:
    """`196 → 146 ms`, the one value where nothing changed, or `196 ms → –` where only one is known."""
    values = [row.values.get(name) for row in (first, last)]
    if values[0] is None and values[1] is None:
        return ""
    if None in values:
        return " → ".join(NONE if value is None else f"{text(value)} {unit}".strip() for value in values)
    shown = [text(value) for value in values]
    units = {part.rpartition(" ")[2] for part in shown}
    if text is gib and len(units) == 1:
        shown, unit = [part.rpartition(" ")[0] for part in shown], units.pop()
    return f"{' → '.join(dict.fromkeys(shown))} {unit}".strip()


def _step_headline(step: Row) -> Headline:
    stats = [
        ("Throughput", number(step.values.get("tokens_per_s")), "tokens/s"),
        ("Achieved", number(step.values.get("achieved_tflops")), "TFLOP/s" + _of_peak(step)),
        ("Peak memory", gib(step.values.get("peak_gib")), "of one step"),
    ]
    return Headline(
        Cell(f"{number(step.values.get('step_ms'))} ms", step.values.get("step_ms"), "step_ms"),
        "per training step",
        f"median of {number(step.values.get('n'))} steps: {span(step, 'step')}",
        [stat for stat in stats if stat[1] != NONE],
    )
