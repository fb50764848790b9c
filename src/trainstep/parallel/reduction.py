"""One bucket's way: cast if asked for, averaged over the ranks, and back into the gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.collectives import all_reduce_mean, reduce_scatter_mean, slice_of


@dataclass
class Bucket:
    """Parameters, by number, whose gradients are averaged in one call."""

    numbers: tuple[int, ...]
    scattered: bool
    """Whether each rank gets only its slice of the mean."""
    waiting: set[int] = field(default_factory=set)
    """Those whose gradient has not come yet in this step."""
    started: bool = False
    """Whether this step's call was made."""


class Reduction:
    """A bucket's call under way, from when it is made to when its result is waited for.

    Args:
        bucket: what is reduced.
        gradients: its parameters' gradients, overwritten.
        dtype: of the journey; None for the gradients' own.
        group: the ranks.
    """

    def __init__(
        self, bucket: Bucket, gradients: list[Tensor], dtype: torch.dtype | None, group: dist.ProcessGroup
    ) -> None:
        self.bucket = bucket
        self._gradients = gradients
        self._group = group
        self._travelling = gradients
        if dtype not in (None, gradients[0].dtype) and not gradients[0].is_complex():
            self._travelling = [torch.empty_like(gradient, dtype=dtype) for gradient in gradients]
            torch._foreach_copy_(self._travelling, gradients)
        reduce = reduce_scatter_mean if bucket.scattered else all_reduce_mean
        self._work = reduce(self._travelling, group)

    def wait(self) -> list[Tensor]:
        """Make the current stream wait; returns the means: of the gradients, or of this rank's slices of them."""
        self._work.wait()
        travelled, means = self._travelling, self._gradients
        if self.bucket.scattered:
            rank, world_size = self._group.rank(), self._group.size()
            travelled = [slice_of(tensor, rank, world_size) for tensor in travelled]
            means = [slice_of(tensor, rank, world_size) for tensor in means]
        if self._travelling is not self._gradients:
            torch._foreach_copy_(means, travelled)
        return means
