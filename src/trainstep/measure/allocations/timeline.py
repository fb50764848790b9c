"""The form that every source of allocations is brought into: ours on a GPU, ours on a CPU, anyone's snapshot.

Time is counted in events: an allocator's log holds n allocations and releases, and between them lie n + 1 states,
numbered from 0. An allocation lives in the states from `start` up to, but not including, `end`.

A step of a large model makes ten thousand allocations, most of them small. `outline` keeps the largest and adds up the
rest by group, so that nothing is lost from the total, and thins the total out to as many points as a screen has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

OWNERS = ("parameters", "optimizer state", "batch", "unknown", "gradients", "activations", "temporaries")
"""Whom bytes belong to; what stays comes first. parameters include buffers; activations are what a module's forward, or
the loss, made and left alive when it ended; temporaries everything else that a step makes; unknown what was there
before and nobody claimed."""
KEPT = 2500  # allocations drawn one by one at most
BINS = 1000  # stretches of the timeline in which sums are thinned out to their largest value


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """True if it is Python outside of torch."""
        path = self.file.replace("\\", "/")
        return path.endswith(".py") and "/torch/" not in path and "/triton/" not in path

    def __str__(self) -> str:
        """`model/transformer.py:88 forward`: the last two parts of the path say enough."""
        path = "/".join(self.file.replace("\\", "/").split("/")[-2:])
        return f"{path}:{self.line} {self.function}".rstrip()


@dataclass(frozen=True, slots=True)
class Block:
    """An allocation as an allocator knows it."""

    start: int  # the first state it lives in; 0 if it was there before the log began
    end: int | None  # the first state without it; None if it outlived the log
    bytes: int  # as asked for, before any rounding
    address: int
    frames: tuple[Frame, ...] = ()  # innermost first; empty where no Python was running, as in the backward of a GPU
    category: str | None = None  # what a foreign snapshot says of it


@dataclass(frozen=True, slots=True)
class Allocation:
    block: Block
    owner: str  # one of `OWNERS`; in a foreign snapshot without categories, the line that made it
    what: str  # the parameter's name, or the module that was running; empty where neither is known
    phase: str  # when it was made; empty before the step and in foreign snapshots
    operation: str = ""  # in backward, the operation whose gradient was being computed
    frames: tuple[Frame, ...] = ()  # the block's own, or in backward those of the forward call it is the backward of
    line: str = ""  # of code that made it (`made_at` its frames)


_NODE = re.compile(r"\b(\w+?)(Backward\d*)?::apply\b")


def made_at(frames: Sequence[Frame]) -> str:
    """The innermost line outside of torch or node of backward (`backward: Mm`) as text; else a line of torch's Python.

    Frames in C++ are the allocator's and torch's own: by themselves they say nothing, and the text is empty.
    """
    for frame in frames:
        node = None if frame.is_users else _NODE.search(frame.function)
        if frame.is_users or (node and (node[2] or node[1] in ("AccumulateGrad", "CopySlices"))):
            return f"backward: {node[1]}" if node else str(frame)
    if any("torch::autograd::Engine::" in frame.function for frame in frames):
        return "(backward)"
    return next((str(frame) for frame in frames if frame.file.endswith(".py")), "")


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of the step, from the state before its first event to the state after its last."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    allocations: tuple[Allocation, ...]  # in the order in which they were made
    events: int
    phases: tuple[PhaseSpan, ...] = ()

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Bytes alive in each of the `events` + 1 states."""
        return self.live_of(range(len(self.allocations)))

    def live_of(self, places: Iterable[int]) -> NDArray[np.int64]:
        """Bytes that the allocations at some places hold in each of the `events` + 1 states."""
        # Each block adds its bytes where it is made and takes them off where it ends: a running sum has the rest.
        change = np.zeros(self.events + 1, dtype=np.int64)
        for block in (self.allocations[place].block for place in places):
            change[block.start] += block.bytes
            if block.end is not None:
                change[block.end] -= block.bytes
        return change.cumsum()

    def totals(self, key: Callable[[Allocation], Key], state: int | None = None) -> dict[Key, tuple[int, int]]:
        """Bytes and number of allocations by owner, module or whatever `key` says, the most bytes first.

        Args:
            state: of what is alive in it; by default of all.
        """
        sizes, counts = Counter[Key](), Counter[Key]()
        for each in self.allocations:
            if state is None or is_alive(each.block, state):
                own = key(each)
                sizes[own] += each.block.bytes
                counts[own] += 1
        return {own: (size, counts[own]) for own, size in sizes.most_common()}

    def largest(self, key: Callable[[Allocation], Key], most: int) -> list[tuple[Allocation, int]]:
        """The largest kinds of allocations made while the log was kept: of each the first, and how many are alike.

        Alike are those of one size and one `key`.
        """
        alike: dict[tuple[int, Key], list[Allocation]] = {}
        for each in self.allocations:
            if each.block.start > 0:
                alike.setdefault((each.block.bytes, key(each)), []).append(each)
        ordered = sorted(alike.values(), key=lambda own: -own[0].block.bytes)
        return [(own[0], len(own)) for own in ordered[:most]]

    @property
    def peak_state(self) -> int:
        """The first state with the most bytes."""
        return int(self.live.argmax())

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return int(self.live.max())

    def phase_of(self, state: int) -> str:
        """The phase that a state is in; empty outside of all."""
        return next((each.name for each in self.phases if each.start < state <= each.end), "")


def is_alive(block: Block, state: int) -> bool:
    return block.start <= state and (block.end is None or state < block.end)


@dataclass(frozen=True)
class Group:
    name: str
    band: int  # groups of one band are stacked among each other, bands from the lowest up


@dataclass(frozen=True)
class Outline:
    groups: tuple[Group, ...]  # from the lowest up
    kept: tuple[tuple[Allocation, int], ...]  # the largest, with their groups' indices, in the order they were made
    smallest: int  # bytes of the smallest kept
    edges: NDArray[np.int64]  # the states at which stretches begin, the last end appended; shape (stretches + 1,)
    total: NDArray[np.int64]  # the most bytes alive in each stretch; shape (stretches,)
    rest: NDArray[np.int64]  # the most bytes of each group's small ones in each stretch; shape (groups, stretches)


def outline(
    timeline: Timeline, group_of: Callable[[Allocation], Group], *, kept: int = KEPT, bins: int = BINS
) -> Outline:
    """The largest `kept` allocations and the sums of the others, by group, in `bins` stretches at most."""
    of_each = [group_of(each) for each in timeline.allocations]
    groups = tuple(sorted(set(of_each), key=lambda group: (group.band, group.name)))
    places = [groups.index(each) for each in of_each]
    sizes = [each.block.bytes for each in timeline.allocations]
    order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    shown, small = sorted(order[:kept]), order[kept:]
    edges = np.unique(np.linspace(0, timeline.events + 1, min(bins, timeline.events + 1) + 1).astype(np.int64))
    rest = np.zeros((len(groups), len(edges) - 1), dtype=np.int64)
    for place in range(len(groups)):
        rest[place] = _largest(timeline.live_of(each for each in small if places[each] == place), edges)
    drawn = tuple((timeline.allocations[each], places[each]) for each in shown)
    smallest = sizes[order[: kept or 1][-1]] if order else 0
    return Outline(groups, drawn, smallest, edges, _largest(timeline.live, edges), rest)


def _largest(values: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(np.maximum.reduceat(values, edges[:-1]))


def interned(values: Sequence[str]) -> tuple[list[str], list[int]]:
    """The different strings, and for each value the index of its own."""
    places: dict[str, int] = {}
    indices = [places.setdefault(value, len(places)) for value in values]
    return list(places), indices
