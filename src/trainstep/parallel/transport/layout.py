"""Places of each rank's rows of several gradients, one rank's behind the other's.

A row is what one rank gets: its slice of the first gradient, then of the second, and so on. All rows have one layout,
so that they can be added up as they are. Where a gradient has too few rows for all ranks, the last ranks' slices end
early; what stands behind them in their place is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Cut(Protocol):
    """A parameter that is cut by rows among the ranks."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def padded_shape(self) -> torch.Size:
        """With as many rows as make all ranks' parts equal."""


@dataclass(frozen=True)
class Stretch:
    """A tensor as a stretch of its memory, cut among the ranks as evenly as can be."""

    elements: int
    ranks: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.elements])

    @property
    def padded_shape(self) -> torch.Size:
        return torch.Size([-(-self.elements // self.ranks) * self.ranks])


@dataclass(frozen=True)
class Piece:
    """Elements that one rank gets of one gradient, or a part of them."""

    number: int  # of the gradient
    offset: int  # in the gradient, whose elements are in order
    place: int  # in the row
    elements: int


class Pieces(Protocol):
    """Places of the elements of each rank's row."""

    def pieces(self, rank: int, first: int = 0, last: int | None = None) -> Iterator[Piece]:
        """Pieces that a rank gets, from the row's element `first` on and before `last`; places count from `first`."""


class Layout:
    """The rows of the gradients of `parameters`, in their order, for so many ranks."""

    def __init__(self, parameters: Sequence[Cut], ranks: int) -> None:
        self.ranks = ranks
        self.shapes: list[torch.Size] = [parameter.shape for parameter in parameters]  # of the gradients
        self.slices = [parameter.padded_shape.numel() // ranks for parameter in parameters]  # elements, at most
        self.starts: list[int] = []  # of each gradient's slice in a row
        self.size = 0  # elements of a row
        for elements in self.slices:
            self.starts.append(self.size)
            self.size += -(-elements // 16) * 16  # each starts at a multiple

    def pieces(self, rank: int, first: int = 0, last: int | None = None) -> Iterator[Piece]:
        """Pieces that a rank gets, from the row's element `first` on and before `last`; places count from `first`."""
        last = self.size if last is None else last
        for number, (shape, elements, start) in enumerate(zip(self.shapes, self.slices, self.starts, strict=True)):
            begin, there = rank * elements, min(elements, max(shape.numel() - rank * elements, 0))
            low, high = max(start, first), min(start + there, last)
            if low < high:
                yield Piece(number, begin + low - start, low - first, high - low)

    def blocks(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Blocks of one gradient: how many ranks get how many elements each, the first of these ranks, and how many
        elements of the gradient are before them."""
        elements = self.slices[number]
        full, rest = divmod(self.shapes[number].numel(), elements)  # ranks with all their rows; elements of the next
        if full:
            yield full, elements, 0, 0
        if rest:
            yield 1, rest, full, full * elements


def shared_size(elements: int, holders: int) -> int:
    """Elements of a part of a row that so many divide; each part starts at a multiple, too."""
    return -(-elements // (16 * holders)) * 16


class SharedRows:
    """Rows that several ranks have alike, as those of the replicas of a model do, each divided among who has it.

    By rank, `coordinates` are (holder, row): which row of `rows` it has, and which of that row's holders it is. Its row
    here is its part of that one. Seen as `whole`, the parts of the holders of one row make up one tensor, that row.
    """

    def __init__(self, rows: Layout, coordinates: Sequence[tuple[int, int]]) -> None:
        self._rows, self._coordinates, self.ranks = rows, coordinates, len(coordinates)
        self.size = shared_size(rows.size, 1 + max(holder for holder, _ in coordinates))
        self.whole = _Whole(self.size, rows.size, [holder for holder, _ in coordinates])

    def pieces(self, rank: int, first: int = 0, last: int | None = None) -> Iterator[Piece]:
        """Pieces as of `Layout`."""
        holder, row = self._coordinates[rank]
        skipped = holder * self.size
        last = self.size if last is None else last
        return self._rows.pieces(row, skipped + first, min(skipped + last, self._rows.size))

    def holders(self, rank: int) -> list[int]:
        """The ranks that have the same row, this one not among them; in another order on each, as `ranks.others`."""
        mine = self._coordinates[rank]
        with_it = {holder: number for number, (holder, row) in enumerate(self._coordinates) if row == mine[1]}
        return [with_it[(mine[0] + distance) % len(with_it)] for distance in range(1, len(with_it))]


@dataclass(frozen=True)
class _Whole:
    size: int
    elements: int  # of the tensor
    numbers: Sequence[int]  # of each rank, which of the tensor's parts it has

    def pieces(self, rank: int, first: int = 0, last: int | None = None) -> Iterator[Piece]:
        """Pieces as of `Layout`."""
        begin = self.numbers[rank] * self.size
        low, high = begin + first, min(begin + (self.size if last is None else last), self.elements)
        if low < high:
            yield Piece(0, low, 0, high - low)
