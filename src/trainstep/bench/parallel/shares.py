"""A rank's share of every batch of a workload: consecutive rows, as many for each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from trainstep.errors import UsageError
from trainstep.workload import Workload, map_tensors


def part_of(workload: Workload, rank: int, world_size: int) -> Workload:
    """The workload with a rank's share of its batches."""
    return dataclasses.replace(workload, batches=_Parts(workload, rank, world_size))


def share_of(batch: Any, rank: int, world_size: int) -> Any:
    """A rank's rows of each tensor's first dimension.

    Raises:
        UsageError: there are not as many rows for each rank.
    """

    def rows(tensor: Tensor) -> Tensor:
        count = tensor.shape[0] if tensor.dim() else 0
        if count == 0 or count % world_size:
            raise UsageError(
                f"a batch with a tensor of shape {tuple(tensor.shape)} cannot be divided among {world_size} ranks; "
                f"its first dimension must be a multiple of {world_size}"
            )
        return tensor.chunk(world_size)[rank]

    return map_tensors(batch, rows)


class _Parts:
    """One rank's share of each batch, from the start whenever it is iterated."""

    def __init__(self, workload: Workload, rank: int, world_size: int) -> None:
        self._batches, self._rank, self._world_size = workload.batches, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield share_of(batch, self._rank, self._world_size)
