"""A bucket's gradients, averaged by copies between the memories of one host's ranks, beside computation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainstep.parallel.collectives import Pending, SideStream, as_reals
from trainstep.parallel.transport.by_copies import PeerCopies
from trainstep.parallel.transport.layout import Layout, Stretch


class AveragesByCopies:
    """For gradients of these numbers of elements, of real numbers where they are complex.

    Args:
        scattered: every rank gets its `slice_of` each mean alone, otherwise all get all.
        beside: where the copies run.
    """

    def __init__(self, copies: PeerCopies, sizes: Sequence[int], beside: SideStream, *, scattered: bool) -> None:
        layout = Layout([Stretch(size, copies.ranks) for size in sizes], copies.ranks)
        self._average, self._beside = copies.average_of(layout, scattered=scattered), beside

    def start(self, gradients: Sequence[Tensor]) -> Pending:
        """Average gradients where they are, behind all that the current stream has so far; the caller holds them until
        it has waited."""
        return self._beside.run(self._average(as_reals(gradients)))
