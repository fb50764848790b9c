"""What of a timeline can be drawn: its largest allocations one by one, and the others as sums.

A step of a large model makes ten thousand allocations, most of them small. `outline` keeps the largest and adds up the
rest by group, so that nothing is lost from the total, and thins the total out to as many points as a screen has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainstep.measure.allocations.timeline import Allocation, Timeline, live_bytes

KEPT = 2500
"""Allocations drawn one by one at most."""
BINS = 1000
"""Stretches of the timeline in which sums are thinned out to their largest value."""


@dataclass(frozen=True)
class Group:
    """What is drawn alike."""

    name: str
    band: int
    """Groups of one band are stacked among each other, bands from the lowest up."""


@dataclass(frozen=True)
class Outline:
    """The parts of a timeline that are drawn."""

    groups: tuple[Group, ...]
    """From the lowest up."""
    kept: tuple[tuple[Allocation, int], ...]
    """The largest, with the indices of their groups, in the order they were made."""
    smallest: int
    """Bytes of the smallest kept."""
    left_out: int
    """How many are not among them."""
    edges: NDArray[np.int64]
    """The states at which stretches begin, the last end appended; shape (stretches + 1,)."""
    total: NDArray[np.int64]
    """The most bytes alive in each stretch; shape (stretches,)."""
    rest: NDArray[np.int64]
    """The most bytes of each group's small ones in each stretch; shape (groups, stretches)."""


def outline(
    timeline: Timeline, group_of: Callable[[Allocation], Group], *, kept: int = KEPT, bins: int = BINS
) -> Outline:
    """The largest `kept` allocations and the sums of the others.

    Args:
        group_of: which group each belongs to.
        bins: stretches at most.
    """
    found = {group_of(each) for each in timeline.allocations}
    groups = tuple(sorted(found, key=lambda group: (group.band, group.name)))
    index = {group: place for place, group in enumerate(groups)}
    order = sorted(timeline.allocations, key=lambda each: -each.block.bytes)
    shown = {id(each) for each in order[:kept]}
    edges = np.unique(np.linspace(0, timeline.events + 1, min(bins, timeline.events + 1) + 1).astype(np.int64))
    rest = np.zeros((len(groups), len(edges) - 1), dtype=np.int64)
    for group, place in index.items():
        small = [each.block for each in order[kept:] if group_of(each) == group]
        if small:
            rest[place] = _largest(live_bytes(small, timeline.events), edges)
    return Outline(
        groups=groups,
        kept=tuple((each, index[group_of(each)]) for each in timeline.allocations if id(each) in shown),
        smallest=order[: kept or 1][-1].block.bytes if order else 0,
        left_out=max(len(order) - kept, 0),
        edges=edges,
        total=_largest(timeline.live, edges),
        rest=rest,
    )


def _largest(values: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(np.maximum.reduceat(values, edges[:-1]))


def interned(values: Sequence[str]) -> tuple[list[str], list[int]]:
    """The different strings, and for each value the index of its own."""
    places: dict[str, int] = {}
    indices = [places.setdefault(value, len(places)) for value in values]
    return list(places), indices
