"""Gathers, sums and exchanges of slices over Gloo: by messages, of tensors in the host's memory or staged there.

Large tensors are sent from where they are and received where they belong; of small ones, whose messages would take
longer than copies, a list is packed. Between two ranks, and within a host, every rank sends its slices to each other
one. Among more, on several hosts, that would take hosts' connections more often than a ring does, and gathers are left
to Gloo's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.announced import announce
from trainstep.parallel.hosts import are_on_one_host
from trainstep.parallel.messages import exchange
from trainstep.parallel.ranks import others
from trainstep.parallel.slices import flat, slice_of
from trainstep.parallel.staged import Staged, host_room, to_host

MESSAGE_BYTES = 2**16
"""Of a list's slices on average, from which on each is a message of its own: one takes as long as copying so much."""
STRETCH = 2**18
"""Elements of a slice that are added up at a time: torch makes float32 of 16-bit numbers first."""


def all_gather(
    tensors: Sequence[Tensor], slices: Sequence[Tensor], group: dist.ProcessGroup, *, staged: bool
) -> Staged:
    """In every tensor, `slice_of` each rank becomes what that rank has there; `slices` are this rank's.

    `staged`, here and below: the tensors are not in the host's memory, and are packed there on their way.

    Gloo's own gather of a list corrupts the heap now and then (torch 2.13: two processes that do nothing else die of
    it within 20,000 calls; see docs/lab-log.md).
    """
    size, to = group.size(), others(group)
    is_near = size == 2 or are_on_one_host(group)
    if is_near:
        announce("all_gather", tensors, size)
    if is_near and not staged and _are_large(slices):
        receives = [(other, slice_of(tensor, other, size)) for other in to for tensor in tensors]
        sends = [(other, mine) for other in to for mine in slices]
        return Staged(exchange("all_gather", group, receives=receives, sends=sends), [])
    packed, parts = to_host(slices)
    gathered, rows = host_room([packed] * size)
    sizes = [part.numel() for part in parts]
    back = [
        (part, slice_of(tensor, other, size))
        for other in to
        for tensor, part in zip(tensors, rows[other].split(sizes), strict=True)
    ]
    if not is_near:
        return Staged(group._allgather_base(gathered, packed), back)
    receives, sends = [(other, rows[other]) for other in to], [(other, packed) for other in to]
    return Staged(exchange("all_gather", group, receives=receives, sends=sends), back)


def reduce_scatter(
    tensors: Sequence[Tensor], slices: Sequence[Tensor], group: dist.ProcessGroup, *, is_mean: bool, staged: bool
) -> Staged:
    """In every tensor, `slice_of` this rank, in `slices`, becomes the sum of all ranks', or their mean.

    Every rank sends each other one that one's slices, and adds up what it gets: a sum or mean of 16-bit numbers is
    rounded once, and nothing has to be divided before. Gloo's own is an all-reduce of each tensor, of which all but the
    slice is dropped.
    """
    reduce = torch.mean if is_mean else torch.sum
    rank, size = group.rank(), group.size()
    announce("reduce_scatter", tensors, size)
    sent = [flat(tensor).view(size, -1) for tensor in tensors]
    results, back = list(slices), []
    if staged or not _are_large(slices):
        packed = sent[0] if len(sent) == 1 else torch.cat(sent, dim=1)
        sent = [to_host([packed.view(-1)])[0].view(size, -1) if staged else packed]
        reduced, parts = host_room(slices)
        results, back = [reduced], list(zip(parts, slices, strict=True))
    received = [torch.empty_like(rows, pin_memory=tensors[0].is_cuda) for rows in sent]

    @torch.no_grad()
    def add_up() -> None:
        for rows, mine, result in zip(received, sent, results, strict=True):
            rows[rank].copy_(mine[rank])
            for part, into in zip(rows.split(STRETCH, dim=1), result.split(STRETCH), strict=True):
                reduce(part, dim=0, out=into)

    receives = [(other, rows[other]) for other in others(group) for rows in received]
    sends = [(other, rows[other]) for other in others(group) for rows in sent]
    return Staged(exchange("reduce_scatter", group, receives=receives, sends=sends), back, before=add_up)


def all_to_all(receive: Tensor, send: Tensor, group: dist.ProcessGroup, *, staged: bool) -> Staged:
    """receive[i] becomes what rank i has in send[this rank]; both are contiguous, (ranks, elements)."""
    announce("all_to_all", [send], group.size())
    target, back = receive.view(-1), []
    if staged:
        send = to_host([send.view(-1)])[0].view(send.shape)
        room, _ = host_room([target])
        receive, back = room.view(receive.shape), [(room, target)]
    receive[group.rank()].copy_(send[group.rank()])
    receives, sends = ([(other, rows[other]) for other in others(group)] for rows in (receive, send))
    return Staged(exchange("all_to_all", group, receives=receives, sends=sends), back)


def _are_large(slices: Sequence[Tensor]) -> bool:
    """Whether each is to be a message of its own."""
    return sum(each.nbytes for each in slices) >= MESSAGE_BYTES * len(slices)
