"""Log of a run, on disk as it goes: one file per rank, a JSON object per line, the last of which may be cut short.

The parent begins it, and adds the signals that it receives. The script's process adds a line at once for whatever is
known, as it may end at any moment; the parent reads what is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.observe.steps import Step

PATIENCE_S = 10.0  # how long the first rank waits for what the others write last; those of other hosts may never come
ENDED = "the observation ended"
"""Begins the note on a failure of ours, after which nothing is observed."""
_ENCODED = json.JSONEncoder(default=str).encode  # `json.dumps` with an argument would make an encoder each time


class LogWriter:
    """Writes the log of one rank. After a fork the child writes nothing.

    Args:
        place: path of a new log, or the descriptor of one that the parent has begun.
        rank: which rank it is of.
    """

    def __init__(self, place: Path | int, rank: int = 0) -> None:
        self.rank = rank
        if isinstance(place, Path):
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_file() or place.is_symlink():
                place.unlink()  # of an earlier launch, or a link
            place = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._descriptor, self._file = place, _identity(place)
        self._process = os.getpid()

    def write(self, what: str, fields: Mapping[str, Any]) -> None:
        """Add a line of these fields, with its kind (facts, step, line …) under "is"."""
        if os.getpid() == self._process:
            self.write_from_child(what, fields)

    def close(self) -> None:
        """Write no more."""
        self._process = -1
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def write_from_child(self, what: str, fields: Mapping[str, Any]) -> None:
        """Write a line from a process that was forked, which has the file open too."""
        data = memoryview(f"{_ENCODED({'is': what, **fields})}\n".encode("utf-8", "backslashreplace"))
        with contextlib.suppress(OSError):  # a full disk is no reason to end a training run
            if _identity(self._descriptor) != self._file:
                return  # the script has closed all descriptors, and opened a file of its own
            while data:
                data = data[os.write(self._descriptor, data) :]


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


@dataclass
class RankLog:
    """Contents of one rank's log."""

    header: dict[str, Any] = field(default_factory=dict)
    """rank, world_size, launch (which start of all ranks), script."""
    facts: dict[str, Any] = field(default_factory=dict)  # what became known later, such as the environment
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # number → line of code that waits
    steps: list[Step] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)  # rows as in a file of results
    recompilations: list[dict[str, Any]] = field(default_factory=list)
    syncs: Counter[int] = field(default_factory=Counter)  # line → calls that waited, in the one step that was recorded
    notes: list[str] = field(default_factory=list)
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)  # process of a loader's worker → its lines
    elsewhere: list[dict[str, Any]] = field(default_factory=list)  # processes that were started, or that trained
    ended: dict[str, Any] | None = None  # how the script ended, None where it could not say
    code: int | None = None  # exit code of the script's process, −n for signal n, once the parent has seen its end
    has_begun: bool = True  # whether the script's process has found the observer
    signals: list[dict[str, Any]] = field(default_factory=list)  # number and after_s of those that the parent received


def read_log(path: Path) -> RankLog:
    """The log of one rank; empty where there is no file. A line that was cut short is left out."""
    found = RankLog()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            what = entry.pop("is")
        except (ValueError, KeyError, AttributeError):
            continue
        if what == "header":
            found.header = entry
        elif what == "task":
            found.has_begun = False
        elif what == "begun":
            found.has_begun = True
        elif what == "facts":
            found.facts |= entry
        elif what == "line":
            found.lines[entry.pop("number")] = entry
        elif what == "step":
            found.steps.append(Step.read(entry, found.steps[-1] if found.steps else None))
        elif what == "row":
            found.rows.append(entry["row"])
        elif what == "recompilation":
            found.recompilations.append(entry)
        elif what == "sync":
            found.syncs[entry["number"]] += 1
        elif what == "worker":
            found.workers[entry["pid"]] = entry  # all of its lines so far
        elif what == "note":
            found.notes.append(entry["text"])
        elif what == "elsewhere":
            found.elsewhere.append(entry)
        elif what == "signal":
            found.signals.append(entry)
        elif what == "exit":
            found.code = entry["code"]
        elif what == "end" and found.ended is None:
            found.ended = entry
    return found


def read_logs(folder: Path, launch: str, world_size: int, patience_s: float = PATIENCE_S) -> list[RankLog]:
    """The logs in a folder that are of this launch, in the order of ranks, once they have ended or time is up; an empty
    one where there is none."""
    deadline = time.monotonic() + patience_s
    while True:
        logs = [read_log(log_path(folder, number)) for number in range(world_size)]
        ours = [each for each in logs if each.header.get("launch") == launch]
        is_complete = len(ours) == world_size and all((each.ended, each.code) != (None, None) for each in ours)
        if world_size == 1 or is_complete or time.monotonic() > deadline:
            return ours or [RankLog()]
        time.sleep(0.1)


def log_path(folder: Path, rank: int) -> Path:
    """Path of a rank's log."""
    return folder / f"rank-{rank}.jsonl"
