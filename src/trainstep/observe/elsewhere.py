"""Processes that a script starts: training there is not seen here, and the report says so."""

from __future__ import annotations

import multiprocessing.process
import subprocess
import sys
from typing import Any

from trainstep.observe.lines import owner_of
from trainstep.observe.log import LogWriter

MOST = 5  # processes that are named


def note_processes(log: LogWriter) -> None:
    """Log the first processes that are started, but for the workers of loaders."""
    count = 0

    def note(what: str) -> None:
        nonlocal count
        if _owner_of_call() == "torch":  # a compiler, or our own
            return
        count += 1
        if count <= MOST:
            log.write("elsewhere", {"what": what})

    popen, start = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start

    def __init__(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        words = args if isinstance(args, (str, bytes)) else " ".join(map(str, args))
        note(f"the command {str(words)[:120]!r}")
        popen(self, args, *rest, **options)

    def started(self: Any) -> None:
        target = getattr(self, "_target", None)
        name = getattr(target, "__name__", type(self).__name__)
        if name not in ("_worker_loop", "SyncManager"):
            note(f"a process of multiprocessing that runs {name}")
        start(self)

    subprocess.Popen.__init__ = __init__  # type: ignore[method-assign]
    multiprocessing.process.BaseProcess.start = started  # type: ignore[method-assign]


def _owner_of_call() -> str:
    """Whose code starts a process: that of the innermost frame that is not Python's own."""
    frame = sys._getframe(3)
    while frame.f_back is not None and owner_of(frame.f_code.co_filename) == "python":
        frame = frame.f_back
    return owner_of(frame.f_code.co_filename)
