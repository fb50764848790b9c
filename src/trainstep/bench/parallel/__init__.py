"""A case of `bench parallel`: a workload under a scheme, and the step that a rank takes on its share of each batch.

A share is consecutive rows of every tensor, as many for each rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainstep.base.config import StepConfig
from trainstep.base.schemes import Scheme
from trainstep.measure.step import case_columns
from trainstep.parallel.process import Process
from trainstep.parallel.replicas import build
from trainstep.rows.records import Scalar
from trainstep.step.batches import share_of
from trainstep.step.training_step import TrainingStep
from trainstep.step.workload import Workload, WorkloadSource


@dataclass(frozen=True)
class DoBench:
    """Number of steps by the rules of `triton.testing.do_bench`: by milliseconds, not by counts."""

    warmup_ms: float
    rep_ms: float

    def counts(self, step_ms: float) -> tuple[int, int]:
        """Steps of warm-up, and timed ones, of a step that takes so long: as many as fit, at least one of each."""
        return max(1, int(self.warmup_ms / step_ms)), max(1, int(self.rep_ms / step_ms))


@dataclass(frozen=True)
class ParallelCase:
    """A scheme to measure."""

    source: WorkloadSource
    config: StepConfig
    """The batch is one rank's, where the workload lets it be chosen; a user's own is divided among the ranks."""
    scheme: Scheme
    warmup: int = 5
    steps: int = 10
    do_bench: DoBench | None = None
    """In place of `warmup` and `steps`, which count."""
    sustained: bool = False
    """True if the timed steps are one window in which nothing waits between steps, as in training."""
    float32: StepConfig | None = None
    """Settings of the step where it is checked in float32, which not all attention has; None: as it is otherwise."""
    allow_unused: bool = False
    """True if parameters may get no gradient on some rank, as one process found; it costs a collective and a wait."""

    @property
    def label(self) -> str:
        """The scheme, and how it is compiled if it is."""
        compiled = "" if self.config.compile == "off" else f", compile {self.config.compile}"
        return f"{self.scheme.label}{compiled}"

    def columns(self, world_size: int) -> dict[str, Scalar]:
        """The columns that identify the case's row."""
        scheme = {"scheme": self.scheme.name, "world_size": world_size, "replicas": self.scheme.replicas}
        if self.scheme.blocks_per_group > 1:
            scheme["blocks_per_group"] = self.scheme.blocks_per_group
        timing: dict[str, Scalar] = {"timing": "sustained"} if self.sustained else {}
        return case_columns(self.source, self.config) | scheme | timing

    def whole(self, world_size: int) -> StepConfig:
        """The configuration whose workload has the batch of all ranks."""
        if not self.source.is_builtin:
            return self.config
        return dataclasses.replace(self.config, batch=self.config.batch * world_size)

    def build(self, process: Process, change: Callable[[Workload], Workload] = lambda same: same) -> TrainingStep:
        """The step on this rank, with its share of the batches; `change` may alter the workload before."""
        config = dataclasses.replace(self.whole(process.world_size), device=str(process.device))
        workload = change(part_of(self.source.build(config), process.rank, process.world_size))
        parallelize = partial(build, self.scheme, process, config, allow_unused=self.allow_unused)
        return TrainingStep(workload, config, parallelize)


def part_of(workload: Workload, rank: int, world_size: int) -> Workload:
    """The workload with a rank's share of its batches."""
    return dataclasses.replace(workload, batches=_Shares(workload, rank, world_size))


@dataclass(frozen=True)
class _Shares:
    """A rank's share of each batch of a workload, from the start whenever it is iterated."""

    workload: Workload
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[Any]:
        return (share_of(batch, self.rank, self.world_size) for batch in self.workload.batches)
