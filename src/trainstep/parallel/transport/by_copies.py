"""Gathers and exchanges by copies between the memories of one host's ranks, which copy engines make; and the choice
between copies and collectives."""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.base.errors import UsageError
from trainstep.parallel.announced import Announced, Record, announce, note
from trainstep.parallel.ranks import others
from trainstep.parallel.side_stream import current_stream
from trainstep.parallel.slices import slice_of
from trainstep.parallel.transport.by_collectives import Average, Collectives, Exchange, Layout, Start, TransportName
from trainstep.parallel.transport.peer_memory import Copies, PeerMemory, PieceCopies, obstacle_to_sharing

OUTBOX_BYTES, INBOX_BYTES = 2**28, 2**29
"""Most that a rank stages at a time: of its slices, and of gradients that it gets. A copy of that takes so much longer
than the barriers around it that rounds cost nothing to speak of."""

_RECENT_S = 0.1
"""Age up to which a record may say that what is under way began: to ask a GPU whether the last has ended takes the host
as long as to start a kernel."""

_GATHER, _EXCHANGE = 0, 1
"""Channels of barriers: gathers and exchanges run on streams of their own."""
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class PeerCopies:
    """Copies between the memories of one host's ranks.

    To gather, every rank lays its slices out in a buffer that the others read; each takes what it lacks straight into
    its place. To exchange, every rank writes into the others' inboxes. To average, they exchange, and every rank lays
    the means that it got out in its outbox, for the others to take; so what gathers does not average.

    Args:
        slice_bytes: the most bytes of one rank's slices in a gather, each rounded up to 256, or of its means.
        exchange_bytes: the most bytes in a call of what exchanges.
    """

    name: TransportName = "peer-copies"
    packs = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slice_bytes: int, exchange_bytes: int) -> None:
        self._rank, self.ranks = group.rank(), group.size()
        self._slice_bytes = min(padded(slice_bytes), OUTBOX_BYTES)
        self._exchange_bytes = min(exchange_bytes, INBOX_BYTES)
        self._memory = PeerMemory(max(self._slice_bytes + self._exchange_bytes, 1), group, device)  # outbox, inbox
        self.uncounted_bytes = self._memory.uncounted
        self._others = others(group)
        self._gathers, self._exchanges = (
            Channel(self._memory, number, group, device) for number in (_GATHER, _EXCHANGE)
        )
        self._all_emptied = False  # whether every rank is known to be through with what came into its inbox

    def outbox_of(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        rounds = self._rounds(tensors)
        if len(rounds) > 1:
            return None
        outbox = self._memory.buffers[self._rank]
        return [outbox[start : start + part.stop] for _, part, start in chain.from_iterable(rounds)]

    def _rounds(self, tensors: Sequence[Tensor]) -> list[list[tuple[int, slice, int]]]:
        return list(_rounds([tensor.numel() // self.ranks for tensor in tensors], self._slice_bytes))

    def gather_of(self, tensors: Sequence[Tensor], *, laid_out: bool = False) -> Start:
        rounds = self._rounds(tensors)

        def pieces(number: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
            """Pieces of a round: the rank's in its outbox, and here in their places."""
            outbox = self._memory.buffers[rank]
            staged = [outbox[start : start + part.stop - part.start] for _, part, start in rounds[number]]
            return staged, [slice_of(tensors[index], rank, self.ranks)[part] for index, part, _ in rounds[number]]

        @cache  # views are made once, not for every gather; and late, when there is storage
        def made(number: int) -> tuple[tuple[list[Tensor], list[Tensor]], Copies]:
            """Parts of a round: the outbox and what goes there, and the copies from the others'."""
            theirs = [pieces(number, rank) for rank in self._others]
            sources, targets = (list(chain.from_iterable(each)) for each in zip(*theirs, strict=True))
            return pieces(number, self._rank), Copies(targets, sources)

        def start() -> None:
            self._gathers.begin("all_gather", tensors)
            for number in range(len(rounds)):
                (outbox, mine), from_others = made(number)
                if not laid_out:
                    torch._foreach_copy_(outbox, mine)
                self._gathers.barrier()
                from_others.start()
                self._gathers.barrier()
            self._gathers.end()

        return start

    def exchange_of(self, layout: Layout) -> Exchange:
        """Exchange whole gradients as they are: the driver copies the pieces of each to the ranks' inboxes."""

        @cache  # made once, for all exchanges of a dtype
        def rounds(dtype: torch.dtype) -> list[tuple[_ToInboxes, slice]]:
            """Rounds, each with the part of a row that it is."""
            return [(self._to_inboxes(layout, part, dtype), part) for part in self._parts(layout, dtype)]

        def exchange(gradients: Sequence[Tensor], result: Tensor) -> tuple[Start, None]:
            def start() -> None:
                self._exchanges.begin("all_to_all", gradients)
                for inboxes, part in rounds(gradients[0].dtype):
                    inboxes.mean(gradients, result[part])
                self._exchanges.end()

            return start, None

        return exchange

    def average_of(self, layout: Layout, *, scattered: bool = False) -> Average:
        """Average whole gradients, all of a layout's, contiguous: once started they become the means over all ranks
        where they are, the same to the bit on every rank; if `scattered`, only this rank's slice of each does."""
        holders = [] if scattered else self._others

        @cache
        def rounds(dtype: torch.dtype) -> list[_Round]:
            return self._rounds_of_means(layout, dtype, holders)

        def average(gradients: Sequence[Tensor]) -> Start:
            def start() -> None:
                self._exchanges.begin("reduce_scatter" if scattered else "all_reduce", gradients)
                self._make_means(rounds(gradients[0].dtype), gradients)
                self._exchanges.end()

            return start

        return average

    def _rounds_of_means(self, layout: Layout, dtype: torch.dtype, holders: Sequence[int]) -> list[_Round]:
        """Make the copies for means of gradients of `dtype`: this rank's row and `holders`' go to their places."""
        made = []
        for part in self._parts(layout, dtype, into_outbox=True):
            size = (part.stop - part.start) * dtype.itemsize
            outboxes = [each[:size].view(dtype) for each in self._memory.buffers]
            mine = self._copies_of(layout, part, outboxes, [self._rank])
            theirs = self._copies_of(layout, part, outboxes, holders) if holders else None
            made.append(_Round(self._to_inboxes(layout, part, dtype), outboxes[self._rank], mine, theirs))
        return made

    def _make_means(self, rounds: Sequence[_Round], gradients: Sequence[Tensor]) -> None:
        for each in rounds:
            each.inboxes.mean(gradients, each.outbox)  # all have emptied the outbox: they are at the next round
            if each.theirs is not None:
                self._exchanges.barrier()
                self._all_emptied = True
                each.theirs.fill_pieces(gradients)
            each.mine.fill_pieces(gradients, by_driver=False)

    def _parts(self, layout: Layout, dtype: torch.dtype, *, into_outbox: bool = False) -> list[slice]:
        """Parts of a row that the inboxes have room for at a time and, if their means go there, the outbox."""
        fit = self._exchange_bytes // layout.ranks // dtype.itemsize
        if into_outbox:
            fit = min(fit, self._slice_bytes // dtype.itemsize)
        at_once = fit if fit >= layout.size else fit // 128 * 128 or max(fit, 1)  # whole cache lines
        return [slice(first, min(first + at_once, layout.size)) for first in range(0, layout.size, at_once)]

    def _until_emptied(self) -> None:
        """Let the current stream wait until every rank's inbox may be written to, unless a barrier has told already."""
        if not self._all_emptied:
            self._exchanges.barrier()
        self._all_emptied = False

    def _to_inboxes(self, layout: Layout, part: slice, dtype: torch.dtype) -> _ToInboxes:
        shape = (layout.ranks, part.stop - part.start)
        skipped, nbytes = self._slice_bytes, shape[0] * shape[1] * dtype.itemsize
        inboxes = [each[skipped : skipped + nbytes].view(dtype).view(shape) for each in self._memory.buffers]
        copies = self._copies_of(layout, part, [inbox[self._rank] for inbox in inboxes], [*self._others, self._rank])
        return _ToInboxes(copies, inboxes[self._rank], self._until_emptied, self._exchanges.barrier)

    def _copies_of(self, layout: Layout, part: slice, rows: Sequence[Tensor], ranks: Sequence[int]) -> PieceCopies:
        """Between gradients and `part` of these ranks' rows of them, which are where `rows` has each rank's."""
        pieces, places = [], []
        for rank in ranks:
            for piece in layout.pieces(rank, part.start, part.stop):
                pieces.append((piece.number, piece.offset))
                places.append(rows[rank][piece.place : piece.place + piece.elements])
        return PieceCopies(pieces, places)


class Channel:
    """Copies that take place one after the other, and the record of the last ones."""

    def __init__(self, memory: PeerMemory, number: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._memory, self._number, self._ranks, self._device = memory, number, group.size(), device
        made = next(_made.setdefault(group, itertools.count()))  # on every rank the same
        name = f"copies:{group.group_name}:{group.group_desc} {made}"
        self._record = Record(name, 0, "all_gather", 0.0, timeout_s=memory.timeout_s)
        if memory.timeout_s is not None:  # else its barriers are collectives, which torch records
            self._record.end = torch.cuda.Event()
            note(self._record)

    def begin(self, name: Announced, tensors: Sequence[Tensor]) -> None:
        announce(name, tensors, self._ranks)
        now = time.time()
        if now - self._record.since > _RECENT_S and (self._record.number == 0 or self._record.has_ended):
            self._record.since = now
        self._record.number, self._record.name = self._record.number + 1, name

    def barrier(self) -> None:
        self._memory.barrier(self._number)

    def end(self) -> None:
        if self._record.end is not None:
            self._record.end.record(current_stream(self._device))


@dataclass(frozen=True)
class _ToInboxes:
    """Copies of a part of every rank's row to all inboxes, and what has come in this rank's."""

    copies: PieceCopies
    inbox: Tensor  # (ranks, elements)
    until_emptied: Callable[[], None]
    barrier: Callable[[], None]

    def mean(self, gradients: Sequence[Tensor], result: Tensor) -> None:
        self.until_emptied()
        self.copies.fill_places(gradients)
        self.barrier()
        torch.mean(self.inbox, dim=0, dtype=result.dtype, out=result)


@dataclass(frozen=True)
class _Round:
    """Means of a part of every rank's row, by way of the outboxes."""

    inboxes: _ToInboxes
    outbox: Tensor  # this rank's, for the means of its row
    mine: PieceCopies  # from there to their places
    theirs: PieceCopies | None  # from the others' outboxes


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in a buffer: tensors start at multiples of 256, as CUDA's allocator's do."""
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


Transport = Collectives | PeerCopies


def check_name(asked: str) -> None:
    """Raise `UsageError` unless it is a `TransportName`."""
    if asked not in get_args(TransportName):
        raise UsageError(f"transport is {asked!r}; expected one of {', '.join(get_args(TransportName))}")


def choose_transport(
    asked: TransportName,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    slice_bytes: int,
    exchange_bytes: int,
    everyone: dist.ProcessGroup,
) -> Transport:
    """The transport asked for; every rank must call it alike, and all of the group get the same.

    Args:
        slice_bytes, exchange_bytes: the most that a gather and an exchange take, as `PeerCopies` has them.
        everyone: the ranks of groups beside this one too, if there are any: what cannot be in one is an error in all.

    Raises:
        UsageError: peer-copies were asked for, and the ranks cannot copy to each other.
    """
    if asked == "collectives" or group.size() == 1 or (asked == "auto" and device.type == "cpu"):
        return Collectives(group)
    obstacle, copies = obstacle_to_sharing(group, device), None
    if obstacle is None:
        try:
            copies = PeerCopies(group, device, slice_bytes=slice_bytes, exchange_bytes=exchange_bytes)
        except OSError as error:  # which every rank has
            obstacle = f"memory cannot be shared between the ranks ({error})"
            if asked == "auto":
                warnings.warn(f"{obstacle}, so collectives are used", stacklevel=4)
    if asked == "peer-copies" and (obstacle := _of_any(obstacle, everyone)):
        raise UsageError(f'transport="peer-copies" is not possible: {obstacle}; use "auto" or "collectives"')
    return copies or Collectives(group)


def _of_any(obstacle: str | None, ranks: dist.ProcessGroup) -> str | None:
    """The obstacle that this or, by rank, the first other one has met; None if none has."""
    met = [obstacle] * ranks.size()
    dist.all_gather_object(met, obstacle, group=ranks)
    return obstacle or next(filter(None, met), None)
