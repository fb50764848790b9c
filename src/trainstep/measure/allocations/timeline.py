"""The form that every source of allocations is brought into: ours on a GPU, ours on a CPU, anyone's snapshot.

Time is counted in events: an allocator's log holds n allocations and releases, and between them lie n + 1 states,
numbered from 0. An allocation lives in the states from `start` up to, but not including, `end`.

A step of a large model makes ten thousand allocations, most of them small. `outline` keeps the largest and adds up the
rest by group, so that nothing is lost from the total, and thins the total out to as many points as a screen has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

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

    @property
    def line(self) -> str:
        """The line of code that made it: the innermost one outside of torch."""
        return made_at(self.frames)


_NODE = re.compile(r"(\w+?)(Backward\d*)?::apply\b")


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


class Columns(NamedTuple):
    """Allocations as columns of shape (allocations,)."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]  # below 0 where it outlived the log
    bytes: NDArray[np.int64]
    label: NDArray[np.int32]  # index into `examples`
    examples: list[Allocation]  # of each label one allocation: all that have it differ in when and how large alone


@dataclass(frozen=True, slots=True)
class Label:
    """Properties that blocks have in common."""

    frames: tuple[Frame, ...]
    category: str | None
    is_old: bool  # whether they were there before the log began

    @property
    def owner(self) -> str:
        """Their category, else the line or the node of backward that made them."""
        return self.category or made_at(self.frames) or ("before the history" if self.is_old else "no stack")


class Table(Sequence[Allocation]):
    """Allocations as columns of shape (allocations,); each is made when it is asked for."""

    def __init__(
        self,
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        size: NDArray[np.int64],
        address: NDArray[np.int64],
        label: NDArray[np.int32],
        labels: Sequence[Label],
    ) -> None:
        self.columns = Columns(start, end, size, label, [])
        self._address, self._labels, self._owners = address, labels, [each.owner for each in labels]
        self.columns.examples.extend(self._allocation(0, None, 0, 0, each) for each in range(len(labels)))

    def _allocation(self, start: int, end: int | None, size: int, address: int, label: int) -> Allocation:
        frames, category = self._labels[label].frames, self._labels[label].category
        return Allocation(
            Block(start, end, size, address, frames, category), self._owners[label], "", "", frames=frames
        )

    def __len__(self) -> int:
        return len(self.columns.start)

    def __getitem__(self, place: int) -> Allocation:  # type: ignore[override]  # nobody asks for slices
        start, end, size, label = (int(column[place]) for column in self.columns[:4])
        return self._allocation(start, None if end < 0 else end, size, int(self._address[place]), label)

    def __iter__(self) -> Iterator[Allocation]:
        return (self[place] for place in range(len(self)))


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of the step, from the state before its first event to the state after its last."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    allocations: Sequence[Allocation]  # in the order in which they were made
    events: int
    phases: tuple[PhaseSpan, ...] = ()

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Bytes alive in each of the `events` + 1 states."""
        return self._live(slice(None))

    def _live(self, chosen: slice | NDArray[Any]) -> NDArray[np.int64]:
        """Bytes that some of the allocations hold in each of the `events` + 1 states."""
        start, end, size = (column[chosen] for column in self.columns[:3])
        # Each block adds its bytes where it is made and takes them off where it ends: a running sum has the rest.
        change = np.zeros(self.events + 2, dtype=np.int64)
        np.add.at(change, start, size)
        np.subtract.at(change, end[end >= 0], size[end >= 0])
        return change[:-1].cumsum()

    @cached_property
    def columns(self) -> Columns:
        """The allocations as columns."""
        if isinstance(self.allocations, Table):
            return self.allocations.columns
        blocks = [each.block for each in self.allocations]
        ends = (-1 if block.end is None else block.end for block in blocks)
        start, end, size = (
            np.fromiter(each, np.int64, len(blocks))
            for each in ((block.start for block in blocks), ends, (block.bytes for block in blocks))
        )
        return Columns(start, end, size, np.arange(len(blocks), dtype=np.int32), list(self.allocations))

    def totals(self, key: Callable[[Allocation], Key], state: int | None = None) -> dict[Key, tuple[int, int]]:
        """Bytes and number of allocations by owner, module or whatever `key` says, the most bytes first.

        Args:
            key: of an allocation's owner, origin and stack alone.
            state: of what is alive in it; by default of all.
        """
        # A log has millions of blocks and few labels, so the key is asked once a label, and numpy adds up the blocks.
        start, end, size, label, examples = self.columns
        chosen = slice(None) if state is None else (start <= state) & ((end < 0) | (state < end))
        keys: dict[Key, int] = {}
        numbers = np.array([keys.setdefault(key(each), len(keys)) for each in examples], dtype=np.int64)
        of_each = numbers[label[chosen]]
        counts = np.bincount(of_each, minlength=len(keys))
        sums = np.zeros(len(keys), dtype=np.int64)
        np.add.at(sums, of_each, size[chosen])
        found = {each: (int(sums[place]), int(counts[place])) for each, place in keys.items() if counts[place]}
        return dict(sorted(found.items(), key=lambda each: -each[1][0]))

    def largest(self, key: Callable[[Allocation], Key], most: int) -> list[tuple[Allocation, int]]:
        """The largest kinds of allocations made while the log was kept: of each the first, and how many are alike.

        Alike are those of one size and one `key`, which is of an allocation's owner, origin and stack alone.
        """
        start, _, size, label, examples = self.columns
        made = np.flatnonzero(start > 0)
        keys: dict[Key, int] = {}
        numbers = np.array([keys.setdefault(key(each), len(keys)) for each in examples], dtype=np.int64)
        # One whole number stands for size and key together, by which numpy finds the alike in one pass.
        _, rank = np.unique(size[made], return_inverse=True)
        alike = rank * max(1, len(keys)) + numbers[label[made]]
        _, first, counts = np.unique(alike, return_index=True, return_counts=True)
        order = np.lexsort((start[made[first]], -size[made[first]]))[:most]
        return [(self.allocations[int(made[first[each]])], int(counts[each])) for each in order]

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
    label, examples = timeline.columns[3:]
    size = timeline.columns.bytes
    group_of_label = [group_of(each) for each in examples]
    found = {group_of_label[each] for each in np.unique(label)}
    groups = tuple(sorted(found, key=lambda group: (group.band, group.name)))
    index = {group: place for place, group in enumerate(groups)}
    group = np.array([index.get(each, -1) for each in group_of_label], dtype=np.int64)[label]
    order = np.argsort(-size, kind="stable")
    shown, small = np.sort(order[:kept]), order[kept:]
    edges = np.unique(np.linspace(0, timeline.events + 1, min(bins, timeline.events + 1) + 1).astype(np.int64))
    rest = np.zeros((len(groups), len(edges) - 1), dtype=np.int64)
    for place in range(len(groups)):
        rest[place] = _largest(timeline._live(small[group[small] == place]), edges)
    drawn = tuple((timeline.allocations[int(place)], int(group[place])) for place in shown)
    smallest = int(size[order[: kept or 1][-1]]) if len(order) else 0
    return Outline(groups, drawn, smallest, edges, _largest(timeline.live, edges), rest)


def _largest(values: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(np.maximum.reduceat(values, edges[:-1]))


def interned(values: Sequence[str]) -> tuple[list[str], list[int]]:
    """The different strings, and for each value the index of its own."""
    places: dict[str, int] = {}
    indices = [places.setdefault(value, len(places)) for value in values]
    return list(places), indices
