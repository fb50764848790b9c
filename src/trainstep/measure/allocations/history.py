"""An allocator's log, put together event by event, as columns: of an event nothing is kept but its block.

A snapshot of three million events is 3 GB as Python objects and 100 MB as columns. Blocks that were made by one stack
and have one category share a `Label`, of which there are as many as there are lines of code.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainstep.measure.allocations.timeline import Block, Frame, Label, Table

FREES = ("free_requested", "free_completed", "free")
"""Events that end a block. A GPU's allocator logs the first two, one when a tensor dies and one when no stream uses its
memory any more; only the first of them counts."""
_ALIVE = -1  # the end of a block that outlived the log
_UNSHARED = 4  # references to a list that one event has: the event, the unpickler's memory, and two names here


class NotAHistory(Exception):
    """A log is wrong; the error says how in a few words."""


class History:
    """A device's log: `feed` it events, then `close` it with the segments at its end."""

    def __init__(self) -> None:
        self.events = 0  # allocations and releases
        self.is_recorded = False  # whether anything was allocated
        self.labels: list[Label] = []
        self._start, self._end, self._bytes, self._address = (array("q") for _ in range(4))
        self._label = array("i")
        self._alive: dict[int, tuple[int, int, int]] = {}  # address → (start, bytes, label)
        self._waiting: set[int] = set()  # addresses of releases asked for and not yet completed
        self._numbers: dict[tuple[int, str | None, bool], int] = {}  # (stack, category, is old) → label
        self._stacks: dict[tuple[int, ...], int] = {(): 0}  # the ids of frames → the stack's number
        self._frames_of: list[tuple[Frame, ...]] = [()]
        self._shared: dict[int, int] = {}  # the id of a list that several events have → its stack
        self._frames: dict[int, Frame] = {}  # the id of a frame's dict → the frame
        self._known: dict[tuple[str, int, str], Frame] = {}
        self._kept: list[Any] = []  # what ids were taken of, so that nothing else gets them

    def feed(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Add events in their order.

        Raises:
            NotAHistory: one is no event, or lacks what one of its kind has.
        """
        alive, waiting = self._alive, self._waiting
        for event in log:
            if not isinstance(event, dict) or not isinstance(action := event.get("action"), str):
                raise NotAHistory("a trace holds something that is no event")
            is_made = action == "alloc"
            if not is_made and action not in FREES:
                self._stack_of(event)
                _category(event)
                continue
            address, size = event.get("addr"), event.get("size")
            if not (isinstance(address, int) and 0 <= address < 2**63 and isinstance(size, int) and 0 <= size < 2**48):
                raise NotAHistory("an event lacks its address or size")
            if is_made:
                self.events += 1
                self.is_recorded = True
                alive[address] = self.events, size, self._label_of(event)
                continue
            self._stack_of(event)
            if action == "free_completed" and address in waiting:
                waiting.discard(address)  # counted when it was asked for
                continue
            self.events += 1
            if action == "free_requested":
                waiting.add(address)
            start, size, label = alive.pop(address, (0, size, self._label_number(0, _category(event), True)))
            self._add(start, self.events, size, address, label)

    def close(self, segments: Iterable[Mapping[str, Any]], device: int) -> None:
        """Add what is alive at the end: of the segments, and of a log that goes on after they were read."""
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"] if segment["device"] == device else ():
                if block["state"] == "active_allocated":
                    there = (0, block.get("requested_size", block["size"]), self._label_of(block, is_old=True))
                    start, size, label = self._alive.pop(address, there)
                    self._add(start, _ALIVE, size, address, label)
                address += block["size"]
        for address, (start, size, label) in self._alive.items():
            self._add(start, _ALIVE, size, address, label)
        self._alive.clear()

    def _add(self, start: int, end: int, size: int, address: int, label: int) -> None:
        self._start.append(start)
        self._end.append(end)
        self._bytes.append(size)
        self._address.append(address)
        self._label.append(label)

    def _label_of(self, holder: Mapping[str, Any], *, is_old: bool = False) -> int:
        return self._label_number(self._stack_of(holder), _category(holder), is_old)

    def _label_number(self, stack: int, category: str | None, is_old: bool) -> int:
        number = self._numbers.get((stack, category, is_old))
        if number is None:
            number = self._numbers[stack, category, is_old] = len(self.labels)
            self.labels.append(Label(self._frames_of[stack], category, is_old))
        return number

    def _stack_of(self, holder: Mapping[str, Any]) -> int:
        """The number of a stack. Events share lists of alike stacks, or lists share frames: each is looked at once."""
        frames = holder.get("frames")
        if not frames and (frames is None or isinstance(frames, list)):
            return 0
        number = self._shared.get(id(frames))
        if number is not None:
            return number
        if not isinstance(frames, list):
            raise NotAHistory("a trace holds something that is no event: its frames are no list")
        key = tuple(id(each) if id(each) in self._frames else self._frame(each) for each in frames)
        number = self._stacks.get(key)
        if number is None:
            number = self._stacks[key] = len(self._frames_of)
            self._frames_of.append(tuple(self._frames[each] for each in key))
        if sys.getrefcount(frames) > _UNSHARED:
            self._shared[id(frames)] = number
            self._kept.append(frames)
        return number

    def _frame(self, frame: Any) -> int:
        """The id of a frame that was not seen before."""
        if not isinstance(frame, dict):
            raise NotAHistory("a trace holds something that is no event: a frame is no dict")
        key = (frame.get("filename"), frame.get("line"), frame.get("name"))
        if not (isinstance(key[0], str) and isinstance(key[1], int) and isinstance(key[2], str)):
            raise NotAHistory("a trace holds something that is no event: a frame lacks its file, line or name")
        found = self._known.get(key)  # type: ignore[arg-type]
        if found is None:
            found = self._known[key] = Frame(key[0], key[1], key[2])  # type: ignore[index]
        self._frames[id(frame)] = found
        self._kept.append(frame)
        return id(frame)

    def blocks(self) -> list[Block]:
        """All blocks, in the order in which they were made."""
        return [each.block for each in self.table()]

    def table(self) -> Table:
        """All blocks as allocations whose owner is their category, else the line that made them."""
        columns = (self._start, self._end, self._bytes, self._address, self._label)
        order = np.argsort(np.frombuffer(self._start, "q"), kind="stable")
        start, end, size, address, label = (np.frombuffer(each, each.typecode)[order] for each in columns)
        return Table(start, end, size, address, label, self.labels)


def _category(holder: Mapping[str, Any]) -> str | None:
    category = holder.get("category")
    if category is not None and not isinstance(category, str):
        raise NotAHistory("an event's category is no text")
    return category
