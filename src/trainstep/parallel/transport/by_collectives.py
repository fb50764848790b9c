"""Gathers and exchanges by collectives: NCCL or Gloo, and what every transport offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.collectives import all_gather_slices, all_reduce_mean, all_to_all
from trainstep.parallel.gloo import Waitable
from trainstep.parallel.slices import slices_of
from trainstep.parallel.transport.layout import Layout

TransportName = Literal["auto", "collectives", "peer-copies"]
"""auto: peer-copies between GPUs of one host that can read each other's memory, else collectives."""


Start = Callable[[], Waitable | None]
Exchange = Callable[[Sequence[Tensor], Tensor], tuple[Start, Callable[[], object] | None]]
"""Exchange of gradients (all of a layout's, or one tensor in which they are packed) and `result` (elements of a row):
what is to be started once, and what is to be done after it. Then `result` has the mean over all ranks of this rank's
row, in the dtype of `result`. The memory of what is exchanged is that of the current stream."""
Average = Callable[[Sequence[Tensor]], Start]
"""Average of tensors: what is to be started once, and makes them the means over all ranks."""


class Collectives:
    """NCCL between GPUs, Gloo between CPUs, or between GPUs through their hosts' memory; one host or many.

    What a transport starts runs on the current stream or, if starting it returned something, until that is waited for.
    """

    name: TransportName = "collectives"
    packs = True  # whether what is exchanged is to be packed into one tensor
    uncounted_bytes = 0  # bytes it holds that torch's allocator does not count

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def outbox_of(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Memory from which the others get this rank's slice of each tensor (bytes) in a gather; None if from the
        tensors."""
        return None

    def gather_of(self, tensors: Sequence[Tensor], *, laid_out: bool = False) -> Start:
        """A gather to be started any number of times: in every tensor (bytes), `slice_of` each rank becomes what that
        rank has there. The tensors' storage may come and go in between.

        Args:
            laid_out: whoever starts it has filled `outbox_of` the tensors, too, right before and on the same stream.
        """

        @cache  # views are made once, not for every gather; and late, when there is storage
        def slices() -> list[Tensor]:
            return slices_of(tensors, self._group)

        return lambda: all_gather_slices(tensors, self._group, slices())

    def exchange_of(self, layout: Layout) -> Exchange:
        """Exchange of one tensor, packed by `layout`: (ranks, elements of a row)."""

        def exchange(gradients: Sequence[Tensor], result: Tensor) -> tuple[Start, Callable[[], object] | None]:
            (send,) = gradients
            receive = torch.empty_like(send)
            mean = partial(torch.mean, receive, dim=0, dtype=result.dtype, out=result)
            return lambda: all_to_all(receive, send, self._group), mean

        return exchange

    def average(self, tensors: Sequence[Tensor]) -> Start:
        """Average tensors where they are: an `Average`."""
        return partial(all_reduce_mean, tensors, self._group)
