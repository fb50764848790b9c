"""torch.profiler's JSON, read into a `Trace` piece by piece: what is kept of an event is a tenth of its text.

Events of phase X carry a category (capitalised by early versions): `cpu_op` and `user_annotation` become ranges;
`kernel`, `gpu_memcpy`, `gpu_memset` and MTIA's `mtia_ccp_events` become work, joined by correlation id to the call of a
runtime or driver (`cuda_runtime`, `xpu_runtime`, …) that launched them. A trace without work of a device is a CPU's.

Correlation ids are unique within a process. Where a file holds several processes, a launch is taken only if one alone
has its id. What the reader cannot use is counted and said in the trace's notes.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from trainstep.base.errors import UsageError
from trainstep.measure.costs import Tensors
from trainstep.measure.profile.json_stream import NotAsExpected, fields_of
from trainstep.measure.profile.ranges import RangeKind, classify_range
from trainstep.measure.profile.trace import Launch, Range, Stream, Thread, Trace, Work, WorkKind, own_time
from trainstep.rows.records import collection_paused

MOST = 5_000_000  # ranges, launches and kernels together that are held in memory
DAY_US = 86_400e6
"""Times are impossible that are negative or longer than this, and starts that are further from the others'."""

_OPERATORS = {"cpu_op", "operator"}
_WORK: dict[str, WorkKind] = {
    **dict.fromkeys(("kernel", "concurrent_kernel", "mtia_ccp_events"), "kernel"),
    **dict.fromkeys(("gpu_memcpy", "memcpy", "gpu_memset", "memset"), "copy"),
}
_NOT_READ = {
    *("trace", "gpu_user_annotation", "python_function", "python function", "overhead", "cuda_sync", "cuda_event"),
    *("cpu_instant_event", "external_correlation", "cuda_profiler_range", "mtia_insight", "mtia_counters"),
}
"""Known, and neither work of a device nor a range that other events do not tell too."""
_NSYS_REPORT = "is Nsight Systems' own report; give what `nsys export --type sqlite {path}` makes of it"
_HINTS = {
    **dict.fromkeys((".nsys-rep", ".qdrep"), _NSYS_REPORT),
    ".ncu-rep": "is Nsight Compute's report, which has no steps; expected a trace of torch.profiler or an nsys export",
}


class _Found(NamedTuple):
    """Work whose launch and device are still to be looked up."""

    name: str
    kind: WorkKind
    start: float
    duration: float
    place: tuple[int | str, int | str]  # (process as the event has it, device)
    stream: int | str
    correlation: int | None
    bytes: float | None


def read_chrome_trace(path: Path) -> Trace:
    """The trace in a file that `torch.profiler` exported; `UsageError` if it is none, cut short, or too large."""
    if hint := _HINTS.get(path.suffix.lower()):
        raise UsageError(f"{path} {hint.format(path=path)}")
    collected, devices, lists = _Collector(path), [], 0
    try:
        with collection_paused():
            for name, value in fields_of(path, "traceEvents"):
                if name == "traceEvents" and isinstance(value, list):
                    lists += not value
                    collected.add(value)
                elif name == "deviceProperties":
                    devices = [str(each.get("name", "")) for each in value or []]
        if lists:
            return collected.trace(", ".join(dict.fromkeys(devices)))
    except NotAsExpected as error:
        raise UsageError(
            f"{path} is not a trace of torch.profiler ({error}) nor an SQLite export, or cut short; "
            f"if it is a memory snapshot: trainstep memory --from {path}"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        expected = "expected events as torch.profiler's export_chrome_trace writes them"
        raise UsageError(f"{path}: {_said(collected.event, error)}; {expected}") from error
    raise UsageError(f"{path} is not a trace of torch.profiler: it has no list of traceEvents")


def _said(event: dict[str, Any] | None, error: Exception) -> str:
    """Say what is wrong with which event, None where one is no object."""
    if event is None:
        return f"an event cannot be read: {error}"
    name = f"the event {event.get('name')} of category {event.get('cat')} at ts {event.get('ts')}"
    return f"{name} has no {error}" if isinstance(error, KeyError) else f"{name} cannot be read: {error}"


class _Collector:
    """Parts of a trace's events that are kept. Times are microseconds from the first event on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.event: dict[str, Any] | None = None
        """The one that is read, for errors to name."""
        self._base: float | None = None
        self._ranges: list[Range] = []
        self._work: list[_Found] = []
        self._launches: dict[int, dict[int, Launch]] = {}  # correlation → process → launch
        self._launched = 0
        self._kinds: dict[tuple[str, bool, bool], tuple[RangeKind, str, int | None]] = {}
        self._names: dict[str, str] = {}
        self._tensors: dict[str, Tensors] = {}
        self._threads: dict[tuple[Any, Any], Thread] = {}
        self._numbers: dict[str, int] = {}
        self._unknown = Counter[str]()  # categories
        self._impossible = 0

    def add(self, events: Sequence[dict[str, Any]]) -> None:
        """Keep what is needed of these events."""
        spans = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
        if self._base is None and spans:
            starts = []
            for self.event in spans:
                starts.append(float(self.event["ts"]))
            self._base = _first(starts)
        for event in spans:
            self.event = event
            category = str(event.get("cat", "")).lower()
            if category in _OPERATORS or category == "user_annotation":
                self._add_range(event, is_operator=category in _OPERATORS)
            elif category in _WORK:
                self._add_work(event, _WORK[category])
            elif category.endswith(("_runtime", "_driver")) or category == "runtime":
                self._add_launch(event)
            elif category not in _NOT_READ:
                self._unknown[category] += 1
        self.event = None
        if len(self._ranges) + len(self._work) + len(self._launches) > MOST:
            size = self._path.stat().st_size / 2**30
            raise UsageError(
                f"{self._path} ({size:.1f} GiB) holds more than {MOST:,} operators, launches and kernels; "
                "profile fewer steps (--profiled-steps)"
            )

    def _times(self, event: dict[str, Any]) -> tuple[float, float] | None:
        """Start and duration; None, and counted, where they are impossible."""
        assert self._base is not None, "an event came"
        try:
            start, duration = event["ts"] - self._base, float(event["dur"])
        except OverflowError:  # an integer that no float can hold
            start = duration = math.inf
        if abs(start) <= DAY_US and 0 <= duration <= DAY_US:
            return start, duration
        self._impossible += 1
        return None

    def _thread(self, event: dict[str, Any]) -> Thread:
        """Process and thread as numbers; tools that merge files write texts."""
        named = (event["pid"], event["tid"])
        if named not in self._threads:
            process, thread = (
                each if isinstance(each, int) else self._numbers.setdefault(str(each), -1 - len(self._numbers))
                for each in named
            )
            self._threads[named] = process, thread
        return self._threads[named]

    def _add_range(self, event: dict[str, Any], *, is_operator: bool) -> None:
        times = self._times(event)
        if times is None:
            return
        arguments = event.get("args") or {}
        key = (str(event["name"]), is_operator, bool(arguments.get("Fwd thread id")))
        if key not in self._kinds:
            self._kinds[key] = _kind(*key)
        kind, name, sequence = self._kinds[key]
        sequence = arguments.get("Sequence number", sequence)
        if not isinstance(sequence, int | None):
            raise TypeError(f"a sequence number is {sequence!r}")
        tensors = None
        if kind == "operator" and "Input Dims" in arguments:
            given = (arguments["Input Dims"], arguments.get("Input type", []), arguments.get("Concrete Inputs"))
            shapes = str(given)
            if shapes not in self._tensors:
                self._tensors[shapes] = _tensors(given)
            tensors = self._tensors[shapes]
        start, duration = times
        self._ranges.append(Range(self._thread(event), start, start + duration, kind, name, sequence, tensors))

    def _add_launch(self, event: dict[str, Any]) -> None:
        correlation = (event.get("args") or {}).get("correlation")
        self._launched += "aunch" in event["name"]
        if correlation is not None and (times := self._times(event)) is not None:
            thread = self._thread(event)
            self._launches.setdefault(correlation, {})[thread[0]] = (thread, times[0])

    def _add_work(self, event: dict[str, Any], kind: WorkKind) -> None:
        times = self._times(event)
        if times is None:
            return
        arguments = event.get("args") or {}
        name = self._names.setdefault(str(event["name"]), str(event["name"]))  # one object for all that are alike
        device, stream = (
            each if isinstance(each, int) else str(each)
            for each in (arguments.get("device", event["pid"]), arguments.get("stream", event["tid"]))
        )
        place = (event["pid"], device)
        moved = arguments.get("bytes")
        moved = float(moved) if isinstance(moved, int | float) and math.isfinite(moved) else None
        correlation = arguments.get("correlation")
        self._work.append(_Found(name, kind, *times, place, stream, correlation, moved))

    def trace(self, device: str) -> Trace:
        """All of it, put together."""
        self._ranges.sort(key=lambda each: (each.thread, each.start, -each.end))
        if not self._work:
            if self._launched:
                raise UsageError(
                    f"{self._path} holds {self._launched:,} launches and no kernels that they started; profile with "
                    "ProfilerActivity.CUDA (XPU, …) among the activities, where the driver lets kernels be recorded"
                )
            return Trace(self._ranges, own_time(self._ranges), "CPU", is_cpu=True, notes=tuple(self._notes(0)))
        owners = self._owners()
        work, ambiguous = [], 0
        for each in self._work:
            launches = self._launches.get(each.correlation, {}) if each.correlation is not None else {}
            ambiguous += len(launches) > 1
            launch = next(iter(launches.values())) if len(launches) == 1 else None
            stream = Stream(owners[each.place], each.stream)
            work.append(Work(each.name, each.kind, each.start, each.duration, stream, launch, bytes=each.bytes))
        return Trace(self._ranges, work, device, notes=tuple(self._notes(ambiguous)))

    def _owners(self) -> dict[tuple[int | str, int | str], int | str]:
        """(Process, device) → the device's number, or a name where several processes have a device of that number."""
        places = dict.fromkeys(each.place for each in self._work)
        numbers = Counter(device for _, device in places)
        return {
            (process, device): device if numbers[device] == 1 else f"GPU {device} of process {process}"
            for process, device in places
        }

    def _notes(self, ambiguous: int) -> Iterator[str]:
        if ambiguous:
            yield (
                f"The file is of several processes, in which launches have the same ids: which of them started "
                f"{counted(ambiguous, 'kernel')} cannot be told, so phase and module are unknown; profile one process "
                "a file."
            )
        if self._impossible:
            yield impossible(self._impossible)
        for category, count in self._unknown.most_common(3):
            named = f"of category {category!r}" if category else "without a category"
            yield f"{counted(count, 'event')} {named} were left out: torch.profiler's are known."


def _first(starts: Sequence[float]) -> float:
    """The first of the times that are within a day of most."""
    finite = [each for each in starts if math.isfinite(each)] or [0.0]
    middle = statistics.median(finite)
    return min(each for each in finite if abs(each - middle) <= DAY_US)


def counted(count: int, what: str) -> str:
    """`1 event`, `3 events`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def impossible(count: int) -> str:
    """Message about events whose times cannot be."""
    return (
        f"{counted(count, 'event')} with impossible times (negative, longer than a day, or a day away from the others) "
        "were left out."
    )


def _kind(text: str, is_operator: bool, is_backward: bool) -> tuple[RangeKind, str, int | None]:
    kind, name, sequence = classify_range(text, is_backward=is_backward)
    if is_operator and kind == "other":
        kind = "operator"
    elif not is_operator and kind == "operator" and not name.startswith("triton_"):
        kind = "other"  # somebody's own range, which may hold anything, waiting too
    return kind, name, sequence


_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
_Shapes = list[Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)]]


def _tensors(given: Any) -> Tensors:
    dims, types, scalars = msgspec.convert(given, tuple[list[list[Any]], list[str], list[str] | None])
    shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    counts: list[int] = []
    unknown_lists = 0
    for shape, dtype in zip(dims, types, strict=False):
        if dtype == "TensorList" and not shape:
            unknown_lists += 1
        elif dtype not in ("", "Scalar", "ScalarList", "None"):
            alone = msgspec.convert([shape] if dtype != "TensorList" else shape, _Shapes)
            shapes += alone
            dtypes += [dtype] * len(alone)
            counts.append(len(alone))
    return Tensors(tuple(shapes), tuple(dtypes), tuple(counts), unknown_lists, tuple(scalars or ()))
