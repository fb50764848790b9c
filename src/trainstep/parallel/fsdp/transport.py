"""What carries gathered parameters and exchanged gradients: collectives, or copies between the memories of a host.

A collective is a kernel: while it runs, its thread blocks take multiprocessors and memory bandwidth from the
computation beside it. Copies between GPUs of one host are done by copy engines instead. On two H200s a matrix product
slows down by 14 % beside copies and by 45 % beside the same bytes in a collective, and the copies are twice as fast
beside it (docs/lab-log.md). Copies need all ranks on one host, and a staging buffer there, as large as the largest
group needs, up to `OUTBOX_BYTES` and `INBOX_BYTES`: the embedding of a large vocabulary is several times a block, and
nothing else can use the buffer. What does not fit goes in several rounds.
"""

from __future__ import annotations

import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.errors import UsageError
from trainstep.parallel.collectives import Waitable, all_gather_slices, all_to_all, slice_of, slices_of
from trainstep.parallel.fsdp.copies import Copies, CopiesFrom
from trainstep.parallel.fsdp.layout import Layout

TransportName = Literal["auto", "collectives", "peer-copies"]
"""auto: peer-copies between GPUs of one host that can read each other's memory, else collectives."""

OUTBOX_BYTES, INBOX_BYTES = 2**28, 2**29
"""Most that a rank stages at a time: of its slices, and of gradients that it gets. A copy of that takes so much longer
than the barriers around it that rounds cost nothing to speak of."""

_GATHER, _EXCHANGE = 0, 1
"""Channels of barriers: gathers and exchanges run on streams of their own."""

# Copies are no collectives that torch's dispatcher would see. These operators do nothing but announce them there, with
# their payload and how many ranks make them, to whoever watches (measure/collectives.py, or a profile).
_library = torch.library.Library("trainstep_peer_copies", "DEF")
for _name in ("all_gather", "all_to_all"):
    _library.define(f"{_name}(Tensor[] payload, int ranks) -> ()")
    _library.impl(_name, lambda payload, ranks: None, "CompositeExplicitAutograd")


def _announce(name: str, payload: Sequence[Tensor], ranks: int) -> None:
    if torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled():  # else nobody watches
        getattr(torch.ops.trainstep_peer_copies, name)(payload, ranks)


Start = Callable[[], Waitable | None]
Exchange = Callable[[Sequence[Tensor], Tensor], tuple[Start, Callable[[], object] | None]]
"""Of gradients (all of a layout's, or one tensor in which they are packed) and `result` (elements of a row): what is to
be started once, and what is to be done after it. Then `result` has the mean over all ranks of this rank's row, in the
dtype of `result`. The memory of what is exchanged is that of the current stream."""


class Collectives:
    """NCCL between GPUs, Gloo between CPUs, or between GPUs through their hosts' memory; one host or many.

    What a transport starts runs on the current stream or, if starting it returned something, until that is waited for.
    """

    name: TransportName = "collectives"
    packs = True  # whether what is exchanged is to be packed into one tensor
    uncounted_bytes = 0  # bytes it holds that torch's allocator does not count

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather_of(self, tensors: Sequence[Tensor]) -> Start:
        """A gather to be started any number of times: in every tensor (bytes), `slice_of` each rank becomes what that
        rank has there. The tensors' storage may come and go in between."""

        @cache  # views are made once, not for every gather; and late, when there is storage
        def slices() -> list[Tensor]:
            return slices_of(tensors, self._group)

        return lambda: all_gather_slices(tensors, self._group, slices())

    def exchange_of(self, layout: Layout) -> Exchange:
        """Of one tensor, packed by `layout`: (ranks, elements of a row)."""

        def exchange(gradients: Sequence[Tensor], result: Tensor) -> tuple[Start, Callable[[], object] | None]:
            (send,) = gradients
            receive = torch.empty_like(send)
            mean = partial(torch.mean, receive, dim=0, dtype=result.dtype, out=result)
            return lambda: all_to_all(receive, send, self._group), mean

        return exchange


class PeerMemory:
    """A buffer on every rank that all ranks of one host can read and write, by plain copies.

    Between GPUs it is torch's symmetric memory: every rank maps the others' buffers through NVLink or PCIe, and a copy
    to or from them is the work of a copy engine, which takes no multiprocessor from computation. Between processes on
    CPUs it is a file that all map.

    Nothing here orders the ranks but `barrier`: whoever copies must have one before, so that the buffers are ready, and
    one after, before their owners touch them again. All ranks of the group must construct it, with the same size.

    Raises:
        OSError: memory cannot be had or shared, on this rank or another; every rank raises it, and says whose.

    Attributes:
        buffers: by rank: (nbytes,), uint8, on this rank's device.
        uncounted: bytes of it that `torch.cuda.memory_allocated` does not know of (all or none, by torch's version).
    """

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.uncounted = nbytes
        self._group = group
        self._handle: Any = None
        if device.type == "cuda":
            from torch.distributed import _symmetric_memory as symmetric_memory

            before = torch.cuda.memory_allocated(device)
            with _agreed(group):
                self._own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            if torch.cuda.memory_allocated(device) > before:
                self.uncounted = 0
            with _agreed(group):
                handle = symmetric_memory.rendezvous(self._own, group)
            self.buffers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
            self._handle = handle
            self._timeout_ms = int(group._get_backend(device).options._timeout.total_seconds() * 1000)
        else:
            self.buffers = _mapped_by_all(nbytes, group)

    def barrier(self, channel: int = 0) -> None:
        """What the current stream does from here on comes after what every rank's stream was given before its barrier.

        On a CPU the caller waits. A rank that does not come is an error, after the group's timeout. Barriers that
        different streams may be at in one moment have different channels.
        """
        if self._handle is not None:
            self._handle.barrier(channel=channel, timeout_ms=self._timeout_ms)
        else:
            dist.barrier(self._group)


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
        self._others = [(self._rank + distance) % self._ranks for distance in range(1, self._ranks)]
        """In another order on every rank, so that no two read from one at a time."""

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
            others = [pieces(number, rank) for rank in self._others]
            sources, targets = (list(chain.from_iterable(each)) for each in zip(*others, strict=True))
            return pieces(number, self._rank), Copies(targets, sources)

        def start() -> None:
            _announce("all_gather", tensors, self._ranks)
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
            at_once = fit if fit >= layout.size else max(fit // 128 * 128, 1)  # rows that begin at whole cache lines
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
                _announce("all_to_all", gradients, self._ranks)
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


def padded(nbytes: int) -> int:
    """What a tensor of so many bytes takes in a buffer: tensors start at multiples of 256, as CUDA's allocator's do."""
    return -(-nbytes // 256) * 256


def obstacle_to_sharing(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks cannot copy to each other directly; None if they can. Every rank must call it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")  # tells two hosts of one name apart, where the kernel says it
    mine = (platform.node(), boot_id.read_text() if boot_id.exists() else "", device.type, device.index)
    everyone: list[tuple[str, str, str, int | None]] = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    hosts = {(node, boot) for node, boot, _, _ in everyone}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if device.type == "cpu":
        return None
    if len({index for *_, index in everyone}) < group.size():
        return "ranks share the number of a GPU, so which GPU is whose cannot be told"
    others = [index or 0 for *_, index in everyone if index != device.index]
    barred = not all(torch.cuda.can_device_access_peer(device.index, index) for index in others)
    of_all = [barred] * group.size()
    dist.all_gather_object(of_all, barred, group=group)
    return "not every GPU can read every other's memory" if any(of_all) else None


def choose_transport(
    asked: TransportName,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    slice_bytes: int,
    exchange_bytes: int,
    everyone: dist.ProcessGroup | None = None,
) -> Transport:
    """The transport asked for; every rank must call it alike, and all of the group get the same.

    `everyone` has the ranks of groups beside this one too, if there are any: what cannot be in one is an error in all.

    Raises:
        UsageError: peer-copies were asked for and the ranks cannot copy to each other.
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
                warnings.warn(f"{obstacle}, so collectives are used", stacklevel=3)
    if asked == "peer-copies" and (obstacle := _of_any(obstacle, everyone or group)):
        raise UsageError(f'transport="peer-copies" is not possible: {obstacle}; use "auto" or "collectives"')
    return copies or Collectives(group)


def _of_any(obstacle: str | None, ranks: dist.ProcessGroup) -> str | None:
    """The obstacle that this or, by rank, the first other one has met; None if none has."""
    met = [obstacle] * ranks.size()
    dist.all_gather_object(met, obstacle, group=ranks)
    return obstacle or next(filter(None, met), None)


def _mapped_by_all(nbytes: int, group: dist.ProcessGroup) -> list[Tensor]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(prefix="trainstep-", dir=folder) as own:  # without its name the mappings stay
        with _agreed(group):
            os.posix_fallocate(own.fileno(), 0, nbytes)  # or writing where there is no room would be a bus error
        paths = [own.name] * group.size()
        dist.all_gather_object(paths, own.name, group=group)
        with _agreed(group):
            for path in paths:
                if not os.path.exists(path):  # in a container with a /dev/shm of its own; from_file would make it
                    raise FileNotFoundError(f"{path}, which another rank has, is not here")
            return [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]


@contextmanager
def _agreed(group: dist.ProcessGroup) -> Iterator[None]:
    """Every rank goes on from here, or none does: what one fails with, all raise. Inside, no rank waits for another
    that may have failed before."""
    failure: str | None = None
    try:
        yield
    except (RuntimeError, OSError) as error:  # of the driver, or where a container lets no memory be shared
        failure = f"rank {group.rank()}: {error}"
    failures = [failure] * group.size()
    dist.all_gather_object(failures, failure, group=group)
    if first := next(filter(None, failures), None):
        raise OSError(first)
