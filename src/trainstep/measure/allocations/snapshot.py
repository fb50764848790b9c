"""Memory snapshots: torch's form of an allocator's history, to and from ours.

A snapshot is a dict of plain values: `segments` (what the allocator holds, block by block, at the end) and
`device_traces` (for every device, its log). Its form is documented at `torch.cuda.memory._snapshot`.

In files snapshots are pickles. A pickle can run code when it is read. The reader here refuses every name that a pickle
asks for, and so can make nothing but numbers, text, tuples, lists and dicts; then it checks that they are a snapshot.
What is written is a pickle of protocol 4 with those plain values only, which pytorch.org/memory_viz reads.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from trainstep.errors import UsageError
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, Timeline, made_at

FREES = ("free_requested", "free_completed", "free")
"""Events that end a block. A GPU's allocator logs the first two, one when a tensor dies and one when no stream uses its
memory any more; only the first of them counts."""
LARGEST_FILE = 2**30  # bytes of a snapshot that is still read; in memory it takes about ten times as much
_FENCE, _GROWTH = 2**29, 40  # what reading may take: half a GiB, and this many times the file's size
_UNKNOWN_CATEGORY = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"}
"""An event that names the category unknown: the viewer fails on a snapshot whose categories lack it."""
_OPTIONAL = (str, type(None))
_HOW = "expected what torch.cuda.memory._dump_snapshot writes"


def blocks_of(snapshot: Mapping[str, Any], device: int) -> tuple[list[Block], int]:
    """One device's blocks (what the log has not made was there before), and how many events the log counts."""
    blocks: list[Block] = []
    alive: dict[int, tuple[int, Mapping[str, Any]]] = {}
    stacks: dict[int, tuple[Frame, ...]] = {}  # torch shares the lists of alike stacks: each is made once
    events = 0

    def stack_of(holder: Mapping[str, Any]) -> tuple[Frame, ...]:
        frames: Sequence[Mapping[str, Any]] = holder.get("frames", ())
        if id(frames) not in stacks:
            stacks[id(frames)] = tuple(Frame(each["filename"], each["line"], each["name"]) for each in frames)
        return stacks[id(frames)]

    for event, events, counts in _numbered(snapshot["device_traces"][device]):
        if counts and event["action"] == "alloc":
            alive[event["addr"]] = (events, event)
        elif counts:
            start, made = alive.pop(event["addr"], (0, event))
            stack = stack_of(made) if start else ()
            blocks.append(Block(start, events, made["size"], event["addr"], stack, made.get("category")))
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated":
                start, made = alive.pop(address, (0, block))
                size = made["size"] if start else block.get("requested_size", block["size"])
                blocks.append(Block(start, None, size, address, stack_of(made), made.get("category")))
            address += block["size"]
    for address, (start, made) in alive.items():  # a history that ends after the segments were read
        blocks.append(Block(start, None, made["size"], address, stack_of(made), made.get("category")))
    return sorted(blocks, key=lambda block: block.start), events


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


def imported_timelines(snapshot: Mapping[str, Any]) -> dict[int, Timeline]:
    """Device → timeline, for every device with a history; owners are categories where there are any, else lines."""

    def owner(block: Block) -> str:
        return block.category or made_at(block.frames) or ("no stack" if block.start else "before the history")

    found = {}
    for device, trace in enumerate(snapshot["device_traces"]):
        if any(event["action"] == "alloc" for event in trace):
            blocks, events = blocks_of(snapshot, device)
            allocations = (Allocation(block, owner(block), "", "", frames=block.frames) for block in blocks)
            found[device] = Timeline(tuple(allocations), events)
    return found


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


def load_snapshot(path: Path) -> dict[str, Any]:
    """Read a snapshot from a pickle, running none of its code; `UsageError` if it is none, or over `LARGEST_FILE`."""
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise UsageError(
                f"{path} has {size / 2**30:.1f} GiB, and {LARGEST_FILE / 2**30:.0f} GiB is the most that is read; "
                "record fewer steps, or limit _record_memory_history(max_entries=…)"
            )
        with path.open("rb") as file, _memory_fence(_FENCE + _GROWTH * size):
            if (start := file.read(1)) not in (b"", b"\x80"):
                raise UsageError(f"{path} starts with {start!r}, as no pickle of torch does; {_HOW}")
            file.seek(0)
            content: dict[str, Any] = _PlainUnpickler(file).load()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UsageError:
        raise
    except MemoryError as error:
        raise UsageError(f"{path} asks for far more memory than its {size:,} bytes can need; {_HOW}") from error
    except Exception as error:  # what a damaged pickle raises is not limited to pickle's own errors
        what = f"is damaged or no pickle ({type(error).__name__})"
        if isinstance(error, (EOFError, pickle.UnpicklingError)):
            cut = isinstance(error, EOFError) or "truncated" in str(error)
            what = "is cut short" if cut else f"is no pickle of plain values ({error})"
        raise UsageError(f"{path} {what}; {_HOW}") from error
    _check(content, path)
    return content


@contextmanager
def _memory_fence(room: int) -> Iterator[None]:
    """Let the process grow by `room` bytes at most (on Linux): a pickle of ten bytes can ask for gigabytes."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(statistics.read_text().split()[0]) * resource.getpagesize() + room
    fences = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(most, *fences) if fences else most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain values only: whatever else a pickle can make, it has to ask for by name first."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise UsageError(f"the pickle asks for {module}.{name}, which a snapshot does not need; it was not run. {_HOW}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise UsageError(f"the pickle refers to something outside of itself, which a snapshot does not; {_HOW}")


def _check(content: Any, path: Path) -> None:
    def check(is_so: bool, otherwise: str) -> None:
        if not is_so:
            raise UsageError(f"{path} is no memory snapshot: {otherwise}; {_HOW}")

    check(_has(content, device_traces=list), "it has no device_traces")
    check(_has(content, segments=list), "it has no segments")
    for segment in content["segments"]:
        check(_has(segment, address=int, device=int, blocks=list), "a segment lacks its address, device or blocks")
        for block in segment["blocks"]:
            check(_has(block, state=str) and _has_size(block) and _has_frames(block), "a block lacks its size or state")
            is_plain = _has_size({"requested_size": 0} | block, "requested_size") and _has(block, category=_OPTIONAL)
            check(is_plain, "a block has a size or category of the wrong kind")
    for trace in content["device_traces"]:
        log: list[Any] = trace if isinstance(trace, list) else [trace]
        for event in log:
            check(_has(event, action=str) and _has_frames(event), "a trace holds something that is no event")
            if event["action"] in ("alloc", *FREES):
                check(_has(event, addr=int) and _has_size(event), "an event lacks its address or size")
            check(_has(event, category=_OPTIONAL), "an event's category is no text")
    check(
        any(event["action"] == "alloc" for trace in content["device_traces"] for event in trace),
        "it holds no history; call torch.cuda.memory._record_memory_history() before what is to be seen",
    )


def _has(value: Any, **types: type | tuple[type, ...]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in types.items())


def _has_size(value: Mapping[str, Any], name: str = "size") -> bool:
    return isinstance(value.get(name), int) and 0 <= value[name] < 2**48


def _has_frames(value: Mapping[str, Any]) -> bool:
    frames = value.get("frames", [])
    return isinstance(frames, list) and all(_has(frame, filename=str, line=int, name=str) for frame in frames)


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write the two parts of a snapshot that viewers read; those that versions of torch add may hold other values."""
    plain = {name: snapshot[name] for name in ("segments", "device_traces")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            pickle.dump(plain, file, protocol=4)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error
