"""Log of a run, on disk as it goes: one file per rank, a JSON object per line, the last of which may be cut short.

The script's process writes it and may end at any moment; whoever started it reads what is there. Lines are gathered for
a tenth of a second, which costs a step less than a write of its own.
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

EVERY_S = 0.1  # how long lines are gathered
PATIENCE_S = 10.0  # how long the first rank waits for what the others write last; those of other hosts may never come
_ENCODED = json.JSONEncoder(default=str).encode  # `json.dumps` with an argument would make an encoder each time


class LogWriter:
    """Writes the log of one rank. After a fork the child writes nothing."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.rank = rank
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._process = os.getpid()
        self._gathered: list[str] = []
        self._written = 0.0

    def write(self, what: str, fields: Mapping[str, Any]) -> None:
        """Add a line of these fields, with its kind (facts, step, line …) under "is"."""
        self._gathered.append(_ENCODED({"is": what, **fields}))
        if time.monotonic() - self._written > EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        lines, self._gathered = self._gathered, []
        if not lines or os.getpid() != self._process:
            return
        data = memoryview("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return  # a full disk is no reason to end a training run
        self._written = time.monotonic()

    def close(self) -> None:
        """Write what was gathered, and no more."""
        self.flush()
        os.close(self._descriptor)
        self._process = -1

    def write_from_child(self, what: str, fields: Mapping[str, Any]) -> None:
        """Write a line from a process that was forked, which has the file open too."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, f"{json.dumps({'is': what, **fields})}\n".encode())


@dataclass
class RankLog:
    """Contents of one rank's log."""

    header: dict[str, Any] = field(default_factory=dict)
    """rank, world_size, launch (which start of all ranks), pid, script."""
    facts: dict[str, Any] = field(default_factory=dict)  # what became known later, such as the environment
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # number → line of code that waits
    steps: list[Step] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)  # rows as in a file of results
    recompilations: list[dict[str, Any]] = field(default_factory=list)
    syncs: Counter[int] = field(default_factory=Counter)  # line → calls that waited, in the one step that was recorded
    notes: list[str] = field(default_factory=list)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)  # processes that were started, or that trained
    ended: dict[str, Any] | None = None  # how the script ended, None where it could not say


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
        elif what == "note":
            found.notes.append(entry["text"])
        elif what == "elsewhere":
            found.elsewhere.append(entry)
        elif what == "end" and found.ended is None:
            found.ended = entry
    return found


def read_logs(folder: Path, launch: str, world_size: int, patience_s: float = PATIENCE_S) -> list[RankLog]:
    """The logs in a folder that are of this launch, in the order of ranks, once they have ended or time is up; the
    first rank's always."""
    deadline = time.monotonic() + patience_s
    while True:
        logs = [read_log(log_path(folder, number)) for number in range(world_size)]
        ours = [each for each in logs if each.header.get("launch") == launch]
        is_complete = len(ours) == world_size and all(each.ended is not None for each in ours)
        if world_size == 1 or is_complete or time.monotonic() > deadline:
            return ours or logs[:1]
        time.sleep(0.1)


def log_path(folder: Path, rank: int) -> Path:
    """Path of a rank's log."""
    return folder / f"rank-{rank}.jsonl"
