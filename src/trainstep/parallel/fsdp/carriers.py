"""Transports of a wrapper's parameters and gradients: within replicas, between them, or among all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainstep.parallel.ranks import AMONG_ALL, Ranks
from trainstep.parallel.transport.by_collectives import Collectives, TransportName
from trainstep.parallel.transport.by_copies import PeerCopies
from trainstep.parallel.transport.choice import Transport, choose_transport


@dataclass(frozen=True)
class Among:
    """Copies among the ranks of all replicas, which one host has: every rank's gradients go to whoever adds them up.

    `coordinates` are those of each rank, by its number among all: its replica, and its number there.
    """

    copies: PeerCopies
    coordinates: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Carriers:
    """`within` carries parameters, and gradients too unless something carries those `among` all ranks. What it leaves,
    means of a replica, goes `between` replicas; None where there is one, or nothing is left."""

    within: Transport
    between: Collectives | None = None
    among: Among | None = None

    @property
    def name_between(self) -> str | None:
        """Name of the transport of gradients between replicas: collectives, or AMONG_ALL; None where there is one."""
        if self.among is not None:
            return AMONG_ALL
        return None if self.between is None else self.between.name

    @property
    def uncounted_bytes(self) -> int:
        """Bytes they hold on this rank that torch's allocator does not count."""
        return self.within.uncounted_bytes + (0 if self.among is None else self.among.copies.uncounted_bytes)


class TransferBytes(NamedTuple):
    """Bytes that go at a time, at most: of a buffer of gradients, of a group, or of all."""

    slices: int = 0  # of parameters, this rank's
    exchanged: int = 0  # of gradients that are exchanged within a replica, not reduced
    gradients: int = 0  # of gradients, among all ranks
    shared: int = 0  # of means, this rank's part where replicas divide them


def largest_of(each: Iterable[TransferBytes]) -> TransferBytes:
    """The largest of each kind; zeros of none."""
    return TransferBytes(*map(max, zip(TransferBytes(), *each, strict=True)))


def by_collectives(ranks: Ranks) -> Carriers:
    """Carry all of it by collectives, where nothing was chosen."""
    return Carriers(Collectives(ranks.shard), None if ranks.replicate is None else Collectives(ranks.replicate))


def choose_carriers(asked: TransportName, ranks: Ranks, device: torch.device, most: TransferBytes) -> Carriers:
    """The carriers asked for; all ranks call it.

    Raises:
        UsageError: peer-copies were asked for, and the ranks of a replica cannot copy to each other.
    """
    among = None
    if ranks.replicate is not None:  # on hosts of their own more often than not
        copies = choose_transport(
            asked, ranks.everyone, device, slice_bytes=most.shared, exchange_bytes=most.gradients, needed=False
        )
        if isinstance(copies, PeerCopies):
            among = Among(copies, ranks.coordinates)
    within = choose_transport(
        asked,
        ranks.shard,
        device,
        slice_bytes=most.slices,
        exchange_bytes=most.exchanged if among is None else 0,
        everyone=ranks.everyone,
    )
    if among is not None or ranks.replicate is None:
        return Carriers(within, among=among)
    return Carriers(within, Collectives(ranks.replicate))
