"""Memory snapshots: torch's form of an allocator's history, read from anyone's pickle and written for anyone's viewer.

A snapshot is a dict of plain values: `segments` (what the allocator holds, block by block, at the end) and
`device_traces` (for every device, its log). A pickle can run code when it is read. The reader here refuses every name
that a pickle asks for, and so can make nothing but numbers, text, tuples, lists and dicts.

What is written is a pickle of protocol 4 with those plain values only, which pytorch.org/memory_viz reads.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainstep.errors import UsageError
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, Timeline, made_at

LARGEST_FILE = 2**30
"""Bytes of a snapshot that is still read; in memory it takes about ten times as much."""
_PROTOCOL = 4
_FREES = ("free_requested", "free_completed", "free")
_HOW = "expected what torch.cuda.memory._dump_snapshot writes"


def load_snapshot(path: Path) -> dict[str, Any]:
    """Read a snapshot from a pickle, running none of its code.

    Raises:
        UsageError: no such file, one of more than `LARGEST_FILE` bytes, one cut short, no pickle, a pickle that asks
            for anything but plain values, or plain values that are no snapshot.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise UsageError(
                f"{path} has {size / 2**30:.1f} GiB, and {LARGEST_FILE / 2**30:.0f} GiB is the most that is read; "
                "record fewer steps, or limit _record_memory_history(max_entries=…)"
            )
        with path.open("rb") as file:
            content = _PlainUnpickler(file).load()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UsageError:
        raise
    except (EOFError, pickle.UnpicklingError) as error:
        cut = isinstance(error, EOFError) or "truncated" in str(error)
        what = "is cut short" if cut else f"is no pickle of plain values ({error})"
        raise UsageError(f"{path} {what}; {_HOW}") from error
    except Exception as error:  # what a damaged pickle raises is not limited to pickle's own errors
        raise UsageError(f"{path} is damaged or no pickle ({type(error).__name__}); {_HOW}") from error
    return _checked(content, path)


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain values only: whatever else a pickle can make, it has to ask for by name first."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UsageError(f"the pickle asks for {module}.{name}, which a snapshot does not need; it was not run. {_HOW}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise UsageError(f"the pickle refers to something outside of itself, which a snapshot does not; {_HOW}")


def _checked(content: Any, path: Path) -> dict[str, Any]:
    """The content, if every part of it that is used has the type it must have."""

    def wrong(what: str) -> UsageError:
        return UsageError(f"{path} is no memory snapshot: {what}; {_HOW}")

    if not isinstance(content, dict) or not isinstance(content.get("device_traces"), list):
        raise wrong("it has no device_traces")
    if not isinstance(content.get("segments"), list):
        raise wrong("it has no segments")
    for segment in content["segments"]:
        if not _has(segment, address=int, device=int, blocks=list):
            raise wrong("a segment lacks its address, device or blocks")
        for block in segment["blocks"]:
            if not _has(block, state=str) or not _is_size(block, "size") or not _has_frames(block):
                raise wrong("a block lacks its size or state")
            if "requested_size" in block and not _is_size(block, "requested_size"):
                raise wrong("a block asked for an impossible size")
    for trace in content["device_traces"]:
        log: list[Any] = trace if isinstance(trace, list) else [trace]
        for event in log:
            if not _has(event, action=str) or not _has_frames(event):
                raise wrong("a trace holds something that is no event")
            if event["action"] in ("alloc", *_FREES) and not (_has(event, addr=int) and _is_size(event, "size")):
                raise wrong("an event lacks its address or size")
            if not isinstance(event.get("category"), (str, type(None))):
                raise wrong("an event's category is no text")
    if not any(event["action"] == "alloc" for trace in content["device_traces"] for event in trace):
        raise wrong("it holds no history; call torch.cuda.memory._record_memory_history() before what is to be seen")
    return content


def _has(value: Any, **types: type) -> bool:
    """Whether it is a dict with values of these types."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in types.items())


def _is_size(value: Mapping[str, Any], name: str) -> bool:
    """Whether it is a number of bytes that a device could have."""
    return isinstance(value.get(name), int) and 0 <= value[name] < 2**48


def _has_frames(value: Mapping[str, Any]) -> bool:
    frames = value.get("frames", [])
    return isinstance(frames, list) and all(_has(frame, filename=str, line=int, name=str) for frame in frames)


def blocks_of(snapshot: Mapping[str, Any], device: int) -> tuple[list[Block], int]:
    """One device's blocks, and how many allocations and releases its log holds.

    A block that the log releases without having made it, or that lives in the end without having been made in it, was
    there before.
    """
    frames = _Frames()
    blocks: list[Block] = []
    alive: dict[int, tuple[int, Mapping[str, Any]]] = {}
    waiting: set[int] = set()
    events = 0
    for event in snapshot["device_traces"][device]:
        action = event["action"]
        if action == "alloc":
            events += 1
            alive[event["addr"]] = (events, event)
        elif action == "free_completed" and event["addr"] in waiting:
            waiting.discard(event["addr"])  # its release was counted when it was asked for
        elif action in _FREES:
            events += 1
            start, made = alive.pop(event["addr"], (0, event))
            stack = frames.of(made) if start else ()
            blocks.append(Block(start, events, made["size"], event["addr"], stack, made.get("category")))
            if action == "free_requested":
                waiting.add(event["addr"])
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated":
                start, made = alive.pop(address, (0, block))
                size = made["size"] if start else block.get("requested_size", block["size"])
                blocks.append(Block(start, None, size, address, frames.of(made), made.get("category")))
            address += block["size"]
    for address, (start, made) in alive.items():  # a history that ends after the segments were read
        blocks.append(Block(start, None, made["size"], address, frames.of(made), made.get("category")))
    return sorted(blocks, key=lambda block: block.start), events


class _Frames:
    """Frames as ours, each stack made once: torch shares the lists of alike stacks."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Frame, ...]] = {}

    def of(self, holder: Mapping[str, Any]) -> tuple[Frame, ...]:
        frames: Sequence[Mapping[str, Any]] = holder.get("frames", ())
        if id(frames) not in self._known:
            self._known[id(frames)] = tuple(Frame(each["filename"], each["line"], each["name"]) for each in frames)
        return self._known[id(frames)]


def imported_timelines(snapshot: Mapping[str, Any]) -> dict[int, Timeline]:
    """Device → timeline, for every device with a history; owners are categories where there are any, else lines."""
    found = {}
    for device, trace in enumerate(snapshot["device_traces"]):
        if any(event["action"] == "alloc" for event in trace):
            blocks, events = blocks_of(snapshot, device)
            found[device] = Timeline(tuple(_foreign(block) for block in blocks), events)
    return found


def _foreign(block: Block) -> Allocation:
    owner = block.category or made_at(block.frames) or ("before the history" if not block.start else "no stack")
    return Allocation(block, owner, "", "", frames=block.frames)


def with_categories(snapshot: dict[str, Any], timeline: Timeline, device: int) -> dict[str, Any]:
    """The snapshot, each of one device's events with its owner as its category."""
    owners = {(each.block.address, each.block.start): each.owner for each in timeline.allocations}
    alive: dict[int, str] = {each.block.address: each.owner for each in timeline.allocations if not each.block.start}
    trace, events, waiting = [], 0, set()
    for event in snapshot["device_traces"][device]:
        address = event.get("addr")
        if event["action"] == "alloc":
            events += 1
            alive[address] = owners[address, events]
        elif event["action"] == "free_completed" and address in waiting:
            waiting.discard(address)
        elif event["action"] in _FREES:
            events += 1
            waiting.add(address)
        is_block = event["action"] in ("alloc", *_FREES)
        trace.append(event | {"category": alive.get(address, "unknown")} if is_block else event)
    traces = list(snapshot["device_traces"])
    traces[device] = [*trace, _unknown_category()]
    return snapshot | {"device_traces": traces}


def _unknown_category() -> dict[str, Any]:
    """An event that names the category unknown: the viewer fails on a snapshot whose categories lack it."""
    return {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"}


def snapshot_of(timeline: Timeline) -> dict[str, Any]:
    """A timeline that no CUDA allocator logged, in the same form, as device 0."""
    shared: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}

    def frames(each: Allocation) -> list[dict[str, Any]]:
        made = [{"filename": one.file, "line": one.line, "name": one.function} for one in each.block.frames]
        return shared.setdefault(each.block.frames, made)

    # Addresses of a CPU's storages may recur while a viewer still shows the block before: each gets one of its own.
    addresses, top = {}, 512
    for index, each in enumerate(timeline.allocations):
        addresses[index] = top
        top += -(-each.block.bytes // 512) * 512
    trace: list[dict[str, Any]] = [{}] * timeline.events
    for index, each in enumerate(timeline.allocations):
        event = {"addr": addresses[index], "size": each.block.bytes, "stream": 0, "frames": frames(each)}
        event |= {"category": each.owner}
        if each.block.start:
            trace[each.block.start - 1] = {"action": "alloc", **event}
        if each.block.end is not None:
            trace[each.block.end - 1] = {"action": "free_completed", **event}
    left = [(addresses[index], each) for index, each in enumerate(timeline.allocations) if each.block.end is None]
    segments = [_segment(address, each, frames(each)) for address, each in left]
    return {"segments": segments, "device_traces": [[*trace, _unknown_category()]]}


def _segment(address: int, each: Allocation, frames: list[dict[str, Any]]) -> dict[str, Any]:
    size = -(-each.block.bytes // 512) * 512
    block = {"address": address, "size": size, "requested_size": each.block.bytes, "state": "active_allocated"}
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": each.block.bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": [block | {"frames": frames}],
    }


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write a snapshot for pytorch.org/memory_viz.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            pickle.dump(_plain(snapshot), file, protocol=_PROTOCOL)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error


def _plain(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The two parts that viewers read; other parts that versions of torch add may hold values they cannot."""
    kept: Iterable[str] = ("segments", "device_traces")
    return {name: snapshot[name] for name in kept}
