"""Sentences about memory: peaks, precision, the residual stream, the largest allocations, checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.source import figure, one, results
from texts.wording import percent, times
from trainstep.records import Row
from trainstep.report.finding import in_gib, in_ms
from trainstep.report.numbers import number


def peak(context: int, mode: str, precision: str = "fp32") -> Row:
    """A row of the peaks of 2.7B."""
    return one("h200-memory", "peak", context=context, mode=mode, precision=precision)


def timeline() -> str:
    """What the timeline of a step shows that forward's does not."""
    step = one("h200-allocations", "memory-timeline")
    owners = {str(row.case["owner"]): row for row in results("h200-allocations", "owner") if row.case["part"] == "all"}
    inference = peak(512, "forward")
    return (
        f"In inference memory rises and falls block by block over the weights, and ends where it began: "
        f"{in_gib(figure(inference, 'peak_gib'))} at its peak in fp32, {in_gib(figure(inference, 'at_rest_gib'))} at "
        "rest. In a training step it climbs through forward, as every block leaves what its backward needs, and comes "
        "down through backward while gradients take its place; the optimizer's part is flat. The peak of the step in "
        f"bf16, {in_gib(figure(step, 'peak_gib'))}, is in {step.values['peak_phase']}: "
        + ", ".join(f"{name} {percent(figure(row, 'share'))}" for name, row in list(owners.items())[:3])
        + "."
    )


def peaks() -> str:
    """Peaks by context, forward and step."""
    rows = {(context, mode): peak(context, mode) for context in (128, 256, 512, 2048) for mode in ("forward", "step")}
    told = ", ".join(
        f"{context} tokens {in_gib(figure(rows[context, 'forward'], 'peak_gib'))} and "
        f"{in_gib(figure(rows[context, 'step'], 'peak_gib'))}"
        for context in (128, 256, 512)
    )
    short, middle = (figure(rows[context, "step"], "peak_gib") for context in (128, 256))
    assert abs(short / middle - 1) < 0.01
    large = rows[2048, "step"]
    assert large.status == "out of memory"
    return (
        f"2.7B, batch 4, fp32, eager attention, forward alone and a whole step: {told}. At 2,048 tokens forward takes "
        f"{in_gib(figure(rows[2048, 'forward'], 'peak_gib'))} and the step does not fit: "
        f"{in_gib(figure(large, 'predicted_gib'))} by prediction. Up to 256 tokens the step's peak does not depend on "
        "the context: it is the moment when all gradients are there, beside weights and moments."
    )


def precision() -> str:
    """Mixed precision and memory."""
    contexts = (128, 512)
    told = []
    for context in contexts:
        pairs = [
            (figure(peak(context, mode), "peak_gib"), figure(peak(context, mode, "bf16"), "peak_gib"))
            for mode in ("forward", "step")
        ]
        told.append(
            f"at {context} tokens forward goes from {in_gib(pairs[0][0])} to {in_gib(pairs[0][1])}, the step from "
            f"{in_gib(pairs[1][0])} to {in_gib(pairs[1][1])}"
        )
    short, long = ([figure(peak(n, "step", name), "peak_gib") for name in ("fp32", "bf16")] for n in contexts)
    apart = abs(short[1] / short[0] - 1)
    assert apart < 0.005
    assert long[1] > long[0]
    blocks = [
        one("h200-residuals", "residual", part="first block", what="all", precision=name, compile="off")
        for name in ("fp32", "bf16")
    ]
    assert figure(blocks[1], "mib") > figure(blocks[0], "mib")
    return (
        f"It does not save any here: {'; '.join(told)}. At 128 tokens the step's two peaks, {percent(apart)} apart, "
        "are those of the gradients, which are fp32 in both. Autocast keeps fp32 weights and adds a bf16 copy of each "
        "that it casts. What half-width activations save, eager attention gives back by keeping its scores in both "
        f"widths: one block keeps {number(figure(blocks[1], 'mib'))} MiB for backward instead of "
        f"{number(figure(blocks[0], 'mib'))}. A fused attention, or weights in bf16, would save."
    )


def residual_stream() -> str:
    """The size of the residual stream's tensor."""
    row = one(
        "h200-residuals", "residual", part="residual stream", precision="fp32", what="input of the first block",
        compile="off",
    )  # fmt: skip
    block = one("h200-residuals", "residual", part="first block", what="all", precision="fp32", compile="off")
    assert figure(row, "mib") == figure(row, "formula_mib")
    return (
        f"batch · context · d_model · 4 bytes = 4 · 512 · 2,560 · 4 / 2²⁰ = {number(figure(row, 'formula_mib'))} MiB "
        f"in fp32, and that is what was found. It is {percent(figure(row, 'mib') / figure(block, 'mib'))} of what one "
        "block keeps for backward, which is why keeping only this (checkpointing) does so much."
    )


def largest() -> str:
    """The largest allocations, and where they come from."""
    first = one("h200-allocations", "allocation", rank=1)
    return (
        f"{number(figure(first, 'mib'))} MiB each: the scores of one block in fp32, 4 · 32 heads · 512 · 512 · 4 "
        f"bytes. The largest is made by `{first.values['line']}` in "
        f"`{first.case.get('module') or first.values['module']}`, {figure(first, 'count'):.0f} times a step, once per "
        "block."
    )


def checkpointing() -> str:
    """The best policy at 2.7B."""
    rows = {str(row.case["checkpointing"]): row for row in results("h200-checkpointing", "checkpointing")}
    sizes = {name: figure(row, "peak_gib") for name, row in rows.items() if name.startswith("every-")}
    best = min(sizes, key=sizes.__getitem__)
    none, selective = rows["none"], rows["selective"]
    longer = [figure(row, "step_ms") / figure(none, "step_ms") for row in (rows[best], selective)]
    return (
        f"At 2.7B, 2,048 tokens, bf16 and fused attention, `{best}` takes the peak from "
        f"{in_gib(figure(none, 'peak_gib'))} to {in_gib(figure(rows[best], 'peak_gib'))} and the step from "
        f"{in_ms(figure(none, 'step_ms'))} to {in_ms(figure(rows[best], 'step_ms'))}, {times(longer[0])} as long. "
        f"`selective`, which recomputes no matrix product, peaks at {in_gib(figure(selective, 'peak_gib'))} for "
        f"{times(longer[1])} the time. The square root of the number of blocks is not the best distance: the peak is "
        "at the end of backward, where the inputs it would spare are gone already."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "memory-timeline": timeline,
    "memory-peaks": peaks,
    "memory-precision": precision,
    "residual-stream": residual_stream,
    "memory-largest": largest,
    "checkpointing": checkpointing,
}
