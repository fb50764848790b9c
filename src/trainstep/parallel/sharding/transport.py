"""How gathered parameters and exchanged gradients travel: by collectives, or by copies between the memories of a host.

A collective is a kernel: while it runs, its thread blocks take multiprocessors and memory bandwidth from the
computation beside it. Copies between GPUs of one host are done by copy engines instead. On two H200s a matrix product
slows down by 14 % beside copies and by 45 % beside the same bytes in a collective, and the copies are twice as fast
beside it (docs/lab-log.md). Copies need all ranks on one host, and a staging buffer there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.errors import UsageError
from trainstep.parallel.collectives import Waitable, all_gather_slices, slice_of
from trainstep.parallel.peer_memory import PeerMemory, obstacle_to_sharing

TransportName = Literal["auto", "collectives", "peer-copies"]
"""auto: peer-copies between GPUs of one host that can read each other's memory, else collectives."""

_ALIGNMENT = 256

_GATHER, _EXCHANGE = 0, 1
"""Channels of barriers: gathers and exchanges run on streams of their own."""

# Copies are no collectives that torch's dispatcher would see. These operators do nothing but announce them there, with
# their payload, to whoever watches (measure/collectives.py, or a profile).
_library = torch.library.Library("trainstep_peer_copies", "DEF")
for _name in ("all_gather", "all_to_all"):
    _library.define(f"{_name}(Tensor[] payload) -> ()")
    _library.impl(_name, lambda payload: None, "CompositeExplicitAutograd")


Start = Callable[[], Waitable | None]


class Transport(Protocol):
    """What is started runs on the current stream or, if starting it returned something, until that is waited for."""

    name: TransportName

    @property
    def uncounted_bytes(self) -> int:
        """Bytes it holds that torch's allocator does not count."""

    def gather_of(self, tensors: Sequence[Tensor]) -> Start:
        """A gather to be started any number of times: in every tensor (bytes), `slice_of` each rank becomes what that
        rank has there. The tensors' storage may come and go in between."""

    def receive_buffer(self, send: Tensor) -> Tensor:
        """Where `exchange` puts what it receives: of the shape and dtype of `send`. Valid until the next exchange."""

    def exchange(self, receive: Tensor, send: Tensor) -> Waitable | None:
        """receive[i] becomes what rank i has in send[this rank]; both are (ranks, elements)."""


class Collectives:
    """NCCL between GPUs, Gloo between CPUs; one host or many."""

    name: TransportName = "collectives"
    uncounted_bytes = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather_of(self, tensors: Sequence[Tensor]) -> Start:
        return lambda: all_gather_slices(tensors, self._group)

    def receive_buffer(self, send: Tensor) -> Tensor:
        return torch.empty_like(send)

    def exchange(self, receive: Tensor, send: Tensor) -> Waitable:
        work = dist.all_to_all_single(receive, send, group=self._group, async_op=True)
        assert work is not None, "an asynchronous call by a member of the group returns its work"
        return work


class PeerCopies:
    """Copies between the memories of one host's ranks.

    To gather, every rank lays its slices out in a buffer that the others read; each takes what it lacks straight into
    its place. To exchange, every rank writes into the others' inboxes.

    Args:
        group: the ranks.
        device: of this rank.
        slice_bytes: the most bytes of one rank's slices in a gather, each rounded up to 256.
        exchange_bytes: the most bytes in a call of `exchange`.
    """

    name: TransportName = "peer-copies"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, slice_bytes: int, exchange_bytes: int
    ) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._slice_bytes = padded(slice_bytes)
        self._memory = PeerMemory(max(self._slice_bytes + exchange_bytes, 1), group, device)  # outbox, inbox
        self._others = [(self._rank + distance) % self._ranks for distance in range(1, self._ranks)]
        """In another order on every rank, so that no two read from one at a time."""

    @property
    def uncounted_bytes(self) -> int:
        return self._memory.uncounted

    def gather_of(self, tensors: Sequence[Tensor]) -> Start:
        sizes = [tensor.numel() // self._ranks for tensor in tensors]
        ends = list(accumulate(map(padded, sizes), initial=0))
        places = [slice(end, end + size) for end, size in zip(ends, sizes, strict=False)]

        @cache  # made once, as the host has a copy to start every few microseconds; and late, when there is storage
        def pairs(rank: int) -> list[tuple[Tensor, Tensor]]:
            """Of every tensor: the rank's slice in its outbox, and here in its place."""
            outbox = self._memory.of(rank)
            slices = [slice_of(tensor, rank, self._ranks) for tensor in tensors]
            return list(zip([outbox[place] for place in places], slices, strict=True))

        def start() -> None:
            torch.ops.trainstep_peer_copies.all_gather(tensors)
            for outbox, mine in pairs(self._rank):
                outbox.copy_(mine)
            self._memory.barrier(_GATHER)
            for rank in self._others:
                for outbox, theirs in pairs(rank):
                    theirs.copy_(outbox)
            self._memory.barrier(_GATHER)

        return start

    def receive_buffer(self, send: Tensor) -> Tensor:
        return self._inbox_of(self._rank, send)

    def exchange(self, receive: Tensor, send: Tensor) -> None:
        torch.ops.trainstep_peer_copies.all_to_all([send])
        self._memory.barrier(_EXCHANGE)
        receive[self._rank].copy_(send[self._rank])
        for rank in self._others:
            self._inbox_of(rank, send)[self._rank].copy_(send[rank])
        self._memory.barrier(_EXCHANGE)

    def _inbox_of(self, rank: int, like: Tensor) -> Tensor:
        inbox = self._memory.of(rank)[self._slice_bytes :]
        return inbox[: like.nbytes].view(like.dtype).view(like.shape)


def padded(nbytes: int) -> int:
    """What a slice of so many bytes takes of `slice_bytes`."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def choose_transport(
    asked: TransportName, group: dist.ProcessGroup, device: torch.device, *, slice_bytes: int, exchange_bytes: int
) -> Transport:
    """The transport asked for; every rank must call it alike, and all get the same.

    Raises:
        UsageError: peer-copies were asked for and the ranks cannot copy to each other.
    """
    if asked == "collectives" or group.size() == 1 or (asked == "auto" and device.type == "cpu"):
        return Collectives(group)
    obstacle = obstacle_to_sharing(group, device)
    if obstacle is not None and asked == "auto":
        return Collectives(group)
    if obstacle is None:
        try:
            return PeerCopies(group, device, slice_bytes=slice_bytes, exchange_bytes=exchange_bytes)
        except OSError as error:  # which every rank has
            obstacle = f"memory cannot be shared between the ranks ({error})"
    if asked == "peer-copies":
        raise UsageError(f'transport="peer-copies" is not possible: {obstacle}; use "auto" or "collectives"')
    warnings.warn(f"{obstacle}, so collectives are used", stacklevel=3)
    return Collectives(group)


def check_name(name: str) -> None:
    """Raise `UsageError` for the name of no transport."""
    if name not in get_args(TransportName):
        raise UsageError(f"transport is {name!r}; expected one of {', '.join(get_args(TransportName))}")
