"""Large tensors of the host looked at in parts: what is computed of a part lies in memory that was used before.

New memory takes several times as long as to compute what is put there, and a difference of two weights is as large as
they are. A GPU's allocator keeps its memory, and a GPU has all of a tensor at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

PART = 2**18
"""Numbers that are looked at together."""


def has_rows(tensor: Tensor) -> bool:
    """Whether slices along the first dimension are looked at by themselves."""
    return tensor.dim() > 1 and tensor.shape[0] > 1


def as_rows(tensor: Tensor) -> Tensor:
    """As a matrix of these slices, or of a single row."""
    rows = tensor.shape[0] if has_rows(tensor) else 1
    return tensor.reshape(rows, tensor.numel() // rows)


def in_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matrices of whole rows, or of parts of the only one, the same of each of these tensors of equal shapes."""
    flat = [as_rows(each) for each in tensors]
    rows, columns = flat[0].shape
    if flat[0].is_cuda:
        yield tuple(flat)
        return
    size, dim = (max(1, PART // max(1, columns)), 0) if rows > 1 else (PART, 1)
    yield from zip(*(each.split(size, dim) for each in flat), strict=True)


def norm(tensor: Tensor) -> float:
    """‖x‖, summed in float64."""
    parts = (torch.linalg.vector_norm(part, dtype=torch.float64) for (part,) in in_parts(tensor))
    return math.hypot(*map(float, parts))
