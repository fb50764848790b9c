"""Strategies of parallel training: their meshes, and what one GPU holds under each.

`plan.memory` knows what one GPU holds at each moment of a step. A strategy divides some of it:

    strategy           weights   gradients   optimizer state   activations   buffers
    single, ddp        1         1           1                 1             a bucket, where it goes by copies
    sharded optimizer  1         1           1/n               1             the same
    zero-2             1         1/n         1/n               1             the largest group's gradients
    fsdp               1/n       1/n         1/n               1             six of the largest group (see rank_bytes)
    hsdp               r/n       r/n         r/n               1             the same, and r/n of the largest group
    fsdp + tp          1/(nt)    1/(nt)      1/(nt)            1/t           the same of 1/t of a group

n ranks of data parallelism, in r replicas where the strategy is hybrid, t of tensor parallelism. FSDP casts weights
before it gathers them, so in half precision everything runs in that type, and no casts of weights are kept; when
forward is through it has the groups that it keeps for backward, and one that is staged, alone. Left out: parameters of
one dimension, which FSDP keeps whole. Imports no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.precision import PRECISIONS
from trainstep.base.schemes import DataParallel, Strategy
from trainstep.plan.communication import RankBytes, default_bucket, rank_bytes
from trainstep.plan.machine import GIB, Cluster, Machine
from trainstep.plan.memory import BEFORE_BACKWARD, peak_bytes


@dataclass(frozen=True)
class Layout:
    """A strategy with its mesh: `data` ranks, each of `tensor` GPUs, in `replicas` (hsdp) of consecutive ranks."""

    strategy: Strategy
    data: int = 1
    tensor: int = 1
    replicas: int = 1
    by_copies: bool = False  # whether gradients of all its ranks go by copies
    blocks_per_group: int = 1  # that fsdp and hsdp gather together

    @property
    def gpus(self) -> int:
        return self.data * self.tensor

    @property
    def scheme(self) -> DataParallel:
        """Scheme of the data parallel ranks."""
        if self.strategy == "single":
            return "ddp"
        return "fsdp" if self.strategy == "fsdp + tp" else self.strategy

    @property
    def shards_weights(self) -> bool:
        return self.scheme in ("fsdp", "hsdp")

    @property
    def parts(self) -> int:
        """Among how many ranks a strategy divides what it divides."""
        return self.data // self.replicas

    def replicas_cross(self, gpus_per_node: int) -> bool:
        """True if each replica is within a node and no two share one, so that what goes between them has the network to
        itself."""
        together = self.parts * self.tensor
        return self.replicas > 1 and together <= gpus_per_node < 2 * together

    def placed_on(self, cluster: Cluster) -> Layout:
        """The same layout, by copies where one node has all of it and no other replica."""
        return dataclasses.replace(self, by_copies=self.gpus <= cluster.gpus_per_node and self.replicas == 1)

    @property
    def averages_by_copies(self) -> bool:
        return self.by_copies and self.data > 1 and self.scheme in ("ddp", "sharded optimizer")

    @property
    def updated(self) -> float:
        """The part of the parameters that a rank updates."""
        return 1.0 if self.strategy in ("single", "ddp") else 1 / self.parts


def mesh_of(gpus: int, tensor_parallel: int, model: ModelConfig) -> Layout:
    """The mesh of FSDP and tensor parallelism over all GPUs.

    Raises:
        UsageError: GPUs, heads or the feed-forward cannot be divided so.
    """
    if tensor_parallel < 1:
        raise UsageError(f"tensor_parallel is {tensor_parallel}; expected at least 1")
    for what, count in (("GPUs", gpus), ("heads", model.num_heads), ("columns of d_ff", model.d_ff)):
        if count % tensor_parallel:
            fit = ", ".join(map(str, _divisors(math.gcd(gpus, model.num_heads, model.d_ff))))
            mesh = f"a mesh with tensor parallelism of {tensor_parallel} is impossible"
            raise UsageError(f"{mesh}: it does not divide {count} {what}; choose among {fit}")
    return Layout("fsdp + tp", gpus // tensor_parallel, tensor_parallel)


def tensor_parallel_choices(cluster: Cluster, model: ModelConfig) -> list[int]:
    """The sizes above 1 that stay within a node and divide GPUs, heads and feed-forward."""
    return [t for t in _divisors(math.gcd(cluster.gpus_per_node, model.num_heads, model.d_ff)) if t > 1]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


RESERVED_BYTES = GIB
"""Bytes of a GPU's memory that no tensor gets: the CUDA context and the libraries' workspaces. An assumption."""

MOST_GPUS = 16_384


@dataclass(frozen=True)
class MemorySplit:
    """Bytes on one GPU at the moment of the peak."""

    weights: int
    gradients: int
    optimizer_state: int
    activations: int  # everything else that computing keeps or makes, casts of weights included
    buffers: int  # for communication
    moment: str

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.activations + self.buffers


def largest_group(model: ModelConfig, blocks: int = 1) -> int:
    """Parameters of the largest group that FSDP gathers at once: so many blocks, the embedding or the head."""
    return max(min(blocks, model.num_layers) * _block(model), model.vocab_size * model.d_model)


def largest_matrix(model: ModelConfig) -> int:
    """Elements of the largest parameter: the embedding's, or one of a block's feed-forward."""
    return model.d_model * max(model.vocab_size, model.d_ff)


def kept_groups(model: ModelConfig, blocks: int = 1) -> int:
    """Parameters of the groups that our FSDP keeps from forward to backward: the last block, or the last of a group of
    so many, and the head."""
    last = model.num_layers % blocks or min(blocks, model.num_layers)
    return last * _block(model) + model.vocab_size * model.d_model


def _block(model: ModelConfig) -> int:
    return 4 * model.d_model**2 + 3 * model.d_model * model.d_ff + 2 * model.d_model


def strategy_memory(model: ModelConfig, step: StepConfig, layout: Layout) -> MemorySplit:
    """Bytes that one GPU holds at its peak. Compiled code is counted as uncompiled, which holds somewhat more.

    Raises:
        UnsupportedError: a step without a memory formula, see `plan.memory.peak_bytes`.
    """
    t, n, is_fsdp = layout.tensor, layout.parts, layout.shards_weights
    shared = dataclasses.replace(step, batch=step.batch * t, compile="off")
    in_bf16 = is_fsdp and PRECISIONS[step.precision].is_autocast
    computed = dataclasses.replace(shared, precision="bf16-pure") if in_bf16 else shared
    peak = peak_bytes(model, computed, on_cuda=True)
    kept_width, made_width = PRECISIONS[step.precision].stored_bytes, PRECISIONS[computed.precision].stored_bytes
    kept = shared_bytes(model, step, layout)
    gradient_ranks = n if is_fsdp or layout.scheme == "zero-2" else 1
    split: list[MemorySplit] = []
    for moment, alive in peak.moments.items():
        made, buffers = peak.gradients[moment], kept.buffers
        if is_fsdp and moment in BEFORE_BACKWARD:
            together = layout.blocks_per_group
            groups = kept_groups(model, together) + largest_group(model, together)  # one that is staged, if by copies
            buffers = min(buffers, -(-groups // t) * PRECISIONS[step.precision].computed_bytes)
        other = alive - peak.static.at_rest - made
        if moment == "optimizer":
            temporary = other - 4 * step.context * model.head_dim  # the foreach form's, in the width it keeps
            updated = n if layout.strategy not in ("single", "ddp") else 1
            other += temporary * kept_width // (made_width * updated) - temporary
            buffers = kept.staging
        gradients = -(-(made * kept_width // (made_width * t)) // gradient_ranks)
        split.append(MemorySplit(kept.weights, gradients, kept.optimizer_state, -(-other // t), buffers, moment))
    return max(split, key=lambda each: each.total)


def shared_bytes(model: ModelConfig, step: StepConfig, layout: Layout) -> RankBytes:
    """Bytes that the data parallel ranks keep and send, by `rank_bytes`."""
    precision, parameters = PRECISIONS[step.precision], -(-model.num_parameters // layout.tensor)
    bucket = default_bucket(parameters * precision.stored_bytes, largest_matrix(model) * precision.stored_bytes)
    found = rank_bytes(
        layout.scheme,
        parameters,
        layout.data,
        replicas=layout.replicas,
        bytes_per_parameter=precision.stored_bytes,
        state_per_parameter=0 if step.optimizer == "sgd" else 2 * precision.stored_bytes,
        compute_bytes=precision.computed_bytes,
        reduce_bytes=2 if precision.is_half and layout.shards_weights else None,
        largest_group=-(-largest_group(model, layout.blocks_per_group) // layout.tensor),
        not_again=kept_groups(model, layout.blocks_per_group) // layout.tensor,
        peer_copies=layout.averages_by_copies,
        largest_bucket=bucket // precision.stored_bytes,
    )
    return found if layout.data > 1 else dataclasses.replace(found, buffers=0)


def tensor_bytes(machine: Machine) -> int:
    """Bytes of a GPU's memory that tensors can have: all but `RESERVED_BYTES`."""
    return max(0, machine.memory_bytes - RESERVED_BYTES)


def fits(memory: MemorySplit, cluster: Cluster) -> bool:
    """True if a GPU has that much for tensors."""
    return memory.total <= tensor_bytes(cluster.machine)


def largest_batch(model: ModelConfig, step: StepConfig, cluster: Cluster, layout: Layout) -> int:
    """The most sequences per GPU that fit; 0 if not even one does."""

    def too_many(batch: int) -> bool:
        return not fits(strategy_memory(model, dataclasses.replace(step, batch=batch), layout), cluster)

    return _first(too_many, 1 << 20) - 1


def fewest_gpus(memory_of: Callable[[Layout], MemorySplit], cluster: Cluster, layout: Layout) -> int | None:
    """The fewest GPUs that what `memory_of` says fits on; None if `MOST_GPUS` do not help."""
    together = layout.tensor * layout.replicas

    def enough(ranks: int) -> bool:
        placed = dataclasses.replace(layout, data=ranks * layout.replicas).placed_on(cluster)
        return fits(memory_of(placed), cluster)

    most = 1 if layout.strategy in ("single", "ddp") else MOST_GPUS // together
    if enough(1):  # before two ranks, which may need more than one, as they stage what they send
        return together
    ranks = 1 + _first(lambda more: enough(1 + more), most - 1)
    return ranks * together if ranks <= most else None


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number up to `most` for which `holds`, which stays true from there; `most` + 1 where none is."""
    return 1 + bisect.bisect_left(range(1, most + 1), True, key=holds)
