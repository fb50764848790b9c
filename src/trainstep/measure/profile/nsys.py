"""Nsight Systems: its command line, and its SQLite export read into a `Trace`.

An export (schema 3.x; read here: 3.24 and 3.25) has a table per kind of event, made only where there are such events.
Kernels, copies and fills carry the correlation id of the API call that launched them. Ids are unique within a process
only, so they are joined with the process: `globalTid` holds the process in bits 24–47 and the thread in bits 0–23,
`globalPid` the process alone. Names are ids of rows in `StringIds`; an NVTX range has its text in `text` or, where that
is null, in `textId`. Times are nanoseconds.

By default nsys records a CUDA graph as one (GRAPH_TRACE), not its kernels; its time counts, and what ran in it is not
known. Processes each number their devices from 0, so where several have work, a device is one of a process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainstep.base.errors import UsageError
from trainstep.base.files import open_regular
from trainstep.measure.profile.chrome import DAY_US, impossible
from trainstep.measure.profile.ranges import classify_range
from trainstep.measure.profile.trace import Launch, Range, Stream, Thread, Trace, Work, WorkKind

MAGIC = b"SQLite format 3\x00"
LARGEST_BYTES = 8 * 2**30
LARGEST_VALUE = 2**24  # bytes of one value
LARGEST_ROWS = 5_000_000  # rows that are held in memory at most: ranges, launches and kernels together
PUSH_POP = 59  # NVTX ranges that nest within a thread; ranges that start and end anywhere (60) have no innermost one
_BITS = 24
_KERNELS, _COPIES, _FILLS, _GRAPHS = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
_CALLS, _NVTX, _STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
_GPUS, _META, _MEMORY_KINDS = "TARGET_INFO_GPU", "META_DATA_EXPORT", "ENUM_CUDA_MEM_KIND"
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_LAST_NS = 30 * 86_400e9  # times count from the start of the session
_WORK = ("start", "end", "deviceId", "streamId", "correlationId")
_NEEDED = {
    _KERNELS: (*_WORK, "demangledName"),
    _COPIES: (*_WORK, "bytes", "copyKind"),
    _FILLS: (*_WORK, "bytes"),
    _GRAPHS: (*_WORK, "graphExecId"),
    _CALLS: ("start", "end", "globalTid", "correlationId"),
    _NVTX: ("start", "end", "eventType", "text", "globalTid"),
    _STRINGS: ("id", "value"),
}


def is_sqlite(path: Path) -> bool:
    """True if a file begins as SQLite databases do; `UsageError` if it cannot be read."""
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_nsys(path: Path) -> Trace:
    """The trace in an nsys SQLite export; `UsageError` if it is none, damaged, without kernels, or too large."""
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise UsageError(
            f"{path} is {size / 2**30:.1f} GiB; at most {LARGEST_BYTES / 2**30:.0f} GiB are read. Profile fewer steps, "
            "with a capture range"
        )
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")  # computed columns of anybody's call nothing
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
            return _Export(database, path).trace()
    except (sqlite3.DatabaseError, OverflowError) as error:
        raise UsageError(f"{path} is damaged or cut short ({error}); export it again from the .nsys-rep") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} holds a value that nsys does not write ({error})") from error


class _Export:
    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database, self._path = database, path
        tables = [str(row[0]) for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self._columns = {
            table: {str(row[1]) for row in database.execute(f"PRAGMA table_info({table})")}
            for table in (*_NEEDED, _GPUS, _META, _MEMORY_KINDS)
            if table in tables
        }
        known = [table for table in tables if table.startswith(("CUPTI_", "NVTX_", "TARGET_INFO_", "META_DATA_"))]
        if not known or _STRINGS not in tables:
            raise UsageError(f"{path} is an SQLite file, but not an export of Nsight Systems: it has no {_STRINGS}")
        exported: dict[str, Any] = dict(self._rows(_META, "name", "value"))
        self._version = str(exported.get("EXPORT_SCHEMA_VERSION", "unknown"))
        for table, columns in self._columns.items():
            if missing := sorted(set(_NEEDED.get(table, ())) - columns):
                raise UsageError(
                    f"{path}: {table} has no column {missing[0]} (schema {self._version}; 3.24 and 3.25 are known)"
                )
        self._strings: dict[int, str] = dict(database.execute(f"SELECT id, value FROM {_STRINGS}"))
        self._memory: dict[int, str] = dict(self._rows(_MEMORY_KINDS, "id", "label"))
        self._impossible = 0

    def trace(self) -> Trace:
        if not self._count(_KERNELS) + self._count(_GRAPHS):
            raise UsageError(
                f"{self._path} holds no GPU kernels: profile with --trace=cuda,nvtx, and check that the capture range "
                "was entered"
            )
        rows = sum(self._count(table) for table in _NEEDED if table != _STRINGS)
        if rows > LARGEST_ROWS:
            raise UsageError(
                f"{self._path} holds {rows:,} events ({self._path.stat().st_size / 2**30:.1f} GiB); at most "
                f"{LARGEST_ROWS:,} are read. Profile fewer steps, with a capture range"
            )
        work = list(self._work(self._launches()))
        ranges = sorted(self._ranges(), key=lambda each: (each.thread, each.start, -each.end))
        gpus = [str(name) for (name,) in self._rows(_GPUS, "name") if name is not None]
        notes = (impossible(self._impossible),) if self._impossible else ()
        return Trace(ranges, work, ", ".join(dict.fromkeys(gpus)), notes=notes)

    def _span(self, start: int, end: int) -> tuple[float, float] | None:
        """Start and duration in microseconds; None, and counted, where they are impossible."""
        duration = (end - start) / 1e3
        if 0 <= start <= _LAST_NS and 0 <= duration <= DAY_US:
            return start / 1e3, duration
        self._impossible += 1
        return None

    def _count(self, table: str) -> int:
        if table not in self._columns:
            return 0
        return int(self._database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, nothing if it is absent; a column that is absent is null."""
        if table not in self._columns:
            return iter(())
        chosen = ", ".join(f'"{name}"' if name in self._columns[table] else "NULL" for name in columns)
        return self._database.execute(f"SELECT {chosen} FROM {table}")

    def _launches(self) -> dict[tuple[int, int], Launch]:
        """(process, correlation id) → thread and time of the call; the first, where a driver call is inside."""
        calls: dict[tuple[int, int], Launch] = {}
        for start, thread, correlation in self._rows(_CALLS, "start", "globalTid", "correlationId"):
            key = (thread >> _BITS, correlation)
            if key not in calls or start / 1e3 < calls[key][1]:
                calls[key] = (_thread(thread), start / 1e3)
        self._processes = {process for process, _ in calls}
        return calls

    def _ranges(self) -> Iterator[Range]:
        columns = ("start", "end", "eventType", "text", "textId", "globalTid")
        for start, end, kind, text, text_id, thread in self._rows(_NVTX, *columns):
            if kind == PUSH_POP and end is not None and thread is not None:
                label = str(text) if text is not None else str(self._strings.get(text_id, ""))
                if span := self._span(start, end):
                    yield Range(_thread(thread), span[0], span[0] + span[1], *classify_range(label))

    def _work(self, calls: dict[tuple[int, int], Launch]) -> Iterator[Work]:
        """Kernels, graphs, copies and fills; the latter two named as torch.profiler names them."""
        tables: tuple[tuple[str, WorkKind, str, Callable[..., str]], ...] = (
            (_KERNELS, "kernel", "demangledName", lambda name, *_: str(self._strings.get(name, f"kernel {name}"))),
            (_GRAPHS, "kernel", "graphExecId", lambda number, *_: f"CUDA graph {number}"),
            (_COPIES, "copy", "copyKind", self._copy_name),
            (_FILLS, "copy", "bytes", lambda *_: "Memset"),
        )
        processes = {
            row[0] >> _BITS for table, *_ in tables for row in self._rows(table, "globalPid") if row[0] is not None
        }
        for table, work_kind, told_by, title in tables:
            rows = self._rows(table, *_WORK, "globalPid", "bytes", told_by, "srcKind", "dstKind")
            for start, end, device, stream, correlation, process, moved, *told in rows:
                if (span := self._span(start, end)) is None:
                    continue
                if not isinstance(device, int) or not isinstance(stream, int) or not isinstance(moved, int | None):
                    raise ValueError(f"device {device!r}, stream {stream!r}, bytes {moved!r}")
                launch = self._launch_of(calls, correlation, process)
                owner: int | str = device
                if len(processes) > 1 and process is not None:
                    owner = f"GPU {device} of process {process >> _BITS & 2**_BITS - 1}"
                yield Work(title(*told), work_kind, *span, Stream(owner, stream), launch, bytes=moved)

    def _copy_name(self, kind: int, source: int | None, target: int | None) -> str:
        name = f"Memcpy {_COPY_KINDS.get(kind, kind)}"
        if source in self._memory and target in self._memory:
            name += f" ({self._memory[source]} -> {self._memory[target]})"
        return name

    def _launch_of(self, calls: dict[tuple[int, int], Launch], correlation: int, process: int | None) -> Launch | None:
        if process is not None:
            return calls.get((process >> _BITS, correlation))
        if len(self._processes) > 1:
            raise UsageError(
                f"{self._path}: kernels do not say of which process they are, and {len(self._processes)} were profiled "
                f"(schema {self._version}); profile one process"
            )
        return next((calls.get((own, correlation)) for own in self._processes), None)


def _thread(global_id: int) -> Thread:
    return global_id >> _BITS, global_id & (2**_BITS - 1)
