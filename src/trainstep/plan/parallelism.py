"""A training step under each strategy on a cluster: bytes sent, seconds, and what limits it.

Every GPU brings `batch` sequences: t GPUs of tensor parallelism work on t · batch of them together, so strategies
compare at equal work.

Tensor parallelism splits heads, feed-forward and vocabulary, and tokens in between (Korthikanti et al. 2022): in each
block an all-gather before and a reduce-scatter after both halves, forward and backward, and two more gathers for the
gradients of weights, each of the group's tokens · D · e bytes. Nothing hides them.

Data parallel communication hides behind computation as far as `sticking_out_s` says: gradients behind backward in
buckets, gathered parameters behind the optimizer, FSDP's groups behind forward and behind backward. Between replicas
(hsdp) each group's part of the gradients follows: over the network beside what goes on within nodes, and within a node
after it, over the same connections. In rows of 2026-11-27 a group's gradients go by copies among all ranks of the node,
and means of parts between those that have the same. FSDP's gradients in half precision are exchanged, an all-to-all:
every GPU sends to each one of the other nodes, by its own connection. What is hidden slows the computation that hides
it, by `Machine.interference` of its own time.

The host launches all of it, and a step takes no less than that; counted where schemes' launches were measured.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.precision import PRECISIONS
from trainstep.plan.communication import (
    LEAST_BUCKET_BYTES,
    best_calls,
    bus_factor,
    collective_seconds,
    passes,
    sticking_out_s,
)
from trainstep.plan.flops import step_flops
from trainstep.plan.machine import Cluster
from trainstep.plan.roofline import StepSeconds, step_seconds
from trainstep.plan.strategies import MOST_GPUS, Layout, MemorySplit, kept_groups, shared_bytes, strategy_memory

GATHER_BYTES = 256e6
"""Bytes of updated parameters that the sharded optimizer gathers in one call, at least."""


@dataclass(frozen=True)
class StepPlan:
    """The prediction for one layout."""

    layout: Layout
    memory: MemorySplit
    sent: int  # bytes that each GPU sends in a step
    compute: StepSeconds
    communication_s: float  # for which a GPU's connections are busy
    exposed_s: float  # by how much it makes the step longer: what sticks out, and what hidden communication slows
    tokens: int | None  # of all GPUs; None where a user's batch does not tell
    flops: int | None  # of the model, for all GPUs; None where they are not known
    launch_s: float = 0.0  # the host's, of all that it launches; 0 where it is not known

    @property
    def step_s(self) -> float:
        """Seconds of the GPU, or of the host, whichever is slower: they work side by side."""
        return max(self.compute.total + self.exposed_s, self.launch_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all GPUs."""
        return None if self.tokens is None else self.tokens / self.step_s

    @property
    def limit(self) -> str:
        """Part that is busy longest: the host, communication, or what takes most of the computation."""
        if self.launch_s > self.compute.total + self.exposed_s:
            return "launches"
        return "communication" if self.communication_s > self.compute.total else self.compute.limit

    def utilisation(self, peak_flops: float) -> float | None:
        """Model FLOPs over what all GPUs could do at `peak_flops` each."""
        return None if self.flops is None else self.flops / (self.step_s * peak_flops * self.layout.gpus)


@dataclass(frozen=True)
class Exchange:
    """Traffic of data parallel ranks in a step, in bytes of the whole model (or of a tensor parallel part of it)."""

    reduced: float  # gradients, as they travel
    gathered: float  # weights: once by the sharded optimizer and zero-2, in forward and in backward by fsdp
    kept: float  # gradients, as they are kept
    groups: int  # that fsdp gathers one after the other
    not_again: float = 0.0  # of what fsdp gathered in forward, what it keeps for backward


def strategy_plan(model: ModelConfig, step: StepConfig, cluster: Cluster, layout: Layout) -> StepPlan:
    """Memory, traffic and seconds of one layout; `step.batch` is what each GPU brings.

    Raises:
        UnsupportedError: a step without a formula for memory or time.
    """
    t, n = layout.tensor, layout.parts
    memory = strategy_memory(model, step, layout)
    shared = dataclasses.replace(step, batch=step.batch * t)
    is_fsdp = layout.shards_weights
    precision = PRECISIONS[step.precision]
    casts = False if is_fsdp else None
    compute = step_seconds(
        model, shared, cluster.machine, tensor_parallel=t, casts_weights=casts, optimizer_share=layout.updated
    )
    parameters = model.num_parameters / t
    width = precision.computed_bytes if is_fsdp else precision.stored_bytes
    moved = Exchange(
        reduced=parameters * width,
        gathered=parameters * width,
        kept=parameters * precision.stored_bytes,
        groups=-(-model.num_layers // layout.blocks_per_group) + 2,
        not_again=kept_groups(model, layout.blocks_per_group) / t * width,
    )
    busy, exposed = exchange_seconds(layout, cluster, compute, moved)
    exposed += cluster.machine.interference * max(0.0, busy - exposed)
    if is_fsdp and precision.is_half:  # casts of weights, what collectives have packed, the sum of the ranks' gradients
        packed = 4 if n > cluster.gpus_per_node // t else 0
        copied = parameters * (2 * 6 / n + packed + 2 + 4 / n) / cluster.machine.copy_bytes_per_s
        backward = dataclasses.replace(compute.backward, traffic=compute.backward.traffic + copied)
        compute = dataclasses.replace(compute, backward=backward)
    sent = shared_bytes(model, step, layout).sent
    if t > 1:
        calls = model.num_layers * (4 + 6 + (4 if step.checkpointing != "none" else 0)) + 4
        payload = shared.batch * step.context * model.d_model * precision.computed_bytes
        link = cluster.group_link("all-gather", t)
        seconds = calls * collective_seconds("all-gather", payload, t, link)
        busy, exposed = busy + seconds, exposed + seconds
        sent += calls * passes("all-gather", t) * payload // t
    tokens = layout.gpus * step.batch * step.context
    flops = step_flops(model, layout.gpus * step.batch, step.context, "step")
    how = step.compile, step.precision, model.num_layers, layout.blocks_per_group
    launch_s = cluster.machine.scheme_launch_seconds(layout.strategy, *how)
    return StepPlan(layout, memory, sent, compute, busy, exposed, tokens, flops, launch_s)


def exchange_seconds(layout: Layout, cluster: Cluster, compute: StepSeconds, exchange: Exchange) -> tuple[float, float]:
    """(seconds that the connections are busy, seconds that stick out) for what data parallel ranks exchange."""
    n, stride = layout.data, layout.tensor
    if n == 1:
        return 0.0, 0.0
    if layout.shards_weights:
        return _sharded_seconds(layout, cluster, compute, exchange)
    gather = cluster.group_link("all-gather", n, stride)
    scatter = cluster.group_link("reduce-scatter", n, stride)
    part = (n - 1) / n
    gathered = part * exchange.gathered / gather.bus_bytes_per_s
    reduced = part * exchange.reduced / scatter.bus_bytes_per_s
    backward_s, optimizer_s, kept = compute.backward.total, compute.optimizer.total, exchange.kept
    if layout.scheme == "ddp":
        reduce = cluster.group_link("all-reduce", n, stride)
        transfer = 2 * part * exchange.reduced / reduce.bus_bytes_per_s
        return _in_best_calls(backward_s, transfer, reduce.overhead_s, kept)
    busy, exposed = _in_best_calls(backward_s, reduced, scatter.overhead_s, kept)
    busy_too, exposed_too = _in_best_calls(optimizer_s, gathered, gather.overhead_s, kept, least=GATHER_BYTES)
    return busy + busy_too, exposed + exposed_too


def _sharded_seconds(layout: Layout, cluster: Cluster, compute: StepSeconds, exchange: Exchange) -> tuple[float, float]:
    """The same for fsdp and hsdp, group by group; of one that is not sharded, or has no replicas, a part is zero."""
    n, replicas, stride, groups = layout.parts, layout.replicas, layout.tensor, exchange.groups
    forward_s, backward_s = compute.forward.total, compute.backward.total
    gathered = again = reduced = gather_s = scatter_s = between = reduce_s = 0.0
    if n > 1:
        gather = cluster.group_link("all-gather", n, stride)
        part, gather_s = (n - 1) / n, gather.overhead_s
        gathered = part * exchange.gathered / gather.bus_bytes_per_s
        again = part * (exchange.gathered - exchange.not_again) / gather.bus_bytes_per_s
        scatter = cluster.group_link("reduce-scatter", n, stride)
        scatter_s, reduced = scatter.overhead_s, part * exchange.reduced / scatter.bus_bytes_per_s
        here = max(1, min(n, cluster.gpus_per_node // stride))
        if exchange.reduced < exchange.kept and n > here:  # exchanged, to be added up where it arrives
            reduced = max(reduced, (n - here) / n * exchange.reduced / cluster.network_bytes_per_s)
    if replicas > 1:
        link, factor = cluster.group_link("all-reduce", replicas, stride * n), bus_factor("all-reduce", replicas)
        reduce_s, between = link.overhead_s, factor * exchange.kept / n / link.bus_bytes_per_s
    busy = gathered + again + reduced + between + groups * (2 * gather_s + scatter_s + reduce_s)
    exposed = sticking_out_s(forward_s, gathered, groups, gather_s)
    both = gather_s + scatter_s
    if layout.replicas_cross(cluster.gpus_per_node):
        inside = sticking_out_s(backward_s, again + reduced, groups, both)
        last = reduced / groups + scatter_s  # before its own mean between replicas can begin
        return busy, exposed + max(inside, last + sticking_out_s(backward_s, between, groups, reduce_s))
    return busy, exposed + sticking_out_s(backward_s, again + reduced + between, groups, both + reduce_s)


def _in_best_calls(
    work_s: float, transfer_s: float, overhead_s: float, payload: float, least: float = LEAST_BUCKET_BYTES
) -> tuple[float, float]:
    """(busy, sticking out) of the best number of calls; see `plan.communication`.

    As many as there can be have `least` bytes, and the last what is left; fewer are larger, and alike. That tensors may
    be larger than `least` is not looked at.
    """
    most = max(1, math.ceil(payload / least))
    calls = min(most, max(1, round(best_calls(work_s, transfer_s, overhead_s))))
    full = least / payload if calls == most > 1 else None
    return transfer_s + calls * overhead_s, sticking_out_s(work_s, transfer_s, calls, overhead_s, full)


def scaled(cluster: Cluster, gpus: int) -> Cluster:
    """The same kind of cluster with another number of GPUs; a node that is not full where there are few."""
    here = min(gpus, cluster.gpus_per_node)
    return dataclasses.replace(cluster, gpus_per_node=here, nodes=-(-gpus // here))


def gpu_counts() -> Sequence[int]:
    """Powers of two from 1 to `MOST_GPUS`."""
    return [1 << power for power in range(MOST_GPUS.bit_length())]
