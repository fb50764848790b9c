"""A step that was traced, whoever wrote its model: what it holds and takes under each strategy.

`bench.tracing` makes a `TracedStep`: bytes of weights, gradients and optimizer state, the moments of its memory, and
its operators with FLOPs and bytes. Here it is divided among ranks as `plan.strategies` divides the built-in model,
frozen parameters included: they have no gradient and no state, and FSDP shards and gathers them like the others.

Seconds come from the operators. A matrix product takes what `plan.roofline.product_seconds` says, a convolution its
FLOPs at the rate of a large product, fused attention at `FUSED_ATTENTION` of it, none less than its bytes at the rate
of a large copy; all else takes its bytes. Tensor parallelism has no general form and is left out. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainstep.base.errors import UnsupportedError
from trainstep.base.precision import PRECISIONS, PrecisionName
from trainstep.plan.communication import RankBytes, bytes_sent, default_bucket, staged_gradients
from trainstep.plan.machine import Cluster, Machine
from trainstep.plan.parallelism import Exchange, StepPlan, exchange_seconds
from trainstep.plan.roofline import FUSED_ATTENTION, PhaseSeconds, StepSeconds, product_seconds
from trainstep.plan.strategies import Layout, MemorySplit


@dataclass(frozen=True)
class Moment:
    """Bytes alive at once, beside weights and optimizer state."""

    gradients: int
    other: int  # activations and temporaries, the batch among them


@dataclass(frozen=True)
class TracedOperator:
    """Calls of one operator with one kind of arguments."""

    phase: str
    name: str  # aten::mm
    count: int
    flops: float  # of one call: of a product, a convolution or fused attention; else 0
    bytes: float
    is_half: bool  # whether its results have 16 bits per element
    product: tuple[int, int, int, int] | None = None  # (batch, m, n, k)


@dataclass(frozen=True)
class TracedStep:
    """A step of a workload, its optimizer's state in place."""

    parameters: int
    parameter_bytes: int
    trained_bytes: int  # of it, what takes gradients
    weights: int  # parameters and buffers
    gradients: int
    optimizer_state: int
    batch: int
    largest_group: int  # bytes of the parameters of the largest block, or of another module that has some of its own
    largest_gradient: int  # bytes
    groups: int
    kept_groups: int  # bytes of the parameters of the last groups, which our FSDP keeps from forward to backward
    moments: Mapping[str, Sequence[Moment]]  # phase → those of which no other has as much of both
    operators: Sequence[TracedOperator]
    flops: int | None  # of the mathematics; None where they were not counted
    tokens: int | None  # None where the batch does not tell
    basis: str  # how it was traced, in words

    @property
    def at_rest(self) -> int:
        """Weights, optimizer state and the batch."""
        return self.weights + self.optimizer_state + self.batch

    def peak_of(self, phase: str) -> int:
        """Bytes alive at the worst moment of a phase, on one device."""
        most = max(each.gradients + each.other for each in self.moments[phase])
        return self.weights + self.optimizer_state + most

    @property
    def peak(self) -> int:
        """Bytes alive at the worst moment of the step."""
        return max(map(self.peak_of, self.moments))

    @property
    def moment(self) -> str:
        """The phase of the peak."""
        return max(self.moments, key=self.peak_of)


@dataclass(frozen=True)
class TracedCase:
    """A traced step in its precision, and as FSDP computes it."""

    step: TracedStep
    precision: PrecisionName
    sharded: TracedStep
    """Under autocast FSDP casts weights before it gathers them, so that everything runs in the narrow type: the step
    traced so. Else the same step."""

    def memory(self, layout: Layout) -> MemorySplit:
        """Bytes that one GPU holds at its peak."""
        made = self.sharded if layout.shards_weights else self.step
        kept, found = self.step, []
        share = layout.parts if layout.shards_weights or layout.scheme == "zero-2" else 1
        ranks = self.rank_bytes(layout)
        for phase, moments in made.moments.items():
            for moment in moments:
                gradients, other, buffers = moment.gradients, moment.other, ranks.buffers
                # The sharded trace has gradients in the narrow type; what is kept has the step's own.
                if made.gradients:
                    gradients = gradients * kept.gradients // made.gradients
                if phase == "optimizer":
                    temporary = max(0, other - made.batch)
                    temporary = temporary * kept.weights // max(1, made.weights)
                    other, buffers = made.batch + math.ceil(temporary * layout.updated), ranks.staging
                gradients = -(-gradients // share)
                held = ranks.weights, gradients, ranks.optimizer_state, other, buffers
                found.append(MemorySplit(*held, moment=phase))
        return max(found, key=lambda each: each.total)

    def rank_bytes(self, layout: Layout) -> RankBytes:
        """Bytes that the data parallel ranks keep and send."""
        n, step, scheme, is_fsdp = layout.parts, self.step, layout.scheme, layout.shards_weights
        precision = PRECISIONS[self.precision]
        # Slices are rounded up, as the last rank's is padded.
        share = -(-step.weights // n) if is_fsdp else step.weights
        state = step.optimizer_state if scheme == "ddp" else -(-step.optimizer_state // n)
        gradients = -(-step.gradients // n) if is_fsdp or scheme == "zero-2" else step.gradients
        narrow = precision.computed_bytes / precision.stored_bytes
        exchange = self.exchange(layout)
        if scheme == "ddp":
            buffers, sent = 0, bytes_sent("all-reduce", int(exchange.reduced), n)
        else:
            # Backward gathers again all but the last groups, which are kept from forward on.
            again = exchange.gathered - exchange.not_again if is_fsdp else 0
            sent = bytes_sent("all-gather", int(exchange.gathered + again), n)
            sent += bytes_sent("reduce-scatter", int(exchange.reduced), n)
            group = int(step.largest_group * narrow)
            buffers = {"sharded optimizer": 0, "zero-2": step.largest_group}.get(scheme, 6 * group)
        sent //= n
        # A hybrid scheme exchanges each rank's slice of the gradients once more, between the replicas.
        if (ranks := layout.replicas) > 1:
            sent += bytes_sent("all-reduce", gradients, ranks) // ranks
            buffers += -(-step.largest_group // n)
        staging = 0
        if layout.averages_by_copies:
            buffers = staging = staged_gradients(gradients, default_bucket(gradients, step.largest_gradient), n)
        return RankBytes(share, gradients, state, buffers if layout.data > 1 else 0, sent, staging)

    def exchange(self, layout: Layout) -> Exchange:
        """Bytes of the whole model that are exchanged in a step."""
        step, precision = self.step, PRECISIONS[self.precision]
        if not layout.shards_weights:
            return Exchange(step.gradients, step.trained_bytes, step.gradients, step.groups)
        narrow = precision.computed_bytes / precision.stored_bytes
        gathered, kept = step.parameter_bytes * narrow, step.kept_groups * narrow
        return Exchange(step.gradients * narrow, gathered, step.gradients, step.groups, not_again=kept)

    def seconds(self, machine: Machine, *, optimizer_share: float = 1.0) -> StepSeconds:
        """Seconds that one GPU computes."""
        phases = {name: _phase_seconds(self.step, name, machine, self.precision) for name in self.step.moments}
        first = [phases[name] for name in ("forward", "loss") if name in phases]
        forward = PhaseSeconds(sum(each.products for each in first), sum(each.traffic for each in first))
        optimizer = phases["optimizer"]
        optimizer = PhaseSeconds(optimizer.products * optimizer_share, optimizer.traffic * optimizer_share)
        return StepSeconds(forward, phases["backward"], optimizer)

    def least_tokens(self, machine: Machine, rate: float) -> tuple[float, float]:
        """(data, fsdp): the tokens at which an axis sends, at `rate` bytes/s, as long as its products take at their
        full rate; see `plan.limits`, where the model's FLOPs are those of its matrices."""
        assert self.step.tokens is not None, "the batch has to tell"
        flops = machine.matmul_flops[self.precision]

        def least(phases: tuple[str, ...], moved: float) -> float:
            inside = sum(each.count * each.flops for each in self.step.operators if each.phase in phases)
            return float(self.step.tokens or 0) * (moved / rate) / (inside / flops) if inside else math.inf

        gathered = self.exchange(Layout("fsdp", 2)).gathered
        return least(("backward",), 2.0 * self.step.gradients), least(("forward", "loss"), gathered)

    def plan(self, cluster: Cluster, layout: Layout) -> StepPlan:
        """Memory, traffic and seconds of one layout.

        Raises:
            UnsupportedError: a layout with tensor parallelism.
        """
        if layout.tensor > 1:
            raise UnsupportedError("tensor parallelism is planned for the built-in model alone")
        compute = self.seconds(cluster.machine, optimizer_share=layout.updated)
        busy, exposed = exchange_seconds(layout, cluster, compute, self.exchange(layout))
        exposed += cluster.machine.interference * max(0.0, busy - exposed)
        return StepPlan(
            layout=layout,
            memory=self.memory(layout),
            sent=self.rank_bytes(layout).sent,
            compute=compute,
            communication_s=busy,
            exposed_s=exposed,
            tokens=None if self.step.tokens is None else layout.gpus * self.step.tokens,
            flops=None if self.step.flops is None else layout.gpus * self.step.flops,
        )


def operator_seconds(operator: TracedOperator, machine: Machine, precision: PrecisionName) -> float:
    """Seconds of one call."""
    moving = operator.bytes / machine.copy_bytes_per_s
    if not operator.flops:
        return moving
    rate_of: PrecisionName = "bf16" if operator.is_half else "fp32" if PRECISIONS[precision].is_half else precision
    flops = machine.matmul_flops[rate_of]
    if operator.product is not None:
        batch, m, n, k = operator.product
        is_fp32 = PRECISIONS[rate_of].rate == "fp32"
        return max(moving, product_seconds(m, n, k, flops, machine.multiprocessors, fp32=is_fp32, batch=batch))
    attained = FUSED_ATTENTION if "attention" in operator.name else 1.0
    return max(moving, operator.flops / (flops * attained))


def _phase_seconds(step: TracedStep, phase: str, machine: Machine, precision: PrecisionName) -> PhaseSeconds:
    inside = [each for each in step.operators if each.phase == phase]
    seconds = [(each, each.count * operator_seconds(each, machine, precision)) for each in inside]
    return PhaseSeconds(
        products=sum(each for operator, each in seconds if operator.flops),
        traffic=sum(each for operator, each in seconds if not operator.flops),
    )
