"""Collectives over lists of tensors, and which tensors share one.

A collective takes a list in one call, in place and asynchronous. The tensors stay where they are, but for lazy
conjugates and negatives, whose memory is not their value: NCCL runs a list as
one group of operations in one launch. Over Gloo packed copies travel (`gloo`). Over NCCL a call runs on the group's own
stream, after what the current stream was given before it; `wait()` on what is returned makes the current stream, not
the host, wait for the result. Over Gloo the host waits, too. All tensors of a call share dtype and device, and every
rank gives the same sizes in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.base.errors import UsageError
from trainstep.parallel import gloo
from trainstep.parallel.gloo import Staged, Waitable, host_waits
from trainstep.parallel.slices import flat, is_lazy, resolved, slices_of

Owner = TypeVar("Owner")
MB = 10**6  # bytes in a megabyte, as networks count them


def all_reduce_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Waitable:
    """Every tensor becomes the mean of all ranks' tensors in its place."""
    return _of_values(_all_reduce, tensors, group, is_mean=True)


def all_reduce_sum(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Waitable:
    """Every tensor becomes the sum of all ranks' tensors in its place."""
    return _of_values(_all_reduce, tensors, group, is_mean=False)


def reduce_scatter_mean(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, slices: list[Tensor] | None = None
) -> Waitable:
    """In every tensor, `slice_of` this rank becomes the mean of all ranks'; what the rest then holds is undefined.

    `slices` are those of this rank, if the caller has them, so that the host does not make them again.
    """
    return _of_values(_reduce_scatter, tensors, group, slices, is_mean=True)


def reduce_scatter_sum(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, slices: list[Tensor] | None = None
) -> Waitable:
    """In every tensor, `slice_of` this rank becomes the sum of all ranks'; otherwise as `reduce_scatter_mean`."""
    return _of_values(_reduce_scatter, tensors, group, slices, is_mean=False)


def all_gather_slices(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, slices: list[Tensor] | None = None
) -> Waitable:
    """In every tensor, `slice_of` each rank becomes what that rank has there; `slices` as for `reduce_scatter_mean`."""
    return _of_values(_all_gather, tensors, group, slices)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Waitable:
    """The tensor, of any dtype, becomes that of the rank `source` of the group."""
    if is_lazy(tensor):
        copy = resolved(tensor)
        return Staged(broadcast(copy, source, group), [(copy, tensor)])
    payload = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    if host_waits(group, tensor.device) and tensor.is_cuda:
        return gloo.broadcast(payload, source, group)
    return _under_way(dist.broadcast(payload, group=group, group_src=source, async_op=True))


def all_to_all(receive: Tensor, send: Tensor, group: dist.ProcessGroup) -> Waitable:
    """receive[i] becomes what rank i has in send[this rank]; both are contiguous, (ranks, elements)."""
    if host_waits(group, send.device):
        return gloo.all_to_all(receive, send, group)
    return _under_way(dist.all_to_all_single(receive, send, group=group, async_op=True))


def broadcast_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Every tensor becomes that of the group's rank 0; any layout and dtype. The current stream may then use them."""
    works, copies = [], []
    for tensor in tensors:
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())  # expanded: no copies
        target = tensor.detach()[once]
        dense = target.contiguous()
        if dense.data_ptr() != target.data_ptr():
            copies.append((target, dense))
        works.append(broadcast(dense, 0, group))
    for work in works:
        work.wait()
    for target, dense in copies:
        target.copy_(dense)


def clip_gradients_(
    divided: Sequence[Tensor],
    replicated: Sequence[Tensor],
    *,
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup,
    device: torch.device,
    replicas: int = 1,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

    As `torch.nn.utils.clip_grad_norm_`; every rank of the group calls it.

    Args:
        divided: this rank's part of the gradients, which may be none. As many ranks as there are `replicas` have these
            elements. The sum is over all of them: each replica's own might be rounded otherwise, and the replicas would
            then drift apart.
        replicated: gradients that are the same on every rank, and so counted once.

    Raises:
        UsageError: `norm_type` is not above 0.
    """
    if not norm_type > 0:
        raise UsageError(f"norm_type is {norm_type}; expected a number above 0, or inf")
    of_divided, of_replicated = (_norm(gradients, norm_type, device) for gradients in (divided, replicated))
    if norm_type == float("inf"):
        dist.all_reduce(of_divided, op=dist.ReduceOp.MAX, group=group)
        total = torch.maximum(of_divided, of_replicated)
    else:
        powers = of_divided**norm_type
        dist.all_reduce(powers, group=group)
        total = (powers / replicas + of_replicated**norm_type) ** (1 / norm_type)
    if gradients := [*divided, *replicated]:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def as_reals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`flat` of each, and of complex ones their parts, as real numbers."""
    return [torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor for tensor in map(flat, tensors)]


def assign_buckets(items: Iterable[tuple[int, int, Hashable]], bucket_mb: float) -> list[list[int]]:
    """Cut a sequence into buckets.

    Args:
        items: (index, bytes, kind) in the order in which the tensors become ready. Each kind fills buckets of its own.
        bucket_mb: a bucket is closed as soon as it holds this much, so that small tensors travel with large ones. 0
            makes one bucket per tensor, infinity one per kind.

    Returns:
        The indices of each bucket, ordered by when its last tensor becomes ready.
    """
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: list[tuple[int, list[int]]] = []  # (position of the last tensor, indices)
    last: dict[Hashable, int] = {}
    for position, (index, size, kind) in enumerate(items):
        bucket, filled = open_buckets.pop(kind, ([], 0))
        bucket.append(index)
        if filled + size >= bucket_mb * MB:
            closed.append((position, bucket))
        else:
            open_buckets[kind] = (bucket, filled + size)
        last[kind] = position
    closed += [(last[kind], bucket) for kind, (bucket, _) in open_buckets.items()]
    return [bucket for _, bucket in sorted(closed)]


def weak_hook(owner: Owner, function: Callable[[Owner, int], None], number: int) -> Callable[[Tensor], None]:
    """A hook of a parameter: `function(owner, number)`, as long as the owner lives.

    It holds nothing that leads back to the parameter: Python could never collect such a circle. It runs for every
    parameter in every backward, so it makes no bound method on the way.
    """
    reference = weakref.ref(owner)

    def hook(_: Tensor) -> None:
        if (alive := reference()) is not None:
            function(alive, number)

    return hook


def _of_values(
    collective: Callable[..., Waitable],
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    slices: list[Tensor] | None = None,
    **how: bool,
) -> Waitable:
    """Start it. Backends send memory, so the values of lazy conjugates and negatives travel in copies."""
    if any(map(is_lazy, tensors)):
        copies = list(map(resolved, tensors))
        return Staged(collective(copies, group, None, **how), list(zip(copies, tensors, strict=True)))
    return collective(tensors, group, slices, **how)


def _all_gather(tensors: Sequence[Tensor], group: dist.ProcessGroup, slices: list[Tensor] | None) -> Waitable:
    slices = slices_of(tensors, group) if slices is None else slices
    if host_waits(group, tensors[0].device):
        return gloo.all_gather(tensors, slices, group)
    return group.allgather_into_tensor_coalesced([flat(tensor) for tensor in tensors], slices)


def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup, _: None, *, is_mean: bool) -> Waitable:
    payload = as_reals(tensors)
    if host_waits(group, tensors[0].device):
        return gloo.all_reduce(payload, group, is_mean=is_mean)
    return group.allreduce_coalesced(payload, _with(dist.AllreduceCoalescedOptions(), is_mean))


def _reduce_scatter(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, slices: list[Tensor] | None, *, is_mean: bool
) -> Waitable:
    slices = slices_of(tensors, group) if slices is None else slices
    if host_waits(group, tensors[0].device):
        return gloo.reduce_scatter(tensors, slices, group, is_mean=is_mean)
    payload = [flat(tensor) for tensor in tensors]
    return group.reduce_scatter_tensor_coalesced(slices, payload, _with(dist.ReduceScatterOptions(), is_mean))


def _with(options: Any, is_mean: bool) -> Any:
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM)
    options.asyncOp = True
    return options


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous call by a member of the group returns its work"
    return work


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    present = [gradient for gradient in gradients if gradient.numel() > 0]
    of_each = torch._foreach_norm(present, norm_type) if present else ()
    norms = torch.stack([torch.zeros((), device=device), *(norm.float() for norm in of_each)])
    return torch.linalg.vector_norm(norms, norm_type)
