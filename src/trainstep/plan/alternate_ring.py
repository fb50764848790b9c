"""All-reduce over a ring without cutting the tensor into chunks, for contrast: why everyone cuts.

P bytes on each of n ranks in a ring, W bytes/s on a link. Derived in docs/theory.md.

    way                       passes      bytes on the busiest link   seconds
    chunks (the ring)         2(n − 1)    2(n − 1)/n · P              2(n − 1)/n · P/W
    all to all                n − 1       (n − 1) · P                 (n − 1) · P/W
    reduce, then broadcast    2(n − 1)    P, on one link 2P           2(n − 1) · P/W

All to all: every rank's full tensor goes once around, and each rank adds up all it sees. All links work all the time,
at n/2 times the bytes. Reduce, then broadcast: a running sum goes from rank to rank to the last, and the result around
again. No link carries more than twice the tensor, but only one works at a time, so it takes n times as long as the
ring. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from trainstep.errors import UsageError

AlternateRing = Literal["all to all", "reduce, then broadcast"]


def alternate_passes(way: AlternateRing, world_size: int) -> int:
    """Hand-overs of the full tensor that follow one another.

    Raises:
        UsageError: no ranks.
    """
    if world_size < 1:
        raise UsageError(f"world_size is {world_size}; expected at least 1")
    return (1 if way == "all to all" else 2) * (world_size - 1)


def alternate_bytes_sent(way: AlternateRing, payload: int, world_size: int) -> int:
    """Bytes sent by all ranks together."""
    senders = world_size if way == "all to all" else 1  # in each pass
    return alternate_passes(way, world_size) * senders * payload


def alternate_seconds(way: AlternateRing, payload: float, world_size: int, bytes_per_s: float) -> float:
    """Time of one all-reduce, calls and hand-overs costing nothing."""
    return alternate_passes(way, world_size) * payload / bytes_per_s
