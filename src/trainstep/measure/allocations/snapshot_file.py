"""Snapshot files: anyone's pickle read without running any of it, and ours written for anyone's viewer.

A pickle can run code when it is read. The reader here refuses every name that a pickle asks for, and so can make
nothing but numbers, text, tuples, lists and dicts; then it checks that they are a snapshot. What is written is a pickle
of protocol 4 with those plain values only, which pytorch.org/memory_viz reads.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from trainstep.errors import UsageError
from trainstep.measure.allocations.snapshot import FREES

LARGEST_FILE = 2**30
"""Bytes of a snapshot that is still read; in memory it takes about ten times as much."""
_FENCE, _GROWTH = 2**29, 40
"""What reading may take: half a GiB, and this many times the file's size."""
_PROTOCOL = 4
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
        with path.open("rb") as file, _memory_fence(_FENCE + _GROWTH * size):
            if (start := file.read(1)) not in (b"", b"\x80"):
                raise UsageError(f"{path} starts with {start!r}, as no pickle of torch does; {_HOW}")
            file.seek(0)
            content = _PlainUnpickler(file).load()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UsageError:
        raise
    except MemoryError as error:
        raise UsageError(f"{path} asks for far more memory than its {size:,} bytes can need; {_HOW}") from error
    except (EOFError, pickle.UnpicklingError) as error:
        cut = isinstance(error, EOFError) or "truncated" in str(error)
        what = "is cut short" if cut else f"is no pickle of plain values ({error})"
        raise UsageError(f"{path} {what}; {_HOW}") from error
    except Exception as error:  # what a damaged pickle raises is not limited to pickle's own errors
        raise UsageError(f"{path} is damaged or no pickle ({type(error).__name__}); {_HOW}") from error
    return _checked(content, path)


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
            if not _is_size({"requested_size": 0} | block, "requested_size") or not _has_category(block):
                raise wrong("a block has a size or category of the wrong kind")
    for trace in content["device_traces"]:
        log: list[Any] = trace if isinstance(trace, list) else [trace]
        for event in log:
            if not _has(event, action=str) or not _has_frames(event):
                raise wrong("a trace holds something that is no event")
            if event["action"] in ("alloc", *FREES) and not (_has(event, addr=int) and _is_size(event, "size")):
                raise wrong("an event lacks its address or size")
            if not _has_category(event):
                raise wrong("an event's category is no text")
    if not any(event["action"] == "alloc" for trace in content["device_traces"] for event in trace):
        raise wrong("it holds no history; call torch.cuda.memory._record_memory_history() before what is to be seen")
    return content


def _has(value: Any, **types: type) -> bool:
    """Whether it is a dict with values of these types."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in types.items())


def _has_category(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("category"), (str, type(None)))


def _is_size(value: Mapping[str, Any], name: str) -> bool:
    """Whether it is a number of bytes that a device could have."""
    return isinstance(value.get(name), int) and 0 <= value[name] < 2**48


def _has_frames(value: Mapping[str, Any]) -> bool:
    frames = value.get("frames", [])
    return isinstance(frames, list) and all(_has(frame, filename=str, line=int, name=str) for frame in frames)


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
