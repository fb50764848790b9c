"""One training step under each strategy on a cluster: memory per GPU, bytes sent, seconds, and what limits it.

Memory. `plan.memory` knows what one GPU holds at each moment of a step. A strategy divides some of it:

    strategy           weights   gradients   optimizer state   activations   buffers
    single, ddp        1         1           1                 1
    sharded optimizer  1         1           1/n               1
    zero-2             1         1/n         1/n               1             the largest group's gradients
    fsdp               1/n       1/n         1/n               1             six of the largest group (see rank_bytes)
    fsdp + tp          1/(nt)    1/(nt)      1/(nt)            1/t           the same of 1/t of a group

n ranks of data parallelism, t of tensor parallelism. FSDP casts weights before it gathers them, so in half precision
everything runs in that type, and no casts of weights are kept. Every GPU brings `batch` sequences: t GPUs work on
t · batch of them together, so strategies compare at equal work.

Tensor parallelism splits heads, feed-forward and vocabulary, and tokens in between (Korthikanti et al. 2022): in each
block an all-gather before and a reduce-scatter after both halves, forward and backward, and two more gathers for the
gradients of weights, each of the group's tokens · D · e bytes. Nothing hides them.

Seconds. Data parallel communication hides behind computation as far as `sticking_out_s` says: gradients behind backward
in buckets, gathered parameters behind the optimizer, FSDP's groups behind forward and behind backward. Communication is
assumed to take nothing away from the computation that it hides behind.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trainstep.config import ModelConfig, StepConfig
from trainstep.errors import UsageError
from trainstep.plan.communication import RankBytes, Scheme, collective_seconds, passes, rank_bytes, sticking_out_s
from trainstep.plan.flops import step_flops
from trainstep.plan.machine import GIB, Cluster
from trainstep.plan.memory import peak_bytes
from trainstep.plan.roofline import StepSeconds, step_seconds

Strategy = Literal["single", "ddp", "sharded optimizer", "zero-2", "fsdp", "fsdp + tp"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

BUCKET_BYTES = 25e6
"""Of gradients reduced in one call at least: the default of our DistributedDataParallel. More, where calls cost more
than waiting for a larger bucket."""

GATHER_BYTES = 256e6
"""Of updated parameters gathered in one call by the sharded optimizer, at least."""

RESERVED_BYTES = GIB
"""Of a GPU's memory that no tensor gets: the CUDA context and the libraries' workspaces. An assumption."""

MOST_GPUS = 16_384


@dataclass(frozen=True)
class MemorySplit:
    """Bytes on one GPU at the moment of the peak."""

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    """Everything else that computing keeps or makes, casts of weights included."""
    buffers: int
    """For communication."""
    moment: str

    @property
    def total(self) -> int:
        """The peak."""
        return self.weights + self.gradients + self.optimizer_state + self.activations + self.buffers


@dataclass(frozen=True)
class Layout:
    """A strategy with its mesh: `data` ranks, each of `tensor` GPUs."""

    strategy: Strategy
    data: int = 1
    tensor: int = 1

    @property
    def gpus(self) -> int:
        """All."""
        return self.data * self.tensor

    @property
    def scheme(self) -> Scheme:
        """What the data parallel ranks do."""
        if self.strategy == "single":
            return "ddp"
        return "fsdp" if self.strategy == "fsdp + tp" else self.strategy


@dataclass(frozen=True)
class StepPlan:
    """The prediction for one layout."""

    layout: Layout
    memory: MemorySplit
    sent: int
    """Bytes that each GPU sends in a step."""
    compute: StepSeconds
    communication_s: float
    """For which a GPU's connections are busy."""
    exposed_s: float
    """What of it makes the step longer."""
    tokens: int
    """Of all GPUs."""
    flops: int
    """Of the model, for all GPUs."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute.total + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs."""
        return self.tokens / self.step_s

    @property
    def limit(self) -> str:
        """What is busy longest: communication, or what takes most of the computation."""
        return "communication" if self.communication_s > self.compute.total else self.compute.limit

    def utilisation(self, peak_flops: float) -> float:
        """Model FLOPs over what all GPUs could do at `peak_flops` each."""
        return self.flops / (self.step_s * peak_flops * self.layout.gpus)


def layout_of(strategy: Strategy, gpus: int, tensor_parallel: int, model: ModelConfig) -> Layout:
    """The mesh of a strategy over all GPUs; `tensor_parallel` counts for "fsdp + tp" alone.

    Raises:
        UsageError: GPUs, heads or the feed-forward cannot be divided so.
    """
    if strategy == "single":
        return Layout(strategy)
    if strategy != "fsdp + tp":
        return Layout(strategy, gpus)
    if tensor_parallel < 1:
        raise UsageError(f"tensor_parallel is {tensor_parallel}; expected at least 1")
    for what, count in (("GPUs", gpus), ("heads", model.num_heads), ("columns of d_ff", model.d_ff)):
        if count % tensor_parallel:
            fit = ", ".join(map(str, _divisors(math.gcd(gpus, model.num_heads, model.d_ff))))
            raise UsageError(
                f"a mesh with tensor parallelism of {tensor_parallel} is impossible: it does not divide "
                f"{count} {what}; choose among {fit}"
            )
    return Layout(strategy, gpus // tensor_parallel, tensor_parallel)


def tensor_parallel_choices(cluster: Cluster, model: ModelConfig) -> list[int]:
    """The sizes above 1 that stay within a node and divide GPUs, heads and feed-forward."""
    return [t for t in _divisors(math.gcd(cluster.gpus_per_node, model.num_heads, model.d_ff)) if t > 1]


def largest_group(model: ModelConfig) -> int:
    """Parameters of the largest group that FSDP gathers at once: a block, the embedding or the head."""
    block = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff + 2 * model.d_model
    return max(block, model.vocab_size * model.d_model)


def strategy_memory(model: ModelConfig, step: StepConfig, layout: Layout) -> MemorySplit:
    """What one GPU holds at its peak. Compiled code is counted as uncompiled, which holds somewhat more.

    Raises:
        UnsupportedError: a step without a memory formula, see `plan.memory.peak_bytes`.
    """
    t, n = layout.tensor, layout.data
    is_fsdp = layout.scheme == "fsdp"
    shared = dataclasses.replace(step, batch=step.batch * t, compile="off")
    computed = shared
    if is_fsdp and step.precision in ("bf16", "fp16"):
        computed = dataclasses.replace(shared, precision="bf16-pure")
    peak = peak_bytes(model, computed, on_cuda=True)
    kept_width = 2 if step.precision == "bf16-pure" else 4
    made_width = 2 if computed.precision == "bf16-pure" else 4
    state_width = 0 if step.optimizer == "sgd" else 2 * kept_width
    kept = _dp_bytes(model, step, layout, kept_width, state_width)
    divides_gradients = layout.scheme in ("zero-2", "fsdp")
    split: list[MemorySplit] = []
    for moment, alive in peak.moments.items():
        made = peak.gradients[moment]
        other = alive - peak.static.at_rest - made
        buffers = kept.buffers
        if moment == "optimizer":
            temporary = other - 4 * step.context * model.head_dim  # the foreach form's, in the width it keeps
            other -= temporary
            updated = n if layout.strategy not in ("single", "ddp") else 1
            other += temporary * kept_width // (made_width * updated)
            buffers = 0
        gradients = made * kept_width // (made_width * t)
        if divides_gradients:
            gradients = -(-gradients // n)
        split.append(
            MemorySplit(kept.weights, gradients, kept.optimizer_state, -(-other // t), buffers, moment),
        )
    return max(split, key=lambda each: each.total)


def _dp_bytes(model: ModelConfig, step: StepConfig, layout: Layout, kept_width: int, state_width: int) -> RankBytes:
    is_half = step.precision not in ("fp32", "tf32")
    found = rank_bytes(
        layout.scheme,
        -(-model.num_parameters // layout.tensor),
        layout.data,
        bytes_per_parameter=kept_width,
        state_per_parameter=state_width,
        compute_bytes=2 if is_half else 4,
        reduce_bytes=2 if is_half and layout.scheme == "fsdp" else None,
        largest_group=-(-largest_group(model) // layout.tensor),
    )
    return found if layout.data > 1 else dataclasses.replace(found, buffers=0)


def strategy_plan(model: ModelConfig, step: StepConfig, cluster: Cluster, layout: Layout) -> StepPlan:
    """Memory, traffic and seconds of one layout; `step.batch` is what each GPU brings.

    Raises:
        UnsupportedError: a step without a formula for memory or time.
    """
    t, n = layout.tensor, layout.data
    memory = strategy_memory(model, step, layout)
    shared = dataclasses.replace(step, batch=step.batch * t)
    is_fsdp = layout.scheme == "fsdp" and layout.strategy != "single"
    is_half = step.precision not in ("fp32", "tf32")
    compute = step_seconds(
        model,
        shared,
        cluster.machine,
        tensor_parallel=t,
        casts_weights=False if is_fsdp else None,
        optimizer_share=1 / n if layout.strategy not in ("single", "ddp") else 1.0,
    )
    kept_width = 2 if step.precision == "bf16-pure" else 4
    parameters = model.num_parameters / t
    busy, exposed = _data_parallel_seconds(layout, cluster, compute, parameters, kept_width, is_half, model)
    if is_fsdp and n > 1 and is_half:  # copies into and out of buffers, and the sum of the ranks' gradients
        copied = parameters * (2 * 6 / n + 6 + 4 / n) / cluster.machine.copy_bytes_per_s
        backward = dataclasses.replace(compute.backward, traffic=compute.backward.traffic + copied)
        compute = dataclasses.replace(compute, backward=backward)
    sent = _dp_bytes(model, step, layout, kept_width, 0).sent
    if t > 1:
        calls, payload = _tensor_parallel_calls(model, shared)
        link = cluster.group_link("all-gather", t)
        seconds = calls * collective_seconds("all-gather", payload, t, link)
        busy, exposed = busy + seconds, exposed + seconds
        sent += calls * passes("all-gather", t) * payload // t
    tokens = layout.gpus * step.batch * step.context
    flops = step_flops(model, layout.gpus * step.batch, step.context, "step")
    return StepPlan(layout, memory, sent, compute, busy, exposed, tokens, flops)


def _data_parallel_seconds(
    layout: Layout,
    cluster: Cluster,
    compute: StepSeconds,
    parameters: float,
    kept_width: int,
    is_half: bool,
    model: ModelConfig,
) -> tuple[float, float]:
    """(seconds that the connections are busy, seconds that stick out) for what data parallel ranks exchange."""
    n, stride = layout.data, layout.tensor
    if n == 1:
        return 0.0, 0.0
    gather = cluster.group_link("all-gather", n, stride)
    scatter = cluster.group_link("reduce-scatter", n, stride)
    part = (n - 1) / n
    if layout.scheme == "fsdp":
        width = 2 if is_half else 4
        groups = model.num_layers + 2
        gathered = part * parameters * width / gather.bus_bytes_per_s
        exchanged = part * parameters * width / scatter.bus_bytes_per_s
        both = gather.overhead_s + scatter.overhead_s
        busy = 2 * gathered + exchanged + groups * (gather.overhead_s + both)
        return busy, (
            sticking_out_s(compute.forward.total, gathered, groups, gather.overhead_s)
            + sticking_out_s(compute.backward.total, gathered + exchanged, groups, both)
        )
    kept = parameters * kept_width
    backward_s, optimizer_s = compute.backward.total, compute.optimizer.total
    if layout.scheme == "ddp":
        reduce = cluster.group_link("all-reduce", n, stride)
        return _in_best_calls(backward_s, 2 * part * kept / reduce.bus_bytes_per_s, reduce.overhead_s, kept)
    behind_backward = _in_best_calls(backward_s, part * kept / scatter.bus_bytes_per_s, scatter.overhead_s, kept)
    behind_optimizer = _in_best_calls(
        optimizer_s, part * kept / gather.bus_bytes_per_s, gather.overhead_s, kept, least=GATHER_BYTES
    )
    return behind_backward[0] + behind_optimizer[0], behind_backward[1] + behind_optimizer[1]


def _in_best_calls(
    work_s: float, transfer_s: float, overhead_s: float, payload: float, least: float = BUCKET_BYTES
) -> tuple[float, float]:
    """(busy, sticking out) of the best number of calls of at least `least` bytes; see `plan.communication`."""
    most = max(1, math.ceil(payload / least))
    calls = min(most, max(1, round(max(math.sqrt(work_s / overhead_s), (work_s - transfer_s) / overhead_s))))
    return transfer_s + calls * overhead_s, sticking_out_s(work_s, transfer_s, calls, overhead_s)


def _tensor_parallel_calls(model: ModelConfig, step: StepConfig) -> tuple[int, int]:
    """(calls in a step, payload bytes of each); `step.batch` is the group's."""
    per_block = 4 + 6 + (4 if step.checkpointing != "none" else 0)
    width = 2 if step.precision not in ("fp32", "tf32") else 4
    return model.num_layers * per_block + 4, step.batch * step.context * model.d_model * width


def fits(memory: MemorySplit, cluster: Cluster) -> bool:
    """Whether a GPU has that much beside `RESERVED_BYTES`."""
    return memory.total <= cluster.machine.memory_bytes - RESERVED_BYTES


def largest_batch(model: ModelConfig, step: StepConfig, cluster: Cluster, layout: Layout) -> int:
    """The most sequences per GPU that fit; 0 if not even one does."""

    def fits_with(batch: int) -> bool:
        return fits(strategy_memory(model, dataclasses.replace(step, batch=batch), layout), cluster)

    return _last(fits_with, 1 << 20)


def smallest_gpus(model: ModelConfig, step: StepConfig, cluster: Cluster, layout: Layout) -> int | None:
    """The fewest GPUs on which `step.batch` sequences per GPU fit; None if `MOST_GPUS` do not help."""

    def too_few(ranks: int) -> bool:
        return not fits(strategy_memory(model, step, dataclasses.replace(layout, data=ranks)), cluster)

    if layout.strategy in ("single", "ddp"):
        return None if too_few(1) else 1
    most = MOST_GPUS // layout.tensor
    ranks = _last(too_few, most) + 1
    return ranks * layout.tensor if ranks <= most else None


def scaled(cluster: Cluster, gpus: int) -> Cluster:
    """The same kind of cluster with another number of GPUs; a node that is not full where there are few."""
    here = min(gpus, cluster.gpus_per_node)
    return dataclasses.replace(cluster, gpus_per_node=here, nodes=-(-gpus // here))


def gpu_counts(most: int = MOST_GPUS) -> Sequence[int]:
    """Powers of two from 1 on."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds`, which is true up to some number and false from there; or 0."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
