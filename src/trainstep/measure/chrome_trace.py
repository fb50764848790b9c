"""torch.profiler's JSON, plain or gzipped, read into a `Trace`.

Events of phase X carry a category: `cpu_op` and `user_annotation` become ranges; `kernel`, `gpu_memcpy` and
`gpu_memset` become work, joined by correlation id to the `cuda_runtime` or `cuda_driver` call that launched them. A
trace without GPU work is a CPU's: there, every operator's own time (without that of the operators it calls) is work.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainstep.errors import UsageError
from trainstep.measure.trace import Range, Tensors, Thread, Trace, Work, classify_range

LARGEST = 2**30
"""Bytes of JSON that are read at most: as Python objects they take several times as much memory."""
COMPILED = "compiled code"
"""The operator that a CPU's compiled loops are listed under: they make no operator calls of their own."""
ENGINE = "autograd engine"
"""The operator that the engine's own time on a CPU is listed under."""
GLOO = "gloo:"
"""How the names of Gloo's collectives begin."""
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NO_TENSOR = ("", "Scalar", "ScalarList", "None")


def read_chrome_trace(path: Path) -> Trace:
    """The trace in a file that `torch.profiler` exported.

    Raises:
        UsageError: no such file, not such a trace, cut short, or too large to be read into memory.
    """
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            text = stream.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise UsageError(
                f"{path} ({path.stat().st_size / 2**30:.1f} GiB) holds more than {LARGEST / 2**30:.1f} GiB of JSON; "
                "profile fewer steps (--profiled-steps)"
            )
        content = json.loads(text)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is cut short or damaged: {error}; export the trace again") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not a trace of torch.profiler (not JSON: {error}) nor an SQLite export, or cut short"
        ) from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise UsageError(f"{path} is not a trace of torch.profiler: it has no list of traceEvents")
    try:
        return _trace(events, content.get("deviceProperties") or [])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: an event is not as torch.profiler writes it ({error!r})") from error


def _trace(events: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]]) -> Trace:
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    start = min((event["ts"] for event in spans), default=0.0)
    launches: dict[int, tuple[Thread, float]] = {}
    ranges, work = [], []
    for event in spans:
        category, arguments = event.get("cat"), event.get("args", {})
        if category in _LAUNCHES and "correlation" in arguments:
            launches[arguments["correlation"]] = ((event["pid"], event["tid"]), event["ts"] - start)
        elif category in ("cpu_op", "user_annotation"):
            ranges.append(_range(event, arguments, start))
    for event in spans:
        if event.get("cat") in _GPU_WORK:
            work.append(_gpu_work(event, start, launches))
    ranges.sort(key=lambda each: (each.thread, each.start, -each.end))
    if work:
        return Trace(ranges, work, ", ".join(dict.fromkeys(str(device.get("name", "")) for device in devices)))
    return Trace(ranges, own_time(ranges), "CPU")


def _range(event: dict[str, Any], arguments: dict[str, Any], start: float) -> Range:
    kind, name, sequence = classify_range(event["name"], is_backward=bool(arguments.get("Fwd thread id")))
    if event["cat"] == "cpu_op" and kind == "other":
        kind = "operator"
    elif event["cat"] == "user_annotation" and kind == "operator" and not name.startswith("triton_"):
        kind = "other"  # somebody's own range, which may hold anything, waiting too
    sequence = arguments.get("Sequence number", sequence)
    tensors = None
    if kind == "operator" and "Input Dims" in arguments:
        tensors = _tensors(arguments["Input Dims"], arguments.get("Input type", []), arguments.get("Concrete Inputs"))
    begin = event["ts"] - start
    return Range((event["pid"], event["tid"]), begin, begin + event["dur"], kind, name, sequence, tensors)


def _tensors(dims: Sequence[Any], types: Sequence[str], scalars: Sequence[str] | None) -> Tensors:
    shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    counts: list[int] = []
    unknown_lists = 0
    for shape, dtype in zip(dims, types, strict=False):
        if dtype in _NO_TENSOR:
            continue
        if dtype == "TensorList" and not shape:
            unknown_lists += 1
            continue
        alone = [shape] if dtype != "TensorList" else shape
        shapes += [tuple(each) for each in alone]
        dtypes += [dtype] * len(alone)
        counts.append(len(alone))
    return Tensors(tuple(shapes), tuple(dtypes), tuple(counts), unknown_lists, tuple(scalars or ()))


def _gpu_work(event: dict[str, Any], start: float, launches: dict[int, tuple[Thread, float]]) -> Work:
    arguments = event.get("args", {})
    return Work(
        name=event["name"],
        start=event["ts"] - start,
        duration=event["dur"],
        stream=f"{arguments.get('device', event['pid'])}/{arguments.get('stream', event['tid'])}",
        launch=launches.get(arguments.get("correlation", -1)),
        is_kernel=event["cat"] == "kernel",
        bytes=arguments.get("bytes"),
    )


def own_time(ranges: Iterable[Range]) -> list[Work]:
    """The stretches in which each operator (or node, or compiled code) ran itself, as work of the thread's "stream".

    `ranges` are sorted by thread, start and falling end. An operator's first stretch counts as its call. A collective
    of Gloo is one stretch, whatever operators it runs.
    """
    found: list[Work] = []
    stack: list[tuple[Range, list[float]]] = []  # a range, and until when its time is accounted for

    def close(until: float, thread: Thread | None) -> None:
        while stack and (stack[-1][0].thread != thread or stack[-1][0].end <= until):
            each, accounted = stack.pop()
            _stretch(found, each, accounted, each.end)
            if stack:
                stack[-1][1][0] = max(stack[-1][1][0], each.end)

    for each in ranges:
        close(each.start, each.thread)
        if stack and stack[-1][0].name.startswith(GLOO):
            continue  # copies and sums inside a collective are part of it
        if stack:
            _stretch(found, stack[-1][0], stack[-1][1], each.start)
        stack.append((each, [each.start, 0]))
    close(float("inf"), None)
    return found


def _stretch(found: list[Work], owner: Range, accounted: list[float], until: float) -> None:
    name = _worker(owner)
    if name is not None and until > accounted[0]:
        where = f"{owner.thread[0]}/{owner.thread[1]}"
        launch = (owner.thread, accounted[0])
        found.append(Work(name, accounted[0], until - accounted[0], where, launch, is_continued=bool(accounted[1])))
        accounted[1] = 1
    accounted[0] = max(accounted[0], until)


def _worker(owner: Range) -> str | None:
    """The name that a range's own time goes by; None for ranges that only hold others.

    Gloo announces each collective on the thread that runs it, from when it begins there until all is received.
    """
    if owner.kind == "operator":
        return owner.name
    if owner.kind == "node":
        return ENGINE
    if owner.name.startswith(GLOO):
        return owner.name
    return COMPILED if owner.name.startswith("## Call CompiledFxGraph") else None
