"""Gathers and exchanges by copies between the memories of one host's ranks, which copy engines make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.announced import announce
from trainstep.parallel.ranks import others
from trainstep.parallel.slices import slice_of
from trainstep.parallel.transport.by_collectives import Exchange, Start, TransportName
from trainstep.parallel.transport.copies import Copies, CopiesFrom
from trainstep.parallel.transport.layout import Layout
from trainstep.parallel.transport.peer_memory import PeerMemory

OUTBOX_BYTES, INBOX_BYTES = 2**28, 2**29
"""Most that a rank stages at a time: of its slices, and of gradients that it gets. A copy of that takes so much longer
than the barriers around it that rounds cost nothing to speak of."""

_GATHER, _EXCHANGE = 0, 1
"""Channels of barriers: gathers and exchanges run on streams of their own."""


class PeerCopies:
    """Copies between the memories of one host's ranks.

    To gather, every rank lays its slices out in a buffer that the others read; each takes what it lacks straight into
    its place. To exchange, every rank writes into the others' inboxes.

    Args:
        slice_bytes: the most bytes of one rank's slices in a gather, each rounded up to 256.
        exchange_bytes: the most bytes in a call of `exchange`.
    """

    name: TransportName = "peer-copies"
    packs = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slice_bytes: int, exchange_bytes: int) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._slice_bytes = min(padded(slice_bytes), OUTBOX_BYTES)
        self._exchange_bytes = min(exchange_bytes, INBOX_BYTES)
        self._memory = PeerMemory(max(self._slice_bytes + self._exchange_bytes, 1), group, device)  # outbox, inbox
        self.uncounted_bytes = self._memory.uncounted
        self._others = others(group)

    def gather_of(self, tensors: Sequence[Tensor]) -> Start:
        rounds = list(_rounds([tensor.numel() // self._ranks for tensor in tensors], self._slice_bytes))

        def pieces(number: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
            """Of a round: the rank's pieces in its outbox, and here in their places."""
            outbox = self._memory.buffers[rank]
            staged = [outbox[start : start + part.stop - part.start] for _, part, start in rounds[number]]
            return staged, [slice_of(tensors[index], rank, self._ranks)[part] for index, part, _ in rounds[number]]

        @cache  # views are made once, not for every gather; and late, when there is storage
        def made(number: int) -> tuple[tuple[list[Tensor], list[Tensor]], Copies]:
            """Of a round: the outbox and what goes there, and the copies from the others'."""
            theirs = [pieces(number, rank) for rank in self._others]
            sources, targets = (list(chain.from_iterable(each)) for each in zip(*theirs, strict=True))
            return pieces(number, self._rank), Copies(targets, sources)

        def start() -> None:
            announce("all_gather", tensors, self._ranks)
            for number in range(len(rounds)):
                (outbox, mine), from_others = made(number)
                torch._foreach_copy_(outbox, mine)
                self._memory.barrier(_GATHER)
                from_others.start()
                self._memory.barrier(_GATHER)

        return start

    def exchange_of(self, layout: Layout) -> Exchange:
        """Of whole gradients as they are: the driver copies the pieces of each to the ranks' inboxes."""

        @cache  # made once, for all exchanges of a dtype
        def rounds(dtype: torch.dtype) -> list[tuple[Tensor, CopiesFrom, slice]]:
            """Each round's inbox here, the copies to all inboxes, and the part of a row that it is."""
            fit = self._exchange_bytes // (layout.ranks * dtype.itemsize)
            at_once = fit if fit >= layout.size else fit // 128 * 128 or max(fit, 1)  # whole cache lines
            made = []
            for first in range(0, layout.size, at_once):
                part = slice(first, min(first + at_once, layout.size))
                places, targets = [], []
                for rank in (*self._others, self._rank):
                    row = self._inbox_of(rank, (layout.ranks, part.stop - first), dtype)[self._rank]
                    for piece in layout.pieces(rank, part.start, part.stop):
                        places.append((piece.number, piece.offset))
                        targets.append(row[piece.place : piece.place + piece.elements])
                inbox = self._inbox_of(self._rank, (layout.ranks, part.stop - first), dtype)
                made.append((inbox, CopiesFrom(places, targets), part))
            return made

        def exchange(gradients: Sequence[Tensor], result: Tensor) -> tuple[Start, None]:
            def start() -> None:
                announce("all_to_all", gradients, self._ranks)
                for inbox, copies, part in rounds(gradients[0].dtype):
                    self._memory.barrier(_EXCHANGE)
                    copies.start(gradients)
                    self._memory.barrier(_EXCHANGE)
                    torch.mean(inbox, dim=0, dtype=result.dtype, out=result[part])

            return start, None

        return exchange

    def _inbox_of(self, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        inbox = self._memory.buffers[rank][self._slice_bytes :]
        return inbox[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)


def padded(nbytes: int) -> int:
    """What a tensor of so many bytes takes in a buffer: tensors start at multiples of 256, as CUDA's allocator's do."""
    return -(-nbytes // 256) * 256


def _rounds(sizes: Sequence[int], room: int) -> Iterator[list[tuple[int, slice, int]]]:
    """Slices of these bytes, cut to pieces that fit a buffer of `room` bytes (a multiple of 256): of each round, (index
    of the slice, piece of it, where the piece starts in the buffer)."""
    taken: list[tuple[int, slice, int]] = []
    end = 0
    for index, size in enumerate(sizes):
        done = 0
        while done < size:
            if end == room:
                yield taken
                taken, end = [], 0
            stop = min(size, done + room - end)
            taken.append((index, slice(done, stop), end))
            end += padded(stop - done)
            done = stop
    if taken:
        yield taken
