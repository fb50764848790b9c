"""Guards around a run: nobody else works in its folder, and a signal that stops it loses no row."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from trainstep.base.errors import UsageError
from trainstep.base.files import aside, cannot_write, remove

LOCK = ".lock"  # a file of its own: NFS locks no folder, and nothing for one who only reads it
LATEST = "latest"
"""Link to the newest of a command's folders, beside them."""
ALLOTTING_S = 30.0
"""Seconds that a launch waits while others of its command get their folders."""


class Occupied(UsageError):
    """Another process holds the folder."""


@contextlib.contextmanager
def held_folder(folder: Path, who: str, *, launch: str = "", wait_s: float = 0.2) -> Iterator[int]:
    """Make the folder, and hold it against every other launch that would. It is let go however this process ends.

    Yields the lock's file descriptor: a process that is started with it holds the folder too.

    Args:
        folder: what is held.
        who: what this process is, for the message to another one: `trainstep sweep`.
        launch: the same for processes that share the folder; by default for no other.
        wait_s: seconds that another launch has to let go.

    Raises:
        UsageError: another launch holds it, or it cannot be written or locked.
    """
    process, is_alone = os.getpid(), not launch
    launch, who = launch or secrets.token_hex(8), f"{who} (process {process} on {socket.gethostname()})"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        deadline = time.monotonic() + wait_s
        while holder := _holder(lock, launch, who):
            if time.monotonic() >= deadline:
                raise Occupied(f"{folder} is in use by {holder}; wait for it, or choose another folder with --out")
            time.sleep(0.05)
        for draft in folder.glob(".draft-*") if is_alone else ():  # of one that was killed
            remove(draft)
        yield lock
    finally:
        if os.getpid() == process:  # also of children that were forked meanwhile, and still run
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _holder(lock: int, launch: str, who: str) -> str:
    """Take the lock, shared with this launch's other processes; empty if it is taken, else who holds it."""
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{launch}\n{who}".encode(), 0)
        for _ in range(2):  # once more when it is shared: in between, another launch may have had it
            theirs, _, holder = os.pread(lock, 1000, 0).decode(errors="replace").partition("\n")
            if theirs != launch:
                return holder or "another launch"
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another launch"
    except OSError as error:
        raise UsageError(f"cannot lock {LOCK}: {error.strerror}; name an --out on a file system with locks") from error
    return ""


@contextlib.contextmanager
def launch_folder(out: Path, who: str, name: str | None, *, launch: str = "", rank: int = 0) -> Iterator[Path]:
    """Hold a folder for one launch alone, and yield it.

    Args:
        out: the folder itself; with a name, the one in which the launch gets a new folder.
        who: as `held_folder` has it.
        name: of what is launched, as in `out/03-name`; `out/latest` becomes a link to it. None: `out` itself is held.
        launch: the same for all ranks of a start, which share the folder, and for no other start.
        rank: which rank of them this is.

    Raises:
        UsageError: another launch holds it, it cannot be written or locked, or `out` is such a link.
    """
    if name is None:
        if out.name == LATEST and out.is_symlink():
            here = out.with_name(str(out.readlink()))
            raise UsageError(f"{out} is the link to {here}, the newest launch; name a folder, or leave out --out")
        is_new = not out.exists()
        with held_folder(out, who, launch=launch):
            try:
                yield out
            finally:
                if is_new and rank == 0 and not any(out.glob("[!.]*")):
                    remove(out)  # it ended before there was anything to keep
        return
    with contextlib.ExitStack() as stack:
        with held_folder(out, who, wait_s=ALLOTTING_S):
            folder = _shared(out, launch, rank) if launch else None
            if folder is None:
                known = _launches(out)
                words = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60]
                number = int(known[-1].name.partition("-")[0]) + 1 if known else 1
                folder = out / "-".join(filter(None, [f"{number:02d}", words]))
                try:
                    folder.mkdir()
                except OSError as error:
                    raise cannot_write(folder, error) from error
            stack.enter_context(held_folder(folder, who, launch=launch))
            if launch:
                (folder / f".rank-{rank}").touch()
            _point_to_newest(out)
        try:
            yield folder
        finally:
            if rank == 0 and not any(folder.glob("[!.]*")):
                remove(folder)
                _point_to_newest(out)


def _launches(out: Path) -> list[Path]:
    """Folders of launches, the oldest first."""
    found = [(int(named[1]), each) for each in out.glob("[0-9]*") if (named := re.match(r"(\d+)(-|$)", each.name))]
    return [each for _, each in sorted(found)]


def _shared(out: Path, launch: str, rank: int) -> Path | None:
    """The newest folder of this start, which another rank has made; None where this rank is the first, or has been."""
    for folder in reversed(_launches(out)):
        with contextlib.suppress(OSError):
            if (folder / LOCK).read_text(errors="replace").partition("\n")[0] == launch:
                return None if (folder / f".rank-{rank}").exists() else folder
    return None


def _point_to_newest(out: Path) -> None:
    known = _launches(out)
    if not known:
        (out / LATEST).unlink(missing_ok=True)
        return
    with aside(out / LATEST) as link:
        link.symlink_to(known[-1].name)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's request to end, and a terminal that closes."""


def code_of(stop: signal.Signals | int | None) -> int:
    """The exit code of a command that one of `STOPS` ended: 130 after Ctrl-C, else 143, as shells have them."""
    return 130 if stop in (signal.SIGINT, None) else 143


class StopSignals:
    """Inside this context, `STOPS` that arrive are noted in `received`; the handlers before are put back after it.

    In another thread than the main one, which alone can handle signals, nothing is changed. A signal that is ignored,
    as SIGHUP under nohup, stays ignored.

    Args:
        raises: whether they raise `KeyboardInterrupt` too. Otherwise only a second Ctrl-C does, for one who does not
            want to wait until the note is read. Where it is raised inside a destructor, Python drops it: so read
            `received` even then.
    """

    def __init__(self, *, raises: bool) -> None:
        self.received: signal.Signals | None = None  # the last one
        self._raises = raises
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            caught = [each for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN]
            self._before = {each: signal.signal(each, self._handle) for each in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and self.received is signal.SIGINT
        self.received = signal.Signals(number)
        if self._raises or is_second:
            raise KeyboardInterrupt(self.received)
