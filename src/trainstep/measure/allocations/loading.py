"""Memory snapshots of other programs, read from files that may be anyone's.

In files snapshots are pickles, and a pickle can run code when it is read. The reader here refuses every name that a
pickle asks for, and so can make nothing but numbers, text, tuples, lists and dicts. Then msgspec checks that they are a
snapshot. The whole file is in memory while it is read.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from trainstep.base.errors import UsageError
from trainstep.base.files import check_size, open_regular
from trainstep.measure.allocations.snapshot import FREES, blocks_of
from trainstep.measure.allocations.timeline import Allocation, Block, Timeline, made_at
from trainstep.rows.records import collection_paused

_FENCE, _GROWTH = 2**29, 40  # what reading may take: half a GiB, and this many times the file's size
_COUNTED = ("alloc", *FREES)
_HOW = "expected what torch.cuda.memory._dump_snapshot writes"
Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
Address = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Segment(msgspec.Struct):
    address: Address
    device: int
    blocks: Any


class _Snapshot(msgspec.Struct):
    segments: list[_Segment]
    device_traces: list[Any]


class _Block(msgspec.Struct):
    state: str
    size: Size
    requested_size: Size = 0
    category: str | None = None


class _Event(msgspec.Struct):
    action: str
    addr: Address
    size: Size
    category: str | None = None


class _Holders(msgspec.Struct):
    """Lists of what has a stack, by segment and by device."""

    blocks: list[list[_Block]]
    events: list[list[_Event]]


class _Frame(msgspec.Struct):
    filename: str
    line: int
    name: str


def imported_timelines(path: Path) -> dict[int, Timeline]:
    """Device → timeline of a pickle that torch wrote, for every device with a history; none of its code is run.

    Owners are categories where there are any, else the lines or the nodes of backward that made the blocks.

    Raises:
        UsageError: it is no snapshot, is too large, or takes too much memory.
    """
    try:
        with open_regular(path) as file, collection_paused():
            size = check_size(file, path, "pickle")
            if (start := file.peek(1)[:1]) not in (b"", b"\x80"):
                trace = f"if it is a trace: trainstep profile --from {path}"
                raise UsageError(f"{path} starts with {start!r}, as no pickle of torch does; {_HOW}; {trace}")
            with _memory_fence(_FENCE + _GROWTH * size):
                return _timelines(_PlainUnpickler(file).load())
    except (OSError, UsageError):
        raise
    except MemoryError as error:
        raise UsageError(f"{path} asks for far more memory than its {size:,} bytes can need; {_HOW}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is no memory snapshot: {error}; {_HOW}") from error
    except Exception as error:  # what a damaged pickle raises is not limited to pickle's own errors
        kind = type(error).__name__
        raise UsageError(f"{path} is damaged, cut short or no pickle of plain values ({kind}); {_HOW}") from error


@contextmanager
def _memory_fence(room: int) -> Iterator[None]:
    """Let the process grow by `room` bytes at most (on Linux): a pickle of ten bytes can ask for gigabytes."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(statistics.read_text().split()[0]) * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
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


def _timelines(content: Any) -> dict[int, Timeline]:
    found = msgspec.convert(content, _Snapshot)
    held, logs = [each.blocks for each in found.segments], found.device_traces
    # Allocators share no lists: a small file in which one is there many times would take far more work than it says.
    lists = [each for each in (*held, *logs) if each]
    if len({id(each) for each in lists}) < len(lists) or not all(isinstance(each, list) for each in lists):
        raise msgspec.ValidationError("a list of blocks or events is in it several times, or is no list")
    logs = [[each for each in log if not isinstance(each, dict) or each.get("action") in _COUNTED] for log in logs]
    msgspec.convert({"blocks": held, "events": logs}, _Holders)
    stacks = _once(each.get("frames") for holders in (*held, *logs) for each in holders)
    msgspec.convert(_once(frame for stack in stacks for frame in stack), list[_Frame])
    histories = [device for device, log in enumerate(logs) if any(each["action"] == "alloc" for each in log)]
    if not histories:
        raise msgspec.ValidationError(
            "it holds no history; call torch.cuda.memory._record_memory_history() before what is to be seen"
        )
    snapshot = {"segments": content["segments"], "device_traces": logs}
    return {device: _timeline(*blocks_of(snapshot, device)) for device in histories}


def _once(values: Iterable[Any]) -> list[Any]:
    """Distinct values: a file may share some."""
    return list({id(each): each for each in values if each}.values())


def _timeline(blocks: list[Block], events: int) -> Timeline:
    stacks = {id(each.frames): each.frames for each in blocks}  # few, so that each is searched once
    lines = {key: made_at(frames) for key, frames in stacks.items()}
    allocations = []
    for each in blocks:
        line = lines[id(each.frames)]
        owner = each.category or line or ("no stack" if each.start else "before the history")
        allocations.append(Allocation(each, owner, "", "", frames=each.frames, line=line))
    return Timeline(tuple(allocations), events)
