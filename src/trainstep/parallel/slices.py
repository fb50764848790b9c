"""Stretches of a tensor's memory: all of it, and one for each rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.base.errors import UsageError


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order they have in memory, as a one-dimensional view, or the tensor itself if it is one.

    Raises:
        ValueError: the tensor's elements do not fill a stretch of memory, so that no view has them.
    """
    if not tensor.is_contiguous():  # a transposed weight, or channels_last: dense all the same
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        if not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(
                f"a tensor of shape {shape} and strides {strides} does not fill its memory; make it contiguous"
            )
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def is_lazy(tensor: Tensor) -> bool:
    """True if the tensor is the conjugate or the negative of its memory, which torch has put off computing."""
    return tensor.is_conj() or tensor.is_neg()


def resolved(tensor: Tensor) -> Tensor:
    """The tensor, or a copy in whose memory the values are, where it `is_lazy`: backends send memory."""
    return tensor.resolve_conj().resolve_neg() if is_lazy(tensor) else tensor


def slice_of(tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """The rank's part of a tensor cut into `world_size` equal parts of its memory, as a one-dimensional view."""
    size, rest = divmod(tensor.numel(), world_size)
    assert rest == 0, f"{tensor.numel()} elements cannot be cut into {world_size} equal parts"
    return flat(tensor)[rank * size : (rank + 1) * size]


def check_dense(gradient: Tensor, name: str) -> None:
    """Raise `UsageError` for a sparse gradient of the parameter of this name."""
    if gradient.layout != torch.strided:
        raise UsageError(f"{name} has a sparse gradient; only dense ones can be averaged")


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient whose elements are in memory where the parameter's are: itself, or a copy of one that a user set."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def slices_of(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """`slice_of` this rank of each."""
    rank, size = group.rank(), group.size()  # once: asking takes as long as slicing
    return [slice_of(tensor, rank, size) for tensor in tensors]
