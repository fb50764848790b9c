"""Collectives over lists of tensors, each list in one call, in place and asynchronous.

The tensors stay where they are: NCCL runs a list as one group of operations in one launch; for Gloo they are packed and
unpacked. On a GPU a call runs on the group's own stream, after what the current stream was given before it; `wait()` on
what is returned makes the current stream, not the host, wait for the result. All tensors of a call share dtype and
device, and every rank gives the same sizes in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Waitable(Protocol):
    """A call under way."""

    def wait(self) -> object:
        """Let the current stream (on a CPU: the caller) wait for the result."""


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order they have in memory, as a one-dimensional view.

    Raises:
        ValueError: the tensor's elements do not fill a stretch of memory, so that no view has them.
    """
    if not tensor.is_contiguous():  # a transposed weight, or channels_last: dense all the same
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} does not fill its memory; "
                "make it contiguous"
            )
    return tensor.view(-1)


def slice_of(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """The rank's part of a tensor cut into `world_size` equal parts of its memory, as a one-dimensional view."""
    size, rest = divmod(tensor.numel(), world_size)
    assert rest == 0, f"{tensor.numel()} elements cannot be cut into {world_size} equal parts"
    return flat(tensor)[rank * size : (rank + 1) * size]


def all_reduce_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Every tensor becomes the mean of all ranks' tensors in its place."""
    return _all_reduce(tensors, group, _mean(tensors, group))


def all_reduce_sum(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Every tensor becomes the sum of all ranks' tensors in its place."""
    return _all_reduce(tensors, group, dist.ReduceOp(dist.ReduceOp.SUM))


def reduce_scatter_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """In every tensor, `slice_of` this rank becomes the mean of all ranks'; what the rest then holds is undefined."""
    return _reduce_scatter(tensors, group, _mean(tensors, group))


def reduce_scatter_sum(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.Work:
    """In every tensor, `slice_of` this rank becomes the sum of all ranks'; what the rest then holds is undefined."""
    return _reduce_scatter(tensors, group, dist.ReduceOp(dist.ReduceOp.SUM))


def all_gather_slices(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Waitable:
    """In every tensor, `slice_of` each rank becomes what that rank has there."""
    parts = [slice_of(tensor, group.rank(), group.size()) for tensor in tensors]
    if tensors[0].device.type == "cpu":
        return _PackedGather(tensors, parts, group)
    return group.allgather_into_tensor_coalesced([flat(tensor) for tensor in tensors], parts)


def broadcast_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Every tensor becomes that of the group's rank 0; any layout and dtype. The current stream may then use them."""
    works, copies = [], []
    for tensor in tensors:
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())  # expanded: no copies
        target = tensor.detach()[once]
        dense = target.contiguous()
        if dense.data_ptr() != target.data_ptr():
            copies.append((target, dense))
        payload = dense.view(torch.uint8) if dense.dtype == torch.bool else dense
        works.append(dist.broadcast(payload, group=group, group_src=0, async_op=True))
    for work in works:
        assert work is not None, "an asynchronous call by a member of the group returns its work"
        work.wait()
    for target, dense in copies:
        target.copy_(dense)


class _PackedGather:
    """An all-gather of several tensors over Gloo, packed into one here and unpacked when it is waited for.

    Gloo's own gather of a list corrupts the heap now and then (torch 2.13: two processes that do nothing else die of
    it within 20,000 calls; see docs/lab-log.md).
    """

    def __init__(self, tensors: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._tensors, self._sizes, self._world_size = tensors, [part.numel() for part in parts], group.size()
        packed = torch.cat(list(parts))
        self._gathered = packed.new_empty(self._world_size * packed.numel())
        self._work = group._allgather_base(self._gathered, packed)

    def wait(self) -> None:
        self._work.wait()
        for rank, row in enumerate(self._gathered.view(self._world_size, -1)):
            for tensor, part in zip(self._tensors, row.split(self._sizes), strict=True):
                slice_of(tensor, rank, self._world_size).copy_(part)


def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup, operation: dist.ReduceOp) -> dist.Work:
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = operation
    options.asyncOp = True
    payload = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in map(flat, tensors)]
    return group.allreduce_coalesced(payload, options)


def _reduce_scatter(tensors: Sequence[Tensor], group: dist.ProcessGroup, operation: dist.ReduceOp) -> dist.Work:
    options = dist.ReduceScatterOptions()
    options.reduceOp = operation
    options.asyncOp = True
    parts = [slice_of(tensor, group.rank(), group.size()) for tensor in tensors]
    return group.reduce_scatter_tensor_coalesced(parts, [flat(tensor) for tensor in tensors], options)


def _mean(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> dist.ReduceOp:
    """The operation that makes a mean: NCCL divides on the way; for Gloo the tensors are divided here, then added.

    Divided before, not after, the sum stays in range in 16-bit types.
    """
    if tensors[0].device.type == "cuda":
        return dist.ReduceOp(dist.ReduceOp.AVG)
    if group.size() > 1:
        torch._foreach_div_(list(tensors), group.size())
    return dist.ReduceOp(dist.ReduceOp.SUM)
