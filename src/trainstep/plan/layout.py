"""Strategies and their meshes: which GPUs hold the same, and which share a matrix. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainstep.config import ModelConfig
from trainstep.errors import UsageError
from trainstep.plan.machine import Cluster
from trainstep.schemes import DataParallel, Strategy


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
    def scheme(self) -> DataParallel:
        """What the data parallel ranks do."""
        if self.strategy == "single":
            return "ddp"
        return "fsdp" if self.strategy == "fsdp + tp" else self.strategy


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


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
