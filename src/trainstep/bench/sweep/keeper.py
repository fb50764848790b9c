"""The process around one case of a sweep: whatever happens to the sweep, the case ends, with all that it started.

It is run as a file, `python -I keeper.py COMMAND…`, needs the standard library alone, and lives exactly as long as the
case, which has its outputs. Standard input is a pipe from the sweep, which closes when the sweep ends, even by SIGKILL:
then everything here is ended at once. SIGTERM asks the case to end first. Processes that leave the case's session stay
below this one (it is a "child subreaper", Linux 3.4), so they are found. The exit code is the case's; a signal that
killed the case kills this process too, so that it reads the same.

Files that this process has open, as the lock of the sweep's folder, stay open as long as it lives: a sweep that is
started again waits until the cases of a killed one have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 10.0  # between asking the case to end and ending it; torchrun uses it to end its workers
POLL_S = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> int:
    """Run the case; returns its exit code, below 0 for a signal."""
    libc = ctypes.CDLL(None)
    prctl = getattr(libc, "prctl", lambda *_: None)  # elsewhere than on Linux the session alone is ended
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    case = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a group that can be ended as one, and that Ctrl-C does not reach
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # where this process is killed itself
    )
    deadline = None
    while case.poll() is None:
        if _is_closed(0) or (deadline is not None and time.monotonic() > deadline):
            break
        if asked.is_set() and deadline is None:
            deadline = time.monotonic() + GRACE_S
            with contextlib.suppress(ProcessLookupError):
                os.killpg(case.pid, signal.SIGTERM)
        time.sleep(POLL_S)
    _end_all()
    return case.wait()


def _is_closed(pipe: int) -> bool:
    """True if the other end is closed; nothing is ever written to it."""
    ready, _, _ = select.select([pipe], [], [], 0)
    return bool(ready) and not os.read(pipe, 1)


def _end_all() -> None:
    """End every process below this one, and those that they start meanwhile."""
    for _ in range(1000):
        below = _descendants(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S / 10)


def _descendants(parent: int) -> list[int]:
    """Living processes below `parent`."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents.setdefault(int(above), []).append(int(entry.name))
    found, waiting = [], [parent]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    if ended < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the case has left its own
        signal.signal(-ended, signal.SIG_DFL) if -ended not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -ended)
    sys.exit(ended)
