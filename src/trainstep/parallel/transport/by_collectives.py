"""Gathers and exchanges by collectives, NCCL or Gloo; the types of every transport; the layout of exchanged rows.

A row is what one rank gets: its slice of the first gradient, then of the second, and so on. All rows have one layout,
so that they can be added up as they are. Where a gradient has too few rows for all ranks, the last ranks' slices end
early, and nothing reads the rest of their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.collectives import all_gather_slices, all_reduce_mean, all_to_all
from trainstep.parallel.gloo import Waitable
from trainstep.parallel.slices import slices_of

TransportName = Literal["auto", "collectives", "peer-copies"]
"""auto: peer-copies between GPUs of one host that can read each other's memory, else collectives."""


Start = Callable[[], Waitable | None]
Exchange = Callable[[Sequence[Tensor], Tensor], tuple[Start, Callable[[], object] | None]]
"""Exchange of gradients (all of a layout's, or one tensor in which they are packed) and `result` (elements of a row):
what is to be started once, and what is to be done after it. Then `result` has the mean over all ranks of this rank's
row, in the dtype of `result`. The memory of what is exchanged is that of the current stream."""
Average = Callable[[Sequence[Tensor]], Start]
"""Average of tensors: what is to be started once, and makes them the means over all ranks."""


@dataclass(frozen=True)
class Piece:
    """Elements that one rank gets of one gradient, or a part of them."""

    number: int  # of the gradient
    offset: int  # in the gradient, whose elements are in order
    place: int  # in the row
    elements: int


class Layout:
    """The rows of gradients of so many elements each.

    Args:
        slices: of each gradient, the elements that a rank gets; the last ranks get fewer, or none.
    """

    def __init__(self, elements: Sequence[int], slices: Sequence[int], ranks: int) -> None:
        self.ranks, self.elements, self.slices = ranks, elements, slices
        # of each gradient's slice in a row, at multiples of 16; and the elements of a row
        *self.starts, self.size = accumulate((-(-each // 16) * 16 for each in slices), initial=0)

    def pieces(self, rank: int, first: int = 0, last: int | None = None) -> Iterator[Piece]:
        """Pieces that a rank gets, from the row's element `first` on and before `last`; places count from `first`."""
        last = self.size if last is None else last
        for number, (whole, elements, start) in enumerate(zip(self.elements, self.slices, self.starts, strict=True)):
            begin, there = rank * elements, min(elements, max(whole - rank * elements, 0))
            low, high = max(start, first), min(start + there, last)
            if low < high:
                yield Piece(number, begin + low - start, low - first, high - low)

    def blocks(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Blocks of one gradient: how many ranks get how many elements each, the first of these ranks, and how many
        elements of the gradient are before them."""
        elements = self.slices[number]
        full, rest = divmod(self.elements[number], elements)  # ranks with all their rows; elements of the next
        if full:
            yield full, elements, 0, 0
        if rest:
            yield 1, rest, full, full * elements


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
