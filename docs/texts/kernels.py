"""Sentences about kernel profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.source import figure, one
from texts.wording import percent, times
from trainstep.records import Row, Scalar
from trainstep.report.finding import in_ms
from trainstep.report.kernel_findings import brief_name
from trainstep.report.numbers import number

CASE: dict[str, Scalar] = {"workload": "2.7B", "context": 512, "precision": "bf16"}


def profile(**case: str | int) -> Row:
    """The profile of 2.7B at 512 tokens, or another case."""
    return one("h200-profile", "profile", **(CASE | case))


def family(name: str) -> Row:
    """A family's row over the whole step."""
    return one("h200-profile", "family", **CASE, phase="step", family=name)


def piece(name: str) -> Row:
    """One of the three pieces of eager attention, in forward."""
    return one("h200-profile", "attention piece", **CASE, phase="forward", piece=name)


def forward() -> str:
    """What the profiler's forward adds up to, beside the stopwatch's."""
    row = profile()
    busy, phase = figure(row, "forward_busy_ms"), figure(row, "forward_ms")
    assert busy < phase
    slow = profile(workload="small", context=128)
    return (
        f"The kernels of one forward of 2.7B at 512 tokens in bf16 add up to {in_ms(busy)}; the stopwatch, without a "
        f"profiler, says {in_ms(phase)}. They agree, and the difference is time in which the GPU waits for a launch. "
        f"Where the host sets the pace they do not: small at 128 tokens has {in_ms(figure(slow, 'forward_busy_ms'))} "
        f"of kernels in a forward of {in_ms(figure(slow, 'forward_ms'))}. Profiling itself makes the first step "
        f"{percent(figure(row, 'profiler_cost'))} longer and the second {percent(figure(slow, 'profiler_cost'))}, so "
        "a profiled step is never set beside an unprofiled one here."
    )


def top() -> str:
    """The kernel that takes most time, in forward and in the step."""
    row = profile()
    names = [brief_name(row.values[f"top_{where}_kernel"]) for where in ("forward", "step")]
    assert names[0] != names[1]
    assert figure(row, "top_forward_kernel_calls") == 7 * 32
    often = brief_name(row.values["most_called_forward_kernel"])
    return (
        f"In forward it is `{names[0]}` ({row.values['top_forward_kernel_family']}), with "
        f"{percent(figure(row, 'top_forward_kernel_share'))} of the kernel time in "
        f"{figure(row, 'top_forward_kernel_calls'):.0f} calls: seven projections in each of 32 blocks. In the whole "
        f"step it is another: `{names[1]}` ({row.values['top_step_kernel_family']}), "
        f"{percent(figure(row, 'top_step_kernel_share'))} in {figure(row, 'top_step_kernel_calls'):.0f} calls, "
        f"autocast's cast of results to float32. The kernel called most often in forward is `{often}`, "
        f"{figure(row, 'most_called_forward_kernel_calls'):.0f} times."
    )


def others() -> str:
    """Kernels that are not matrix products."""
    names = ("optimizer", "copy", "elementwise", "softmax", "normalisation")
    shares = {name: figure(family(name), "share") for name in names}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    told = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    return f"Of the whole step's kernel time: {told}. The first three do next to no arithmetic and move many bytes."


def matmul_share() -> str:
    """Matrix products in forward and in the step."""
    cases = [profile(context=context) for context in (128, 512, 1024)]
    told = ", ".join(
        f"{percent(figure(row, 'matmul_share_forward'))} and {percent(figure(row, 'matmul_share_step'))} at "
        f"{row.case['context']} tokens"
        for row in cases
    )
    assert all(figure(row, "matmul_share_forward") > figure(row, "matmul_share_step") for row in cases)
    return (
        f"Of the kernel time of forward and of the whole step, at 2.7B in bf16: {told}. Backward has two products for "
        "each of forward's and so keeps their share; the optimizer has none, and takes the same time whatever the "
        "context."
    )


def softmax() -> str:
    """Softmax beside the products of attention: FLOPs, time, bytes."""
    scores, soft = piece("scores"), piece("softmax")
    fewer = figure(scores, "main_tflop") / figure(soft, "main_tflop")
    longer = figure(soft, "main_ms") / figure(scores, "main_ms")
    bytes_more = figure(soft, "main_gb") / figure(scores, "main_gb")
    assert longer > 1
    small = [
        one("h200-profile", "attention piece", **(CASE | {"workload": "small"}), phase="forward", piece=name)
        for name in ("scores", "softmax")
    ]
    assert figure(small[1], "main_ms") > figure(small[0], "main_ms")
    return (
        f"At 2.7B and 512 tokens softmax has {number(fewer)} times fewer FLOPs than the product Q·Kᵀ and takes "
        f"{times(longer)} as long: {in_ms(figure(soft, 'main_ms'))} against {in_ms(figure(scores, 'main_ms'))}. FLOPs "
        f"do not explain time here, bytes do: it moves {times(bytes_more)} as many, at "
        f"{number(figure(soft, 'main_gb_s'))} GB/s. With the scaling, the mask and the casts around it, all kernels of "
        f"the softmax piece take {in_ms(figure(soft, 'ms'))} and those of the score piece "
        f"{in_ms(figure(scores, 'ms'))}. Counted are 5 FLOPs per score for softmax and 2·head_dim for the product."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "kernels-forward": forward,
    "kernels-top": top,
    "kernels-others": others,
    "kernels-matmul": matmul_share,
    "kernels-softmax": softmax,
}
