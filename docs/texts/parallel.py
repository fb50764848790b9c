"""Sentences about several ranks: collectives, data parallel schemes, sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.exercise import FSDP_RANKS, TENSOR_RANKS, XXL, compute_bound_tokens
from tables.source import figure, one, setting
from trainstep.plan.communication import Link, best_bucket_bytes
from trainstep.records import Row
from trainstep.report.finding import in_gib, in_ms, listed
from trainstep.report.numbers import number


def scheme(name: str) -> Row:
    """A scheme's row on two H200s."""
    return one("h200-parallel", "parallel", scheme=name)


def step_ms(name: str) -> float:
    """Its step on the slowest rank."""
    return figure(scheme(name), "step_ms")


def beyond(name: str) -> float:
    """Milliseconds beyond the step without communication."""
    return figure(scheme(name), "exposed_ms")


def all_reduce() -> str:
    """All-reduce by size: NCCL on two and four GPUs, Gloo on 2, 4 and 6 processes."""
    nccl = [
        one("h200-collectives", "collective", collective="all-reduce", size_mb=float(mb)) for mb in (1, 10, 100, 1000)
    ]
    told = ", ".join(
        f"{row.case['size_mb']:,.0f} MB {in_ms(figure(row, 'time_ms'))} ({number(figure(row, 'bus_gb_s'))} GB/s)"
        for row in nccl
    )
    four = [
        one("h200-collectives-4gpus", "collective", collective="all-reduce", size_mb=float(mb)) for mb in (100, 1000)
    ]
    on_four = listed([f"{row.case['size_mb']:,.0f} MB take {in_ms(figure(row, 'time_ms'))}" for row in four])
    bytes_more = 2 * (4 - 1) / 4  # on each link, 2(n - 1)/n; with two ranks 1
    longer = [figure(more, "time_ms") / figure(row, "time_ms") for more, row in zip(four, nccl[2:], strict=True)]
    assert 1 < min(longer) <= max(longer) < bytes_more
    gloo = {
        ranks: one("cpu-collectives", "collective", collective="all-reduce", world_size=ranks, size_mb=100.0)
        for ranks in (2, 4, 6)
    }
    slower = figure(gloo[2], "time_ms") / figure(nccl[2], "time_ms")
    ranked = ", ".join(f"{ranks} processes {in_ms(figure(row, 'time_ms'))}" for ranks, row in gloo.items())
    return (
        f"NCCL on two H200s, float32: {told}. Small calls are all overhead; the link's bandwidth is reached from "
        f"hundreds of megabytes. On four H200s {on_four}, {longer[0]:.2f} and {longer[1]:.2f} times as long; each link "
        f"then carries {bytes_more} times the bytes.\n\n"
        f"Gloo between processes of one machine with two cores, 100 MB: {ranked}, "
        f"{slower:,.0f} times as long as NCCL at two ranks. There the ranks share two cores and one memory, so more of "
        "them only make it slower; on a network a ring's time hardly depends on their number."
    )


def naive() -> str:
    """What communication costs when nothing hides it."""
    row = scheme("naive")
    spent = figure(row, "communication_ms")
    return (
        f"{setting([row])}: the step takes {in_ms(step_ms('naive'))} with one "
        f"all-reduce per parameter after backward, and {in_ms(step_ms('single'))} without communication. "
        f"{in_ms(spent)}, {100 * spent / step_ms('naive'):.0f}% of the step, is communication, in "
        f"{figure(row, 'collectives'):.0f} calls that send {in_gib(figure(row, 'sent_gib'))} from each rank."
    )


def flat() -> str:
    """One call instead of one per parameter."""
    spent = [figure(scheme(name), "communication_ms") for name in ("naive", "flat")]
    assert spent[1] < spent[0]
    return (
        f"Communication falls from {in_ms(spent[0])} to {in_ms(spent[1])}, the step from {in_ms(step_ms('naive'))} to "
        f"{in_ms(step_ms('flat'))}. The bytes are the same; the calls' overheads are gone, and one large message uses "
        "the link better. No buffer is copied: NCCL takes the list of gradients as one group."
    )


def overlap() -> str:
    """Calls during backward."""
    row, before = scheme("overlapped"), scheme("flat")
    assert step_ms("overlapped") < step_ms("flat")
    return (
        f"The step takes {in_ms(step_ms('overlapped'))} instead of {in_ms(step_ms('flat'))}. What is left after "
        f"backward is {in_ms(figure(row, 'communication_ms'))}. It is not free: backward takes "
        f"{in_ms(figure(row, 'backward_ms'))} beside it instead of {in_ms(figure(before, 'backward_ms'))}, since "
        "NCCL's thread blocks occupy multiprocessors and memory bandwidth."
    )


def buckets() -> str:
    """Bucket sizes, and the model of the best one."""
    sizes = (1, 10, 100, 1000)
    told = ", ".join(f"{size:,} MB {in_ms(step_ms(f'bucketed-{size}'))}" for size in sizes)
    small = [step_ms(f"bucketed-{size}") for size in (1, 10, 25)]
    assert max(small) < 1.01 * min(small), "nothing changes"
    best = min(sizes, key=lambda size: step_ms(f"bucketed-{size}"))
    assert best == max(sizes), "large calls are said to be the fastest"
    fit = one("h200-collectives", "collective fit", collective="all-reduce")
    return (
        f"{told}; torch's DistributedDataParallel with its 25 MB {in_ms(step_ms('torch-ddp'))}. From 1 to 25 MB "
        "nothing changes, as most matrices of this model are larger than that by themselves. The usual model says: k "
        "buckets leave s/(kw) + ko after backward (the last bucket's transfer and every call's overhead), least at k = "
        f"√(s/(wo)), a bucket of √(s·w·o). With the measured overhead, {number(figure(fit, 'overhead_us'))} µs, and "
        f"bandwidth, {number(figure(fit, 'bus_gb_s'))} GB/s, that is "
        f"{number(best_bucket_mb(fit))} MB for the {gradient_bytes() / 1e9:.1f} GB of gradients. Of the sizes tried "
        f"{best:,} MB is fastest: few large calls also disturb the computation beside them less, which the model does "
        "not know."
    )


def gradient_bytes() -> float:
    """Of 2.7B: with two ranks an all-reduce sends as many bytes as it reduces, 2(n - 1)/n = 1."""
    return figure(scheme("naive"), "sent_gib") * 2**30


def best_bucket_mb(fit: Row) -> float:
    """√(s·w·o) in MB, for the gradients of 2.7B in float32."""
    link = Link(figure(fit, "overhead_us") * 1e-6, figure(fit, "bus_gb_s") * 1e9)
    return best_bucket_bytes(gradient_bytes(), 2, link) / 1e6


def accounting() -> str:
    """The model of 126 blocks: memory, shards, the batch that is limited by computation."""
    overlapped = compute_bound_tokens(overlapped=True)
    gpus = FSDP_RANKS * TENSOR_RANKS
    return (
        f"Computed, not measured. d_model 16,384, d_ff 53,248, 126 blocks of two matrices: {XXL.parameters / 1e9:.1f} "
        f"billion parameters. Weights, gradients and AdamW's moments in fp32 are {XXL.static_bytes / 1e9:,.0f} GB, "
        f"{XXL.devices(80e9, 0)} devices of 80 GB before the first activation; activations in bf16 are "
        f"{XXL.activation_bytes_per_token / 1e6:.1f} MB per token. To fit 95 GB with 1,024 tokens it takes "
        f"{XXL.shards_to_fit(95e9, 1024)} shards. On a mesh of {FSDP_RANKS} (FSDP) × {TENSOR_RANKS} (TP) the step is "
        f"limited by computation from {overlapped:.0f} tokens per device on, {overlapped * gpus:,.0f} in all, if the "
        "two axes communicate at the same time."
    )


def sharded_memory() -> str:
    """Memory with and without the sharded optimizer at three moments."""
    moments = {
        "start": "after the model is made",
        "before_step": "before the optimizer's step",
        "after_step": "after it",
    }
    told = [
        f"{words} {in_gib(plain)} and {in_gib(sharded)}"
        for moment, words in moments.items()
        for plain, sharded in [[figure(scheme(name), f"{moment}_gib") for name in ("bucketed-25", "sharded-optimizer")]]
    ]
    states = [figure(scheme(name), "before_step_optimizer_state_gib") for name in ("bucketed-25", "sharded-optimizer")]
    return (
        f"Data parallel and with the sharded optimizer, on the GPU that holds most: {', '.join(told)}. State is "
        f"halved, from {in_gib(states[0])} to {in_gib(states[1])}. Ours also gives the gradients back in its step, and "
        "keeps only the rank's slices of them until then. With n GPUs, state is 8P/n bytes for P parameters."
    )


def sharded_time() -> str:
    """What sharding the optimizer costs in time, and against ZeRO stage 1."""
    ours, plain, torchs = (step_ms(name) for name in ("sharded-optimizer", "bucketed-25", "torch-zero"))
    cost = "None" if ours <= plain else f"{in_ms(ours - plain)} a step"
    parts, backward = (
        [figure(scheme(name), f"{phase}_ms") for name in ("bucketed-25", "sharded-optimizer")]
        for phase in ("optimizer", "backward")
    )
    assert backward[1] < backward[0]
    return (
        f"{cost}: {in_ms(ours)} against {in_ms(plain)} for data parallel. Each rank updates half of the parameters, "
        f"and gathers the other half: the optimizer's phase goes from {in_ms(parts[0])} to {in_ms(parts[1])}. In "
        "return gradients are reduce-scattered, half the bytes of an all-reduce, and backward goes from "
        f"{in_ms(backward[0])} to {in_ms(backward[1])}. torch's ZeroRedundancyOptimizer, which all-reduces and then "
        f"broadcasts, takes {in_ms(torchs)}. Against ZeRO's stage 1 as published one thing differs: of a reduced "
        "gradient only the rank's own slice is kept, which the paper calls stage 2."
    )


def fsdp() -> str:
    """Fully sharded: memory and time."""
    ours, torchs = scheme("fsdp"), scheme("torch-fsdp2")
    others = [figure(scheme(name), "peak_gib") for name in ("flat", "fsdp")]
    more = beyond("fsdp")
    against = (
        f"{in_ms(more)} more than the step without communication"
        if more > 0
        else f"{in_ms(-more)} less than the step of one GPU without communication, as each rank updates half"
    )
    return (
        f"Weights, gradients and state are all divided: the peak is {in_gib(others[1])} instead of "
        f"{in_gib(others[0])}, and the step takes {in_ms(figure(ours, 'step_ms'))}, {against}. It sends "
        f"{in_gib(figure(ours, 'sent_gib'))} from each rank, in bf16, where data parallel sends "
        f"{in_gib(figure(scheme('flat'), 'sent_gib'))} in fp32. torch's FSDP2 takes {in_ms(figure(torchs, 'step_ms'))} "
        f"with {in_gib(figure(torchs, 'peak_gib'))}."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "all-reduce": all_reduce,
    "ddp-naive": naive,
    "ddp-flat": flat,
    "ddp-overlap": overlap,
    "ddp-buckets": buckets,
    "communication-accounting": accounting,
    "sharded-memory": sharded_memory,
    "sharded-time": sharded_time,
    "fsdp": fsdp,
}
