"""What docs/parallel.md says about its tables: what overlap bought, the best bucket, what sharding saved and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.parallel import planned_anew
from tables.source import figure, one, results
from texts.parallel import gradient_bytes
from texts.wording import percent
from trainstep.plan.communication import Link, best_bucket_bytes
from trainstep.report.finding import in_gib, in_ms
from trainstep.report.numbers import number

MOMENTS = ("predicted_start_gib", "predicted_before_step_gib", "predicted_after_step_gib")
TWO, FOUR = "h200-parallel", "h200-parallel-4gpus"


def of(scheme: str, name: str, file: str = TWO) -> float:
    """A figure of a scheme's row."""
    return figure(one(file, "parallel", scheme=scheme), name)


def against(ours: str, theirs: str, name: str = "step_ms", file: str = TWO) -> str:
    """`0.797`: ours over theirs."""
    return f"{of(ours, name, file) / of(theirs, name, file):.3f}"


def overlap() -> str:
    """What overlap bought, and what it costs the computation."""
    hidden = [
        figure(one("h200-parallel-trace", "parallel trace", scheme=scheme), "hidden_share")
        for scheme in ("overlapped", "bucketed-25")
    ]
    backward = [of(scheme, "backward_ms") for scheme in ("overlapped", "single")]
    assert backward[0] > backward[1]
    return (
        "**What overlap bought.** After backward, one call for all gradients (flat) takes "
        f"{in_ms(of('flat', 'communication_ms'))}, and one call per parameter (naive) "
        f"{in_ms(of('naive', 'communication_ms'))}: {of('naive', 'collectives'):.0f} calls have their overheads. "
        f"During backward (overlapped, bucketed) {percent(min(hidden))} of it is hidden, by the trace. Yet the step is "
        f"{in_ms(of('overlapped', 'exposed_ms'))} longer than without communication, because backward takes "
        f"{in_ms(backward[0])} beside it instead of {in_ms(backward[1])}: NCCL's thread blocks occupy multiprocessors. "
        "Limiting them does not pay (lab log): what is left then cannot be sent in time."
    )


def buckets() -> str:
    """The best bucket measured, and the one that the plan's model of the overhead would choose."""
    sizes = (1, 10, 25, 100, 1000)
    small = [of(f"bucketed-{size}", "step_ms") for size in sizes[:3]]
    assert max(small) < 1.01 * min(small), "nothing changes"
    best = min(sizes, key=lambda size: of(f"bucketed-{size}", "step_ms"))
    assert best == max(sizes)
    fit = one("h200-collectives", "collective fit", collective="all-reduce")
    link = Link(figure(fit, "overhead_us") * 1e-6, figure(fit, "bus_gb_s") * 1e9)
    planned = best_bucket_bytes(gradient_bytes(), 2, link, of("single", "backward_ms") * 1e-3) / 1e6
    assert planned < best
    beside = ", ".join(f"{against(f'bucketed-{size}', 'torch-ddp')} with {size:,} MB" for size in reversed(sizes[2:]))
    saved = of("torch-ddp", "peak_gib") - of(f"bucketed-{best}", "peak_gib")
    return (
        f"**Which bucket is best.** The largest tried, {best:,} MB, at {in_ms(of(f'bucketed-{best}', 'exposed_ms'))} "
        "beyond the step without communication, though its last call is exposed: from 1 to 25 MB nothing changes, "
        "because most matrices of this model are larger than that by themselves. The model of the overhead in "
        "`plan.communication` counts overheads and the last bucket, and would take "
        f"{number(planned)} MB; that few large calls disturb backward less is not in it. Against torch's "
        f"DistributedDataParallel with its 25 MB the step is, of its time, {beside}, at {in_gib(saved)} less memory, "
        "as no gradient is held twice."
    )


def sharding() -> str:
    """The sharded optimizer and FSDP, beside data parallel and beside torch's own."""
    saved = [of(theirs, "peak_gib") - of("sharded-optimizer", "peak_gib") for theirs in ("bucketed-25", "torch-zero")]
    less = -of("fsdp", "exposed_ms")
    assert less > 0
    assert of("sharded-optimizer", "step_ms") < of("bucketed-25", "step_ms")
    return (
        f"**What sharding saved and cost.** The sharded optimizer holds {in_gib(saved[0])} less than data parallel and "
        f"takes *less* time, {in_ms(of('sharded-optimizer', 'step_ms'))} against {in_ms(of('bucketed-25', 'step_ms'))}"
        ": half the update is worth more than gathering parameters costs. With calls of 1000 MB it takes "
        f"{in_ms(of('sharded-optimizer-1000', 'step_ms'))}. Against torch's ZeroRedundancyOptimizer it is "
        f"{against('sharded-optimizer', 'torch-zero')} and {against('sharded-optimizer-1000', 'torch-zero')} of the "
        f"time at {in_gib(saved[1])} less.\n\n"
        f"Fully sharded training holds half of everything, {in_gib(of('fsdp', 'peak_gib'))} at its peak, and is the "
        f"fastest of all: {in_ms(of('fsdp', 'step_ms'))}, {in_ms(less)} less than one GPU takes without communication, "
        "which has twice as many parameters to update. Bfloat16 is on the wire, gathers and exchanges lie behind "
        "computation, and as copies they hardly disturb it; by NCCL the same step takes "
        f"{in_ms(of('fsdp-collectives', 'step_ms'))}. Against torch's FSDP2 it is {against('fsdp', 'torch-fsdp2')} of "
        f"the time at {against('fsdp', 'torch-fsdp2', 'peak_gib')} of the memory. With compiled blocks see the "
        "[lab log](lab-log.md)."
    )


def plan() -> str:
    """How far the plan's memory is off at the three moments, at worst."""
    errors = [
        abs(figure(planned, name) / figure(planned, name.removeprefix("predicted_")) - 1)
        for planned in map(planned_anew, results(TWO, "parallel"))
        for name in MOMENTS
    ]
    return (
        f"**The plan** is within {percent(max(errors))} of the memory of every scheme ({len(results(TWO, 'parallel'))} "
        "of them) at all three moments."
    )


def four() -> str:
    """The same on four GPUs."""
    beside = {
        "bucketed at 1000 MB": ("bucketed-1000", "torch-ddp", "DistributedDataParallel"),
        "the sharded optimizer": ("sharded-optimizer-1000", "torch-zero", "ZeroRedundancyOptimizer"),
        "FSDP": ("fsdp", "torch-fsdp2", "FSDP2"),
    }
    told = ", ".join(f"{what} {against(*pair, file=FOUR)} of {name}'s time" for what, (*pair, name) in beside.items())
    forward = [of("fsdp", "forward_ms", file) for file in (FOUR, TWO)]
    assert of("fsdp", "exposed_ms", FOUR) < 0
    assert forward[0] > forward[1]
    return (
        f"Against torch's: {told}, and {against('fsdp', 'torch-fsdp2', 'peak_gib', FOUR)} of its memory. FSDP is again "
        f"faster than one GPU without communication. Its forward, though, takes {in_ms(forward[0])} instead of "
        f"{in_ms(forward[1])} with two: a gather is more copies, and starting them kept the host busy for longer than "
        f"the GPU. By NCCL forward takes {in_ms(of('fsdp-collectives', 'forward_ms', FOUR))}, and the step "
        f"{in_ms(of('fsdp-collectives', 'step_ms', FOUR))} instead of {in_ms(of('fsdp', 'step_ms', FOUR))}."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "parallel-overlap": overlap,
    "parallel-buckets": buckets,
    "parallel-sharding": sharding,
    "parallel-plan": plan,
    "parallel-four": four,
}
