"""Does a scheme train what one process would? Loss and parameters after some steps, beside one on the whole batch.

The one process takes the ranks' batches one after another and adds up their gradients. It is the plain computation of
the error budget, its error measured against the next wider precision: the schemes sum in other orders
and round elsewhere, but no more often.

A model with dropout draws random numbers. Here, and only here, each forward starts from a seed of its own, which
depends on the step and on whose share of the batch it is, so that a share's numbers are the same wherever it is run. In
another precision a GPU drops other elements, so what the precision is off by is measured without dropout.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.bench.check import allowed_error, one_rounding
from trainstep.bench.check.dropout import eager_random, without_dropout
from trainstep.bench.outcome import Failure, attempt, attempt_on_all_ranks
from trainstep.bench.parallel import ParallelCase, share_of
from trainstep.casting import autocast_dtype
from trainstep.config import StepConfig
from trainstep.errors import UsageError
from trainstep.parallel.process import Process
from trainstep.replicas import full_parameters
from trainstep.schemes import Scheme
from trainstep.training_step import TrainingStep
from trainstep.workload import Workload, WorkloadSource, map_tensors

STEPS = 5


@dataclass(frozen=True)
class Trained:
    """What `STEPS` steps in one process give."""

    losses: tuple[float, ...]
    parameters: dict[str, Tensor]
    """Afterwards."""
    moved: float
    """‖parameters − initial ones‖."""
    unused: bool
    """Whether some share of a batch gave some parameter no gradient."""


@dataclass(frozen=True)
class Expected:
    """What one process trains, and how far a scheme may be from it."""

    trained: Trained
    loss_allowed: float
    """How far a scheme's losses may be off."""
    update_allowed: float
    """How far its parameters may be off, relative to how far they moved."""


@dataclass(frozen=True)
class Agreement:
    """How far a scheme is from one process, and how far it may be."""

    loss_error: float
    update_error: float
    loss_allowed: float
    update_allowed: float

    @property
    def holds(self) -> bool:
        """Whether both are allowed; NaN never is."""
        return self.loss_error <= self.loss_allowed and self.update_error <= self.update_allowed


@dataclass(frozen=True)
class Comparison:
    """All schemes, each beside one process."""

    schemes: Mapping[Scheme, Agreement | Failure | None]
    """None for single: it trains on its own batch alone, another model, and has only a time to compare with."""
    num_parameters: int
    """Of the model, on rank 0; 0 on others."""
    allow_unused: bool
    """Whether parameters may get no gradient."""


def compare_with_one_process(cases: Sequence[ParallelCase], process: Process) -> Comparison:
    """Train by every scheme on all ranks, and in one process on rank 0. All ranks call it.

    Raises:
        UsageError: one process cannot train on the whole batch.
    """
    wanted, allow_unused = _expected_on_first_rank(cases[0], process)
    schemes: dict[Scheme, Agreement | Failure | None] = {}
    for case in cases:
        if not case.scheme.communicates:
            schemes[case.scheme] = None
            continue
        tried = dataclasses.replace(case, allow_unused=allow_unused)
        found = attempt_on_all_ranks(functools.partial(agreement, tried, wanted, process), process)
        schemes[case.scheme] = found if isinstance(found, Failure) else found[0]
    count = 0 if wanted is None else sum(value.numel() for value in wanted.trained.parameters.values())
    return Comparison(schemes, count, allow_unused)


def _expected_on_first_rank(case: ParallelCase, process: Process) -> tuple[Expected | None, bool]:
    """What one process trains, on rank 0, and None elsewhere; and, on all, whether it left parameters unused."""
    found: Expected | Failure | None = None
    if process.rank == 0:
        found = attempt(lambda: expected(case.source, case.whole(process.world_size), process.world_size))
    known: list[Failure | bool] = [found if isinstance(found, Failure) else found is not None and found.trained.unused]
    dist.broadcast_object_list(known, group=process.group, group_src=0)
    if isinstance(known[0], Failure):
        raise UsageError(f"one process could not train on the whole batch, to compare with: {known[0].reason}")
    assert not isinstance(found, Failure), "its failure was sent to this rank too"
    return found, known[0]


def expected(source: WorkloadSource, config: StepConfig, world_size: int) -> Expected:
    """Train in one process on the whole batch, in the precision at hand and in a wider one."""
    plain_config = dataclasses.replace(config, compile="off")
    wide_config = dataclasses.replace(plain_config, precision="fp32")
    double = config.precision == "fp32"
    with without_dropout() as dropout:
        wide = _train(source, wide_config, world_size, double=double)
        plain = _train(source, plain_config, world_size, double=False)
    own = _distance(plain.parameters, wide.parameters) / plain.moved
    rounding = one_rounding(autocast_dtype(config.precision) or torch.float32)
    off = max(abs(a - b) for a, b in zip(plain.losses, wide.losses, strict=True))
    if dropout.calls:
        plain = _train(source, plain_config, world_size, double=False)
    loss_allowed = allowed_error(off, rounding * max(map(abs, plain.losses)))
    return Expected(plain, loss_allowed, allowed_error(own, rounding))


def agreement(case: ParallelCase, wanted: Expected | None, process: Process) -> Agreement:
    """Take `STEPS` steps on every rank and compare; rank 0 has what is wanted, and sends the result to all ranks."""
    step = case.build(process, lambda workload: _seeded(workload, process.rank, process.world_size))
    losses = []
    with nullcontext() if case.config.compile == "off" else eager_random():
        for _ in range(STEPS):
            loss = step(step.next_batch())
            assert loss is not None, "a step has a loss"
            losses.append(loss.double())
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=process.group)
    mean /= process.world_size
    squares: dict[str, float] = {}
    for name, value in full_parameters(step.replica, step.module):
        if wanted is not None and name in wanted.trained.parameters:  # a tied one may come again, by another name
            squares[name] = float((value.double() - wanted.trained.parameters[name].double()).square().sum())
    result: list[Agreement | None] = [None]
    if wanted is not None:
        off = max(abs(a - b) for a, b in zip(mean.tolist(), wanted.trained.losses, strict=True))
        moved_apart = math.sqrt(sum(squares.get(name, math.inf) for name in wanted.trained.parameters))
        update_error = moved_apart / wanted.trained.moved
        result = [Agreement(off, update_error, wanted.loss_allowed, wanted.update_allowed)]
    dist.broadcast_object_list(result, group=process.group, group_src=0)
    assert result[0] is not None, "rank 0 knows what is wanted"
    return result[0]


def _train(source: WorkloadSource, config: StepConfig, world_size: int, *, double: bool) -> Trained:
    workload = _seeded(source.build(config), 0, 1)
    if double:
        workload.module.double()
    step = TrainingStep(workload, config)
    trained = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
    gradients = 0

    def came(parameter: Tensor) -> None:
        nonlocal gradients
        gradients += 1

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(came)
    before = {name: value.detach().clone() for name, value in step.module.named_parameters()}
    losses = []
    for _ in range(STEPS):
        batch = step.next_batch()
        if double:
            batch = map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        losses.append(step.accumulate([share_of(batch, rank, world_size) for rank in range(world_size)])[0])
    after = {name: value.detach() for name, value in step.module.named_parameters()}
    unused = gradients < len(trained) * STEPS * world_size
    return Trained(tuple(float(loss) for loss in losses), after, _distance(after, before), unused)


def _seeded(workload: Workload, first: int, stride: int) -> Workload:
    """The workload, its n-th forward drawing from seed first + n · stride, and nothing else from what that leaves."""
    seeds, forward = itertools.count(first, stride), workload.forward

    def from_its_seed(module: nn.Module, batch: Any) -> Any:
        devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.is_cuda})
        with torch.random.fork_rng(devices):
            torch.manual_seed(next(seeds))
            return forward(module, batch)

    return dataclasses.replace(workload, forward=from_its_seed)


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))
