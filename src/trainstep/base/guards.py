"""Guards around a long run: nobody else works in its folder, and a signal that stops it loses nothing."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from trainstep.base.errors import UsageError

LOCK = ".lock"  # a file of its own: NFS locks no folder, and nothing for one who only reads it


class Occupied(UsageError):
    """Another process holds the folder."""


@contextlib.contextmanager
def held_folder(folder: Path, other: str, *, wait_s: float = 0.0, name: str = LOCK) -> Iterator[int]:
    """Make the folder, and hold it against every other process that would. It is let go however this one ends.

    Yields the lock's file descriptor: a process that is started with it holds the folder too.

    Args:
        folder: what is held.
        other: what another process that holds it is doing, for the message: `another sweep is running`.
        wait_s: seconds that another process has to let go.
        name: of the lock's file.

    Raises:
        UsageError: another process holds it, or it cannot be written or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / name).open("a")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error
    with lock:
        try:
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.05)
        except BlockingIOError as error:
            raise Occupied(f"{other} in {folder}; wait for it, or choose another --out") from error
        except OSError as error:
            raise UsageError(
                f"cannot lock {folder / name}: {error.strerror}; choose an --out on a file system with locks (flock)"
            ) from error
        yield lock.fileno()


class StopSignals:
    """Inside this context, the signals that arrive are noted in `received`; the handlers before are put back after it.

    In another thread than the main one, which alone can handle signals, nothing is changed.

    Args:
        caught: which signals.
        raises: whether they raise `KeyboardInterrupt` too. Otherwise only a second Ctrl-C does, for one who does not
            want to wait until the note is read. Where it is raised inside a destructor, Python drops it: so read
            `received` even then.
    """

    def __init__(self, *caught: signal.Signals, raises: bool) -> None:
        self.received: signal.Signals | None = None  # the last one
        self._caught, self._raises = caught, raises
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle) for each in self._caught}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and self.received is signal.SIGINT
        self.received = signal.Signals(number)
        if self._raises or is_second:
            raise KeyboardInterrupt
