"""Choice of transports: the caller's, or the fastest that all ranks can take."""

from __future__ import annotations

import warnings
from typing import get_args

import torch
import torch.distributed as dist

from trainstep.base.errors import UsageError
from trainstep.parallel.transport.by_collectives import Collectives, TransportName
from trainstep.parallel.transport.by_copies import PeerCopies
from trainstep.parallel.transport.peer_memory import obstacle_to_sharing

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
    everyone: dist.ProcessGroup | None = None,
    needed: bool = True,
) -> Transport:
    """The transport asked for; every rank must call it alike, and all of the group get the same.

    Args:
        slice_bytes, exchange_bytes: the most that a gather and an exchange take, as `PeerCopies` has them.
        everyone: the ranks of groups beside this one too, if there are any: what cannot be in one is an error in all.
        needed: whether collectives will not do where peer-copies were asked for.

    Raises:
        UsageError: peer-copies were asked for, and needed, and the ranks cannot copy to each other.
    """
    if asked == "collectives" or group.size() == 1 or (asked == "auto" and device.type == "cpu"):
        return Collectives(group)
    obstacle, copies = obstacle_to_sharing(group, device), None
    if obstacle is None:
        try:
            copies = PeerCopies(group, device, slice_bytes=slice_bytes, exchange_bytes=exchange_bytes)
        except OSError as error:  # which every rank has
            obstacle = f"memory cannot be shared between the ranks ({error})"
            if asked == "auto" or not needed:
                warnings.warn(f"{obstacle}, so collectives are used", stacklevel=4)
    if needed and asked == "peer-copies" and (obstacle := _of_any(obstacle, everyone or group)):
        raise UsageError(f'transport="peer-copies" is not possible: {obstacle}; use "auto" or "collectives"')
    return copies or Collectives(group)


def _of_any(obstacle: str | None, ranks: dist.ProcessGroup) -> str | None:
    """The obstacle that this or, by rank, the first other one has met; None if none has."""
    met = [obstacle] * ranks.size()
    dist.all_gather_object(met, obstacle, group=ranks)
    return obstacle or next(filter(None, met), None)
