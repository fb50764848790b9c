"""Memory snapshots read from files that may be anyone's, however large.

In files snapshots are pickles, and a pickle can run code when it is read. The reader here refuses every name that a
pickle asks for, and so can make nothing but numbers, text, tuples, lists and dicts; then it checks that they are a
snapshot.

A pickle holds a list a thousand elements at a time. So that the events of a log, which are most of a large file, need
not be in memory together, the list that a pickle of protocol 4 or 5 makes for the first log with events is replaced, as
the file passes by, by an object of ours that takes each thousand, keeps their blocks and empties the events. What
remains of an event is the empty dict, since the pickle may refer to it again; if it does, or anything else is not as
torch writes it, the file is read again, whole.
"""

from __future__ import annotations

import pickle
import re
import resource
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trainstep.base.errors import UsageError
from trainstep.base.files import open_regular
from trainstep.measure.allocations.history import History, NotAHistory
from trainstep.measure.allocations.timeline import Timeline
from trainstep.rows.records import collection_paused

LARGEST_WHOLE = 2**30
"""Bytes of a snapshot that is still read whole, which takes ten times as much memory; in passing it takes three."""
_FENCE, _GROWTH = 2**29, 40  # what reading may take: half a GiB, and this many times the file's size
_PIECE = 2**20
_KEY, _SHORT_KEY = b"\x8c\x0ddevice_traces\x94", b"\x8c\x01\x01\x94"
_FRAME = rb"(?:\x95(.{8}))?"  # where a frame begins, and its length
_BEFORE = _FRAME.join([re.escape(_KEY), rb"\]\x94", rb"\(?"]) + _FRAME + rb"(?:\]\x94" + _FRAME + rb")*?"
_FIRST_LOG = re.compile(_BEFORE + rb"(\])\x94" + rb"(?:\x95.{8})?\((?:\x95.{8})?\}", re.DOTALL)
"""The name of the logs, their list, empty logs of other devices, and the list of a log that begins with a dict."""
_LONGEST = 2**12  # bytes that the pattern may take: a few per device
_OPTIONAL = (str, type(None))
_HOW = "expected what torch.cuda.memory._dump_snapshot writes"


@dataclass(frozen=True)
class Snapshot:
    """Contents of a file: by device its log, closed."""

    histories: dict[int, History]


def imported_timelines(snapshot: Snapshot) -> dict[int, Timeline]:
    """Device → timeline, for every device with a history; owners are categories where there are any, else lines."""
    return {device: Timeline(each.table(), each.events) for device, each in snapshot.histories.items()}


def load_snapshot(path: Path) -> Snapshot:
    """Read a snapshot from a pickle, running none of its code; `UsageError` if it is none, or takes too much memory."""
    try:
        size = path.stat().st_size
        with open_regular(path) as file, _memory_fence(_FENCE + _GROWTH * size), collection_paused():
            if (start := file.read(1)) not in (b"", b"\x80"):
                hint = f"; if it is a trace: trainstep profile --from {path}" if start in (b"{", b"\x1f", b"S") else ""
                raise UsageError(f"{path} starts with {start!r}, as no pickle of torch does; {_HOW}{hint}")
            try:
                return _read(path, file, in_passing=True)
            except _Again as error:
                if size > LARGEST_WHOLE:
                    raise UsageError(
                        f"{path} has {size / 2**30:.1f} GiB, and {LARGEST_WHOLE / 2**30:.0f} GiB is the most that is "
                        f"read where events are not as torch writes them ({error}); record fewer steps, or limit "
                        "_record_memory_history(max_entries=…)"
                    ) from error
            return _read(path, file, in_passing=False)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except MemoryError as error:
        raise UsageError(f"{path} asks for far more memory than its {size:,} bytes can need; {_HOW}") from error


class _Again(Exception):
    """The file has to be read whole."""


def _read(path: Path, file: BinaryIO, *, in_passing: bool) -> Snapshot:
    file.seek(0)
    log = _Log()
    stream = _Replacing(file, log.token) if in_passing else file
    try:
        content = _PlainUnpickler(stream, log).load()
        if isinstance(content, dict) and "\x01" in content:
            content["device_traces"] = content.pop("\x01")
        return _checked(content, path)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what a damaged pickle raises is not limited to pickle's own errors
        if log.is_used and not isinstance(error, _Refused):
            raise _Again(str(error)) from error
        if not in_passing and path.stat().st_size > LARGEST_WHOLE:
            raise
        if isinstance(error, UsageError):
            raise
        what = f"is damaged or no pickle ({type(error).__name__})"
        if isinstance(error, (EOFError, pickle.UnpicklingError)):
            cut = isinstance(error, EOFError) or "truncated" in str(error)
            what = "is cut short" if cut else f"is no pickle of plain values ({error})"
        raise UsageError(f"{path} {what}; {_HOW}") from error


class _Log:
    """Takes the place of a log's list while it is read."""

    __slots__ = ("history", "is_used", "token")

    def __init__(self) -> None:
        self.history, self.is_used, self.token = History(), False, secrets.token_urlsafe(6)[:7]

    def __call__(self) -> _Log:
        return self

    def extend(self, events: list[Any]) -> None:
        self.is_used = True
        self.history.feed(events)
        for event in events:
            event.clear()

    def append(self, event: Any) -> None:
        self.extend([event])


class _Replacing:
    """A file in which a call of `_Log` stands for the first log's list. No pickle can name it: its name is new.

    Frames keep their lengths, on which the unpickler relies: the name of the logs is shorter by what the call is
    longer, or, where a frame begins between them, its length is changed.
    """

    def __init__(self, file: BinaryIO, token: str) -> None:
        self._file, self._call = file, b"cx\n" + token.encode() + b"\n)R"
        assert len(self._call) - 1 == len(_KEY) - len(_SHORT_KEY), "the name makes room for the call"
        self._ready = b""  # passed on
        self._ahead = b""  # where the pattern may begin
        self._is_done = False

    def _fill(self) -> bool:
        piece = self._file.read(_PIECE)
        text = self._ahead + piece
        if not self._is_done and (found := _FIRST_LOG.search(text)):
            text = text[: found.start()] + self._replaced(found) + text[found.end(5) :]
            self._is_done = True
        keep = 0 if self._is_done or not piece else _LONGEST
        cut = max(0, len(text) - keep)
        self._ready, self._ahead = self._ready + text[:cut], text[cut:]
        return bool(piece)

    def _replaced(self, found: re.Match[bytes]) -> bytes:
        before = found.string[found.start() : found.start(5)]
        frame = max(found.start(group) for group in range(1, 5)) - found.start()
        if frame < 0:
            return _SHORT_KEY + before[len(_KEY) :] + self._call
        length = int.from_bytes(before[frame : frame + 8], "little") + len(self._call) - 1
        return before[:frame] + length.to_bytes(8, "little") + before[frame + 8 :] + self._call

    def peek(self, size: int) -> bytes:
        while len(self._ready) < size and self._fill():
            pass
        return self._ready

    def read(self, size: int) -> bytes:
        found = self.peek(size)[:size]
        self._ready = self._ready[size:]
        return found

    def readline(self) -> bytes:
        while b"\n" not in self._ready and self._fill():
            pass
        return self.read(self._ready.find(b"\n") + 1 or len(self._ready))


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


class _Refused(UsageError):
    """The pickle asks for more than values."""


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain values only: whatever else a pickle can make, it has to ask for by name first."""

    def __init__(self, file: Any, log: _Log) -> None:
        super().__init__(file)
        self._log = log

    def find_class(self, module: str, name: str) -> Any:
        if name == self._log.token:
            return self._log
        raise _Refused(f"the pickle asks for {module}.{name}, which a snapshot does not need; it was not run. {_HOW}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise _Refused(f"the pickle refers to something outside of itself, which a snapshot does not; {_HOW}")


def _checked(content: Any, path: Path) -> Snapshot:
    def check(is_so: bool, otherwise: str) -> None:
        if not is_so:
            raise UsageError(f"{path} is no memory snapshot: {otherwise}; {_HOW}")

    seen: set[int] = set()

    def check_alone(value: Any, what: str) -> None:
        """Allocators share no blocks, segments or logs; what is there often takes far more work than its file says."""
        check(not value or id(value) not in seen, f"{what} is in it several times")
        seen.add(id(value))

    check(_has(content, device_traces=list), "it has no device_traces")
    check(_has(content, segments=list), "it has no segments")
    for segment in content["segments"]:
        check(_has(segment, address=int, device=int, blocks=list), "a segment lacks its address, device or blocks")
        check(abs(segment["address"]) < 2**62, "a segment's address is no address")
        check_alone(segment["blocks"], "a segment or its list of blocks")
        for block in segment["blocks"]:
            check(_has(block, state=str) and _has_size(block), "a block lacks its size or state")
            is_plain = _has_size({"requested_size": 0} | block, "requested_size") and _has(block, category=_OPTIONAL)
            check(is_plain, "a block has a size or category of the wrong kind")
    histories = {}
    for device, trace in enumerate(content["device_traces"]):
        history = trace.history if isinstance(trace, _Log) else History()
        check(isinstance(trace, (list, _Log)), "a trace is no list of events, so it holds something that is no event")
        check_alone(trace if isinstance(trace, list) else [trace], "a log")
        try:
            if isinstance(trace, list):
                history.feed(trace)
            if history.is_recorded:
                own = [segment for segment in content["segments"] if segment["device"] == device]
                history.close(own, device)
                histories[device] = history
        except NotAHistory as error:
            check(False, str(error))
    check(
        bool(histories),
        "it holds no history; call torch.cuda.memory._record_memory_history() before what is to be seen",
    )
    return Snapshot(histories)


def _has(value: Any, **types: type | tuple[type, ...]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in types.items())


def _has_size(value: Any, name: str = "size") -> bool:
    return isinstance(value.get(name), int) and 0 <= value[name] < 2**48
