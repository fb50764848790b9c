"""Sentences about whole steps: sizes, warm-up, precision, compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.source import figure, one, results
from texts.wording import percent, span, times
from trainstep import config
from trainstep.plan.roofline import OPTIMIZER_BYTES
from trainstep.records import Row
from trainstep.report.finding import in_ms
from trainstep.report.numbers import number

SIZES = ("small", "medium", "large", "xl", "2.7B")


def step(size: str, precision: str = "fp32", compiled: str = "off") -> Row:
    """The row of the grid of sizes."""
    return one("h200-step-sizes", "step", workload=size, precision=precision, compile=compiled)


def step_ms(size: str, precision: str = "fp32", compiled: str = "off") -> float:
    """Its median step."""
    return figure(step(size, precision, compiled), "step_ms")


def benchmark() -> str:
    """Forward and backward by size, and how they scatter."""
    told = [
        f"{size} {in_ms(figure(step(size), 'forward_mean_ms'))} and {in_ms(figure(step(size), 'backward_mean_ms'))}"
        for size in ("small", "large", "2.7B")
    ]
    ratios = [figure(step(size), "backward_mean_ms") / figure(step(size), "forward_mean_ms") for size in SIZES]
    scatter = [
        figure(step(size), f"{phase}_std_ms") / figure(step(size), f"{phase}_mean_ms")
        for size in SIZES
        for phase in ("forward", "backward")
    ]
    assert max(scatter) < 0.005
    return (
        f"Forward and backward in fp32, eager, batch 4, context 512: {', '.join(told)}. Backward takes {span(ratios)} "
        "times forward, about the two that the matrix products ask for. The standard deviation of ten steps is at "
        f"most {100 * max(scatter):.2g}% of the mean: once warm, a GPU that is not starved repeats itself."
    )


def warmup() -> str:
    """Means without warm-up, with one step, with five."""
    found = []
    medians_apart = 0.0
    for size in ("small", "2.7B"):
        rows = {row.case["warmup"]: row for row in results(f"h200-warmup-{size}")}
        none, single, five = (rows[count] for count in (0, 1, 5))
        medians = [figure(row, "step_ms") for row in rows.values()]
        medians_apart = max(medians_apart, max(medians) / min(medians) - 1)
        assert abs(figure(single, "step_mean_ms") / figure(five, "step_mean_ms") - 1) < 0.01
        found.append(
            f"{size} averages {in_ms(figure(none, 'step_mean_ms'))} ± {number(figure(none, 'step_std_ms'))} without "
            f"warm-up and {in_ms(figure(five, 'step_mean_ms'))} ± {number(figure(five, 'step_std_ms'))} after five "
            f"steps, as its first step takes {in_ms(figure(none, 'first_step_ms'))}"
        )
    return (
        f"In fp32, {'; '.join(found)}. The first step creates the CUDA context's handles, loads kernels, lets "
        "the caching allocator ask the driver for its memory, and allocates the optimizer's state. One step of warm-up "
        "gives the same mean as five here, to within 1%: everything is paid once. Compiled code, or a model whose "
        "clocks have yet to rise, needs more, so the default is five. The medians of all rows are the same to within "
        f"{percent(medians_apart)}: one outlier of ten does not move them."
    )


def precision() -> str:
    """fp32 against bf16 autocast, by size."""
    gains = {size: step_ms(size) / step_ms(size, "bf16") for size in SIZES}
    phases = {
        name: figure(step("2.7B"), f"{name}_ms") / figure(step("2.7B", "bf16"), f"{name}_ms")
        for name in ("forward", "backward", "optimizer")
    }
    assert list(gains.values()) == sorted(gains.values())
    assert abs(phases["optimizer"] - 1) < 0.02
    small = step("small", "bf16")
    assert figure(small, "forward_issue_ms") > 0.95 * figure(small, "forward_ms")
    told = ", ".join(f"{size} {number(gain)}×" for size, gain in gains.items())
    return (
        f"bf16 autocast makes the whole step faster by {told}: the larger the model, the more of its step is matrix "
        f"products, and those move from ordinary float32 units to tensor cores. At 2.7B forward is "
        f"{times(phases['forward'])} as fast and backward {times(phases['backward'])}; the optimizer, which works on "
        "float32 weights in both, takes as long as before. small gains least because launching its kernels takes as "
        "long as its whole bf16 forward."
    )


def compiled() -> str:
    """torch.compile of the blocks, by size and precision."""
    gains = {
        kind: {size: step_ms(size, kind) / step_ms(size, kind, "blocks") for size in SIZES} for kind in ("fp32", "bf16")
    }
    assert all(gains["bf16"][size] > gains["fp32"][size] > 1 for size in SIZES)
    optimizer = figure(step("2.7B", "bf16"), "optimizer_ms") / figure(step("2.7B", "bf16", "blocks"), "optimizer_ms")
    assert abs(optimizer - 1) < 0.02
    return (
        f"Compiling the blocks makes the step {span(gains['fp32'].values())} times faster in fp32 and "
        f"{span(gains['bf16'].values())} times in bf16. It fuses what lies between the matrix products; in fp32 these "
        "take most of the time and stay as they are. The optimizer does not change, as it is not compiled."
    )


def limits() -> str:
    """What limits `large` at the top of its ladder."""
    top = [row for row in results("h200-analyze-large", "rung") if row.values["kept"]][-1]
    copied = figure(one("h200-analyze-large", "ceiling", what="copy"), "gb_s")
    each = OPTIMIZER_BYTES[str(top.case["optimizer"])]
    moved = 1e-9 * each * config.SIZES["large"].num_parameters / (1e-3 * figure(top, "optimizer_ms"))
    assert moved > 0.75 * copied
    utilisation = figure(top, "utilisation")
    assert utilisation < 0.5
    return (
        f"The optimizer is near what memory bandwidth allows: it reads and writes {each} bytes per parameter, at "
        f"{percent(moved / copied)} of the speed of a large copy. The rest is matrix products of few rows, and only "
        f"{percent(utilisation)} of the GPU's peak is used. With so few tokens per step every weight is cast to bf16 "
        "and read for little work, so a larger batch is what would raise utilisation next."
    )


def accumulation() -> str:
    """0.01 added a thousand times."""
    sums = {
        (str(row.case["accumulator"]), str(row.case["addend"])): f"{figure(row, 'total'):.4f}"
        for row in results("cpu-dtypes", "accumulation")
    }
    assert sums["fp32", "fp16"] == sums["fp32", "fp16 → fp32"]
    return (
        f"A thousand times 0.01 is {sums['fp32', 'fp32']} in fp32, {sums['fp16', 'fp16']} in fp16, and "
        f"{sums['fp32', 'fp16']} if fp16 addends go into an fp32 sum, whether or not they are cast first. The narrow "
        "running sum loses most: from 8 on, fp16's neighbours are 0.0078 apart, so each addition is rounded by much of "
        "what it adds. A narrow addend only brings its own rounding, which is the same every time. So sums are kept "
        "wide, and what is added may be narrow: that is what tensor cores do."
    )


def toy_dtypes() -> str:
    """The toy model under autocast, on a CPU."""
    rows = {str(row.case["module"]): row for row in results("cpu-dtypes", "dtype") if row.case["precision"] == "fp16"}
    parameters = {row.values.get("parameters") for row in rows.values()} - {None}
    gradients = {row.values.get("gradients") for row in rows.values()} - {None}
    assert parameters == gradients == {"fp32"}
    return (
        f"Under fp16 autocast, on a CPU: parameters fp32, the first layer's output {rows['first'].values['outputs']}, "
        f"layer norm's output {rows['norm'].values['outputs']}, logits {rows['last'].values['outputs']}, the loss "
        f"{rows['(loss)'].values['outputs']}, gradients fp32. Autocast casts what goes into an operator, not what "
        "is stored. On CUDA one row differs: there layer norm is on autocast's list of operators that run in float32, "
        "so its output is fp32 (PyTorch's documentation of autocast; on a CPU it is not on the list, as this run "
        "shows)."
    )


def headline() -> str:
    """What a reader of README.md learns first."""
    rungs = [row for row in results("h200-analyze-2.7B", "rung") if row.values["kept"]]
    first, last = rungs[0], rungs[-1]
    return (
        f"On one H200, a training step of 3.4 billion parameters goes from {in_ms(figure(first, 'step_ms'))} to "
        f"{in_ms(figure(last, 'step_ms'))}, {figure(last, 'speedup'):.1f} times faster (95 % interval "
        f"{figure(last, 'speedup_low'):.1f} to {figure(last, 'speedup_high'):.1f}), in {len(rungs) - 1} checked "
        f"changes, with the gradients off by {figure(last, 'gradient_error'):.2g} of the "
        f"{figure(last, 'error_budget'):.2g} that rounding to bf16 allows."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "headline": headline,
    "benchmark": benchmark,
    "warmup": warmup,
    "precision": precision,
    "compiled": compiled,
    "limits-large": limits,
    "accumulation": accumulation,
    "toy-dtypes": toy_dtypes,
}
