"""An output folder that one process at a time works in."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from trainstep.errors import UsageError

LOCK = ".lock"
"""A file of its own: NFS locks no folder, and nothing for one who only reads it."""


@contextlib.contextmanager
def held_folder(folder: Path, other: str) -> Iterator[None]:
    """Make the folder, and hold it against every other process that would. It is let go however this one ends.

    Args:
        folder: where to work.
        other: what somebody else who holds it is doing: `another sweep is running`.

    Raises:
        UsageError: another process holds it, or it cannot be written or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{other} in {folder}; wait for it, or choose another --out") from error
        except OSError as error:
            raise UsageError(
                f"cannot lock {folder / LOCK}: {error.strerror}; choose an --out on a file system with locks (flock)"
            ) from error
        yield
