"""The batches that a user's workload is compared and timed on: the first ones of rank 0, on every rank.

Each rank builds the workload, and its loader may give it other batches than another rank's: one that shards by rank
(that of transformers' Trainer and of accelerate, a DistributedSampler), or one that draws from a generator without a
seed. A scheme would then be held against one process that trained on other data, and be called wrong. So a few batches
are taken once and kept; where the ranks' differ, those of rank 0 are sent to all, and the rows say so.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError, place_of
from trainstep.check.one_process import BATCHES, STEPS
from trainstep.parallel.process import Process, on_all_ranks
from trainstep.step.batches import fingerprint, map_tensors
from trainstep.step.training_step import batches_of
from trainstep.step.workload import Workload, WorkloadSource

KEPT = max(STEPS, *BATCHES)
"""Number of batches that a comparison takes."""
RANK_0 = "rank 0's, divided: its loader gives every rank other batches"
"""Whose batches they are where they differ by rank."""


@dataclass(frozen=True)
class Kept:
    """Batches in the host's memory; each time they are iterated, as copies."""

    batches: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        return (map_tensors(batch, Tensor.clone) for batch in self.batches)


def same_on_all_ranks(
    source: WorkloadSource, config: StepConfig, process: Process
) -> tuple[WorkloadSource, str | None]:
    """The workload with the same few batches on every rank; and whose they are, where each rank's own are others.

    All ranks call it. Ours has the same batches on all ranks already.

    Raises:
        UsageError: the workload cannot be built, or its batches differ by rank and cannot be sent.
    """
    if source.is_builtin:
        return source, None
    own = on_all_ranks(process, partial(_first, source, config))
    prints: list[Any] = [None] * process.world_size
    dist.all_gather_object(prints, [fingerprint(batch) for batch in own], group=process.group)
    if all(each == prints[0] for each in prints):
        return _with(source, own), None
    sent: list[Any] = [on_all_ranks(process, lambda: _packed(own) if process.rank == 0 else None)]
    dist.broadcast_object_list(sent, group=process.group, group_src=0)
    return _with(source, pickle.loads(sent[0])), RANK_0


def _first(source: WorkloadSource, config: StepConfig) -> list[Any]:
    workload = source.build(config)
    try:
        batches = list(itertools.islice(batches_of(workload), KEPT))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the workload's batches failed: {type(error).__name__}: {error}{place_of(error)}") from error
    return [map_tensors(batch, lambda tensor: tensor.detach().to("cpu", copy=True)) for batch in batches]


def _packed(batches: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps(batches)
    except Exception as error:
        raise UsageError(
            f"the loader gives every rank other batches, and they cannot be sent ({type(error).__name__}: {error}); "
            "give the same batches on every rank, as tensors in tuples, lists or dicts"
        ) from error


def _with(source: WorkloadSource, batches: Sequence[Any]) -> WorkloadSource:
    return dataclasses.replace(source, build=partial(_build, source.build, Kept(batches)))


def _build(build: Callable[[StepConfig], Workload], batches: Kept, config: StepConfig) -> Workload:
    return dataclasses.replace(build(config), batches=batches)
