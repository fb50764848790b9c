"""Memory snapshots: torch's form of an allocator's history, to and from ours.

A snapshot is a dict of plain values: `segments` (what the allocator holds, block by block, at the end) and
`device_traces` (for every device, its log). Its form is documented at `torch.cuda.memory._snapshot`.

In files snapshots are pickles (`loading` reads them). What is written is a pickle of protocol 4 with plain values only,
which pytorch.org/memory_viz reads.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainstep.base.files import aside
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, Timeline

FREES = ("free_requested", "free_completed", "free")
"""Events that end a block. A GPU's allocator logs the first two, one when a tensor dies and one when no stream uses its
memory any more; only the first of them counts."""
_UNKNOWN_CATEGORY = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"}
"""An event that names the category unknown: the viewer fails on a snapshot whose categories lack it."""


def blocks_of(snapshot: Mapping[str, Any], device: int) -> tuple[list[Block], int]:
    """Blocks of one device (what the log has not made was there before), and how many events the log counts."""
    block, blocks, events = _block_maker(), list[Block](), 0
    alive: dict[int, tuple[int, int, Mapping[str, Any]]] = {}  # address → (start, bytes, who has the stack)
    for event, events, counts in _numbered(snapshot["device_traces"][device]):
        if not counts:
            continue
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            alive[address] = events, size, event
            continue
        start, size, maker = alive.pop(address, (0, size, {"category": event.get("category")}))
        blocks.append(block(start, events, size, address, maker))
    # What is alive at the end: of the segments, and of a log that goes on after they were read.
    for segment in snapshot["segments"]:
        address = segment["address"]
        for held in segment["blocks"] if segment["device"] == device else ():
            if held["state"] == "active_allocated":
                alive.setdefault(address, (0, held.get("requested_size", held["size"]), held))
            address += held["size"]
    blocks += [block(start, None, size, address, maker) for address, (start, size, maker) in alive.items()]
    return sorted(blocks, key=lambda each: each.start), events


def _block_maker() -> Callable[[int, int | None, int, int, Mapping[str, Any]], Block]:
    """A function that makes blocks. Events share stacks, or stacks share frames: each is made once."""
    frame, stacks, same = functools.cache(Frame), dict[int, tuple[Frame, ...]](), functools.cache(tuple[Frame, ...])

    def block(start: int, end: int | None, size: int, address: int, maker: Mapping[str, Any]) -> Block:
        frames = maker.get("frames") or ()
        if id(frames) not in stacks:
            stacks[id(frames)] = same(tuple(frame(each["filename"], each["line"], each["name"]) for each in frames))
        return Block(start, end, size, address, stacks[id(frames)], maker.get("category"))

    return block


def _numbered(log: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int, bool]]:
    """Events, how many allocations and releases there were up to each, and whether it is one of them itself."""
    events, waiting = 0, set()
    for event in log:
        action = event["action"]
        if action == "free_completed" and event["addr"] in waiting:  # counted when it was asked for
            waiting.discard(event["addr"])
            counts = False
        else:
            counts = action in ("alloc", *FREES)
            if action == "free_requested":
                waiting.add(event["addr"])
        events += counts
        yield event, events, counts


def with_owners(snapshot: dict[str, Any], timeline: Timeline, device: int) -> dict[str, Any]:
    """The snapshot, what is known of one device's blocks added: owners as categories, and stacks as in the timeline."""
    stacks = _Stacks()
    known = {(each.block.address, each.block.start): stacks.mark(each) for each in timeline.allocations}
    alive = {address: mark for (address, start), mark in known.items() if not start}
    trace = []
    for event, events, _ in _numbered(snapshot["device_traces"][device]):
        if event["action"] == "alloc":
            alive[event["addr"]] = known[event["addr"], events]
        is_block = event["action"] in ("alloc", *FREES) and event["addr"] in alive
        trace.append(event | alive[event["addr"]] if is_block else event)
    traces = list(snapshot["device_traces"])
    traces[device] = [*trace, dict(_UNKNOWN_CATEGORY)]
    segments = []
    for segment in snapshot["segments"]:
        blocks, address = [], segment["address"]
        for block in segment["blocks"]:
            is_held = block["state"] == "active_allocated" and segment["device"] == device
            blocks.append({**block, **alive.get(address, {})} if is_held else block)
            address += block["size"]
        segments.append({**segment, "blocks": blocks})
    return snapshot | {"device_traces": traces, "segments": segments}


class _Stacks:
    """Stacks in torch's form, alike ones as one list, so that a pickle holds each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str, tuple[Frame, ...]], list[dict[str, Any]]] = {}

    def mark(self, each: Allocation) -> dict[str, Any]:
        """Owner and stack; innermost in the stack stands what no stack says: module or name, operation and phase."""
        key = (each.what, each.operation, each.phase, each.frames)
        if key not in self._known:
            says = " of ".join(filter(None, (each.operation, each.phase)))
            first = [Frame(each.what or each.phase, 0, says)] if each.what or each.operation else []
            made = [{"filename": one.file, "line": one.line, "name": one.function} for one in (*first, *each.frames)]
            self._known[key] = made
        return {"category": each.owner, "frames": self._known[key]}


def snapshot_of(timeline: Timeline) -> dict[str, Any]:
    """A timeline that no CUDA allocator logged, in the same form, as device 0."""
    stacks = _Stacks()
    trace: list[dict[str, Any]] = [{}] * timeline.events
    segments = []
    address = 512  # a CPU's addresses may recur while a viewer still shows the block before: each block gets its own
    for each in timeline.allocations:
        start, end, size = each.block.start, each.block.end, each.block.bytes
        rounded, mark = -(-size // 512) * 512, stacks.mark(each)
        event = {"addr": address, "size": size, "stream": 0, **mark}
        if start:
            trace[start - 1] = {"action": "alloc", **event}
        if end is not None:
            trace[end - 1] = {"action": "free_completed", **event}
        else:
            sizes = dict.fromkeys(("total_size", "allocated_size", "active_size"), rounded) | {"requested_size": size}
            block = {"address": address, "size": rounded, "requested_size": size, "state": "active_allocated", **mark}
            place = {"device": 0, "address": address, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
            segments.append({**place, **sizes, "frames": [], "blocks": [block]})
        address += rounded
    return {"segments": segments, "device_traces": [[*trace, dict(_UNKNOWN_CATEGORY)]]}


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write the two parts of a snapshot that viewers read; those that versions of torch add may hold other values."""
    plain = {name: snapshot[name] for name in ("segments", "device_traces")}
    with aside(path) as draft, draft.open("xb") as file:
        pickle.dump(plain, file, protocol=4)
