"""Does a scheme train what one process would? Loss and parameters after some steps, beside one on the whole batch.

The one process takes the ranks' batches one after another and adds up their gradients. What it is off by in the
precision at hand, compared with the next wider one, is what a scheme may be off by, twice over and plus one rounding of
that precision: the schemes sum in other orders and round elsewhere, but no more often.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.bench.parallel.schemes import full_parameters
from trainstep.config import StepConfig
from trainstep.errors import UsageError
from trainstep.parallel.process import Process
from trainstep.precision import AUTOCAST_DTYPES
from trainstep.training_step import TrainingStep, map_tensors
from trainstep.workload import Workload, WorkloadSource

STEPS = 5


@dataclass(frozen=True)
class Expected:
    """What one process arrives at."""

    losses: tuple[float, ...]
    parameters: dict[str, Tensor]
    """After `STEPS` steps."""
    moved: float
    """‖parameters − initial ones‖."""
    loss_allowed: float
    """How far a scheme's losses may be off."""
    update_allowed: float
    """How far its parameters may be off, relative to how far they moved."""


@dataclass(frozen=True)
class Agreement:
    """How far a scheme is from it."""

    loss_error: float
    update_error: float
    loss_allowed: float
    update_allowed: float

    @property
    def holds(self) -> bool:
        """Whether both are allowed; NaN never is."""
        return self.loss_error <= self.loss_allowed and self.update_error <= self.update_allowed


def part_of(workload: Workload, rank: int, world_size: int) -> Workload:
    """The workload with this rank's share of every batch: consecutive rows of each tensor's first dimension."""
    return dataclasses.replace(workload, batches=_Parts(workload, rank, world_size))


def expected(source: WorkloadSource, config: StepConfig, world_size: int) -> Expected:
    """Train in one process on the whole batch, in the precision at hand and in a wider one."""
    plain_config = dataclasses.replace(config, compile="off")
    wide_losses, wide = _train(source, dataclasses.replace(plain_config, precision="fp32"), world_size,
                               double=config.precision == "fp32")[:2]  # fmt: skip
    losses, parameters, moved = _train(source, plain_config, world_size, double=False)
    own = _distance(parameters, wide) / moved
    rounding = torch.finfo(AUTOCAST_DTYPES.get(config.precision, torch.float32)).eps
    off = max(abs(a - b) for a, b in zip(losses, wide_losses, strict=True))
    return Expected(losses, parameters, moved, 2 * off + rounding * max(map(abs, losses)), 2 * own + rounding)


def agreement(step: TrainingStep, wanted: Expected | None, process: Process) -> Agreement:
    """Take `STEPS` steps on every rank and compare; rank 0 knows what is wanted, and all ranks what came of it."""
    losses = []
    for _ in range(STEPS):
        loss = step(step.next_batch())
        assert loss is not None, "a step has a loss"
        losses.append(loss.double())
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=process.group)
    mean /= process.world_size
    square = 0.0
    for name, value in full_parameters(step.replica, step.module):
        if wanted is not None:
            square += float((value.double() - wanted.parameters[name].double()).square().sum())
    result: list[Any] = [None]
    if wanted is not None:
        off = max(abs(a - b) for a, b in zip(mean.tolist(), wanted.losses, strict=True))
        result = [Agreement(off, math.sqrt(square) / wanted.moved, wanted.loss_allowed, wanted.update_allowed)]
    dist.broadcast_object_list(result, group=process.group, group_src=0)
    found: Agreement = result[0]
    return found


def _train(
    source: WorkloadSource, config: StepConfig, world_size: int, *, double: bool
) -> tuple[tuple[float, ...], dict[str, Tensor], float]:
    workload = source.build(config)
    if double:
        workload.module.double()
    step = TrainingStep(workload, config)
    before = {name: value.detach().clone() for name, value in step.module.named_parameters()}
    losses = []
    for _, batch in zip(range(STEPS), iter(step.next_batch, None), strict=False):
        if double:
            batch = map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        parts = [map_tensors(batch, functools.partial(_rows, rank, world_size)) for rank in range(world_size)]
        losses.append(step.accumulate(parts))
    after = {name: value.detach() for name, value in step.module.named_parameters()}
    return tuple(float(loss) for loss in losses), after, _distance(after, before)


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


class _Parts:
    """One rank's share of each batch, from the start whenever it is iterated."""

    def __init__(self, workload: Workload, rank: int, world_size: int) -> None:
        self._batches, self._rank, self._world_size = workload.batches, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield map_tensors(batch, functools.partial(_rows, self._rank, self._world_size))


def _rows(rank: int, world_size: int, tensor: Tensor) -> Tensor:
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows == 0 or rows % world_size:
        raise UsageError(
            f"a batch with a tensor of shape {tuple(tensor.shape)} cannot be divided among {world_size} ranks; "
            f"its first dimension must be a multiple of {world_size}"
        )
    return tensor.chunk(world_size)[rank]
