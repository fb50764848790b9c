"""A bucket's gradients, averaged by copies between the memories of one host's ranks, beside computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.collectives import MB, as_reals
from trainstep.parallel.side_stream import Pending, SideStream
from trainstep.parallel.transport.by_collectives import Layout, TransportName
from trainstep.parallel.transport.by_copies import INBOX_BYTES, PeerCopies, Transport, choose_transport

LEAST_MB, MOST_BUCKETS = 25.0, 16
_PLACE_BYTES = 4096
"""More than a gradient's places in the rows of all ranks take beyond its own bytes."""


def default_bucket_mb(nbytes: int, by_copies: bool) -> float:
    """Megabytes of a bucket, of gradients of so many bytes: 25, as torch has them, and by copies a sixteenth of all if
    that is more. A bucket by copies costs the host a dozen calls, and less than a sixteenth hides little more."""
    return max(LEAST_MB, nbytes / MB / MOST_BUCKETS) if by_copies else LEAST_MB


def carrier_of(
    sizes: Sequence[int], bucket_mb: float | None, asked: TransportName, group: dist.ProcessGroup, device: torch.device
) -> Transport:
    """Transport of gradients of so many bytes each, in buckets. All ranks call it."""
    bucket_mb = default_bucket_mb(sum(sizes), by_copies=True) if bucket_mb is None else bucket_mb
    every = [size + _PLACE_BYTES for size in sizes]
    most = min(sum(every), int(min(bucket_mb * MB, sum(every))) + max(every), INBOX_BYTES)
    slices = -(-most // group.size())
    return choose_transport(asked, group, device, slice_bytes=slices, exchange_bytes=most, everyone=group)


def averages_by_copies(
    copies: PeerCopies, sizes: Sequence[int], beside: SideStream, *, scattered: bool
) -> Callable[[Sequence[Tensor]], Pending]:
    """Average gradients of these numbers of elements, of real numbers where they are complex.

    What is returned averages them where they are, behind all that the current stream has so far; the caller holds them
    until it has waited.

    Args:
        scattered: every rank gets its `slice_of` each mean alone, otherwise all get all.
        beside: where the copies run.
    """
    layout = Layout(sizes, [-(-size // copies.ranks) for size in sizes], copies.ranks)
    average = copies.average_of(layout, scattered=scattered)
    return lambda gradients: beside.run(average(as_reals(gradients)))
