"""Large tensors of the host looked at in parts: what is computed of a part lies in memory that was used before.

New memory takes several times as long as to compute what is put there, and a difference of two weights is as large as
they are. A part is too small for torch to divide it among threads: threads that wait for each other after every
operation, on cores that something else uses too, take fifty times as long as one. A GPU's allocator keeps its memory,
and a GPU has all of a tensor at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

PART = 2**15 - 1
"""Numbers that are looked at together: torch divides from 2¹⁵ on."""


def as_rows(tensor: Tensor) -> Tensor:
    """A matrix (rows, numbers of each) of slices along the first dimension; (1, numel) where there are no two."""
    rows = max(1, tensor.shape[0]) if tensor.dim() > 1 else 1
    return tensor.reshape(rows, tensor.numel() // rows)


def in_parts(*tensors: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Matrices of whole rows, or of parts of a single one, the same of each of these tensors of equal shapes, and which
    rows of `as_rows` they are of; on the host `PART` numbers at most, on a GPU all at once.

    Raises:
        ValueError: their shapes are not equal.
    """
    if len(shapes := {each.shape for each in tensors}) > 1:
        raise ValueError(f"tensors of shapes {', '.join(map(str, map(tuple, sorted(shapes))))} are not compared")
    flat = [as_rows(each) for each in tensors]
    rows, columns = flat[0].shape
    if flat[0].is_cuda:
        yield slice(0, rows), tuple(flat)
        return
    size = max(1, PART // max(1, columns))
    for first in range(0, rows, size):
        several = [each.split(PART, 1) for each in (matrix[first : first + size] for matrix in flat)]
        yield from ((slice(first, first + size), part) for part in zip(*several, strict=True))


def norm(tensor: Tensor) -> float:
    """‖x‖, summed in float64."""
    parts = (torch.linalg.vector_norm(part, dtype=torch.float64) for _, (part,) in in_parts(tensor))
    return math.hypot(*map(float, parts))
