"""Collectives over Gloo: one packed call over copies in the host's memory, whatever device the tensors are on.

What the backends do, in torch 2.11 to 2.13 (lists: calls over several tensors, `*_coalesced`):

| | NCCL, on a GPU | Gloo, on a CPU | Gloo, on a GPU |
|---|---|---|---|
| all-reduce, broadcast, all-gather, all-to-all | yes | yes | copied to the host and back |
| all-reduce of a list | one launch | packed | refused |
| reduce-scatter, of a list too | one launch | all-reduce of each, cut in the wait | likewise |
| all-gather of a list | one launch | corrupts the heap now and then | the host reads the GPU's addresses |
| means | on the way | no | no |
| the host | goes on | waits | waits |

So over Gloo every list is packed into one tensor of the host, and goes by a call that works there: an all-reduce, an
all-gather of one tensor, or an all-to-all of slices, which ranks then add up (notebook/decisions.md).

There: a GPU's tensors are copied into pinned memory on the current stream. The host waits for that, as no stream could
make Gloo's threads wait. From then on nothing of the call is on the GPU, and the next kernels run beside Gloo.
Back: the host waits for Gloo, and the current stream makes the copies before all that it is given next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.base.errors import UsageError
from trainstep.parallel.announced import announce
from trainstep.parallel.ranks import others
from trainstep.parallel.slices import flat, slice_of

_KNOWN = (("gloo", "cpu"), ("nccl", "cuda"), ("gloo", "cuda"))
"""Backends, and the type of device that each carries."""
STRETCH = 2**18
"""Elements of a slice that are added up at a time: torch makes float32 of 16-bit numbers first."""

_waits: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, bool]] = weakref.WeakKeyDictionary()


def host_waits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True where Gloo carries tensors of this device: the host waits before anything can follow a collective.

    Raises:
        UsageError: the group has no backend for the device, or an unknown one.
    """
    found = _waits.setdefault(group, {})
    if device.type not in found:
        waits = _backend(group, device.type) == "gloo"
        if waits:
            _backend(group, "cpu")  # where the copies are
        found[device.type] = waits
    return found[device.type]


def _backend(group: dist.ProcessGroup, device_type: str) -> str:
    devices = {device.type for device in group._device_types}
    backend = str(group._get_backend(torch.device(device_type)).name()) if device_type in devices else None
    if backend is not None and (backend, device_type) in _KNOWN:
        return backend
    known = ", ".join(f"{backend} for {device_type} tensors" for backend, device_type in _KNOWN)
    raise UsageError(
        f"the process group has {backend or 'no backend'} for {device_type} tensors (it has "
        f'{dist.get_backend_config(group)}); expected {known}: init_process_group("cpu:gloo,cuda:nccl") gives the '
        'first two, init_process_group("gloo") the others'
    )


class Waitable(Protocol):
    """A call under way."""

    def wait(self) -> object:
        """Let the current stream (on a CPU: the caller) wait for the result."""


class Staged:
    """A call under way over the host's memory. Waiting for it brings the results back: (from, to).

    `before` makes the tensors to bring back from the received ones.
    """

    def __init__(
        self, work: Waitable, back: Sequence[tuple[Tensor, Tensor]], before: Callable[[], object] = lambda: None
    ) -> None:
        self._work: Waitable | None = work
        self._back, self._before = back, before

    def wait(self) -> None:
        """The host waits for Gloo, the current stream for the copies."""
        if self._work is None:
            return
        self._work.wait()
        self._before()
        for source, target in self._back:
            target.copy_(source, non_blocking=True)  # torch keeps pinned memory until streams are through with it
        self._work, self._back, self._before = None, (), lambda: None

    def when_over(self, call: Callable[[], object]) -> None:
        """Call when all has come, on the thread that carries it; the results are not brought back yet."""
        when_over(self._work, call)


def when_over(work: Any, call: Callable[[], object]) -> None:
    """Call when a call under way over the host's memory is over, on the thread that carries it."""
    if isinstance(work, Staged):
        work.when_over(call)
    else:
        work.get_future().add_done_callback(lambda _: call())


def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup, *, is_mean: bool) -> Staged:
    """Every tensor, one-dimensional and of real numbers, becomes the sum or the mean of all ranks' in its place."""
    announce("all_reduce", tensors, group.size())
    packed, parts = _to_host(tensors)
    if is_mean and group.size() > 1:  # divided before, not after, the sum stays in range in 16-bit types
        packed.div_(group.size())
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return Staged(_gloo(group).allreduce([packed], options), list(zip(parts, tensors, strict=True)))


def all_gather(tensors: Sequence[Tensor], slices: Sequence[Tensor], group: dist.ProcessGroup) -> Staged:
    """In every tensor, `slice_of` each rank becomes that rank's slice; `slices` are this rank's.

    Gloo's own gather of a list corrupts the heap now and then (torch 2.13: two processes that do nothing else die of
    it within 20,000 calls; see notebook/lab-log.md). Its gather of one tensor does not.
    """
    size = group.size()
    announce("all_gather", tensors, size)
    packed, parts = _to_host(slices)
    gathered = torch.empty(size * packed.numel(), dtype=packed.dtype, pin_memory=tensors[0].is_cuda)
    rows = gathered.split([packed.numel()] * size)
    sizes = [part.numel() for part in parts]
    back = [
        (part, slice_of(tensor, other, size))
        for other in others(group)
        for tensor, part in zip(tensors, rows[other].split(sizes), strict=True)
    ]
    return Staged(_gloo(group)._allgather_base(gathered.view(torch.uint8), packed.view(torch.uint8)), back)


def reduce_scatter(
    tensors: Sequence[Tensor], slices: Sequence[Tensor], group: dist.ProcessGroup, *, is_mean: bool
) -> Staged:
    """In every tensor, `slice_of` this rank, in `slices`, becomes the sum of all ranks', or their mean.

    Every rank sends each other one that one's slices, and adds up the slices that come: a sum or mean of 16-bit numbers
    is rounded once, and nothing has to be divided before. Gloo's own reduce-scatter is an all-reduce of each tensor.
    """
    reduce, size = torch.mean if is_mean else torch.sum, group.size()
    announce("reduce_scatter", tensors, size)
    rows = [flat(tensor).view(size, -1) for tensor in tensors]
    sent, _ = _to_host([(rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).view(-1)])
    received = torch.empty_like(sent, pin_memory=tensors[0].is_cuda)
    reduced, parts = _host_room(slices)

    @torch.no_grad()
    def add_up() -> None:
        for part, into in zip(received.view(size, -1).split(STRETCH, dim=1), reduced.split(STRETCH), strict=True):
            reduce(part, dim=0, out=into)

    return Staged(_exchanged(received, sent, group), list(zip(parts, slices, strict=True)), before=add_up)


def all_to_all(receive: Tensor, send: Tensor, group: dist.ProcessGroup) -> Staged:
    """receive[i] becomes rank i's send[this rank]; both are contiguous, (ranks, elements)."""
    announce("all_to_all", [send], group.size())
    sent, _ = _to_host([send.view(-1)])
    received, _ = _host_room([receive])
    return Staged(_exchanged(received, sent, group), [(received, receive.view(-1))])


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Staged:
    """A GPU's tensor becomes that of the rank `source` of the group."""
    target = flat(tensor)
    payload, _ = _to_host([target]) if group.rank() == source else _host_room([target])
    work = dist.broadcast(payload, group=group, group_src=source, async_op=True)
    assert work is not None, "an asynchronous call by a member of the group returns its work"
    return Staged(work, [(payload, target)])


def _gloo(group: dist.ProcessGroup) -> Any:
    """The backend itself, past torch's dispatcher, which `announce` has told of the tensors instead of their copies."""
    return group._get_backend(torch.device("cpu"))


def _exchanged(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Start an all-to-all of equal parts, as bytes: Gloo knows few dtypes."""
    work: Waitable = _gloo(group).alltoall_base(
        received.view(torch.uint8), sent.view(torch.uint8), [], [], dist.AllToAllOptions()
    )
    return work


def _host_room(likes: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Memory of the host for the elements of all, (sum of elements,), and each one's stretch of it, (elements,)."""
    sizes = [like.numel() for like in likes]
    memory = torch.empty(sum(sizes), dtype=likes[0].dtype, pin_memory=likes[0].is_cuda)
    return memory, list(memory.split(sizes))


def _to_host(tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """`_host_room` with the elements of one-dimensional tensors; a single one of the host is there already."""
    if len(tensors) == 1 and not tensors[0].is_cuda:
        return tensors[0], tensors
    memory, parts = _host_room(tensors)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor, non_blocking=True)
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return memory, parts
