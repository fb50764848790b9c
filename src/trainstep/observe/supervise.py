"""Starts a script's process, hands signals on to it, and waits until it ends, however it does."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import marshal
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainstep.base.files import aside, cannot_write
from trainstep.observe.command import Command
from trainstep.observe.log import log_path

GRACE_S = 10.0
"""From SIGTERM to SIGKILL for a process whose time is up."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FROM_KERNEL = 0x80
"""`si_code` of a signal from the terminal, which reaches the script's process by itself."""
START = str(Path(__file__).resolve().with_name("start"))
POLL_S, LOOK_S = 0.1, 1.0
"""Seconds between looks at what has arrived, and at the processes that the script has started."""
MOST_CHILDREN = 5
OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Words of processes that a script starts without asking for them."""


@dataclass(frozen=True)
class Rank:
    """This process among those that torchrun started; alone without it."""

    rank: int
    world_size: int
    launch: str  # the same for all ranks of one start, and for no other

    @property
    def shared_launch(self) -> str:
        """The launch, for whom several ranks share a folder; empty for one process."""
        return self.launch if self.world_size > 1 else ""

    @staticmethod
    def of(environment: Mapping[str, str]) -> Rank:
        """Take the rank that torchrun tells."""
        number, count = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
        told = [environment.get(name, "") for name in names]
        if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
            # torchrun's folder for this attempt on this host, which no other start has.
            told.append(str(Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent))
        return Rank(number, count, ":".join(told) if "RANK" in environment else f"{os.getpid()}-{secrets.token_hex(4)}")


def run_script(
    command: Command,
    rank: Rank,
    folder: Path,
    plan: Mapping[str, Any],
    further: Mapping[str, Any] = {},
    *,
    is_verbatim: bool = False,
    limit_s: float = math.inf,
    is_over: Callable[[], bool] = lambda: False,
    on_signal: Callable[[int], object] = lambda number: None,
    **options: Any,
) -> int:
    """Run it until it ends, its input and outputs being those of this process; its exit code, −n for signal n.

    The process is started as plain Python would be. Two environment variables bring the observer into it
    (`start/sitecustomize.py`), and are gone before the script begins.

    Args:
        further: what else its process is to do.
        is_verbatim: whether texts of exceptions and whole commands may stand in the log.
        limit_s: how long it may take.
        is_over: asked several times a second: whether it is to be ended.
        on_signal: called with each signal that this process receives meanwhile.
        options: of its process, as `subprocess.Popen` has them.

    Raises:
        UsageError: the folder cannot be written.
        TimeoutError: it took longer than `limit_s`, or `is_over` said so, and it was ended.
    """
    file = log_path(folder, rank.rank).absolute()
    environment = dict(options.pop("env", os.environ))
    task = {
        "log": str(file),
        "rank": rank.rank,
        "script": command.name,
        "verbatim": is_verbatim,
        "has_path": "PYTHONPATH" in environment,
        "plan": {**plan, "folder": str(file.parent)},
        **further,
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [START, environment.get("PYTHONPATH", "")]))
    environment["TRAINSTEP_TASK"] = str(file.with_suffix(".task"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # an earlier script may still write to its own
        log = os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644), "a+b", buffering=0)
        with aside(file.with_suffix(".task")) as draft:
            draft.write_bytes(marshal.dumps(task, 2))
    except OSError as error:
        raise cannot_write(folder, error) from error
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    try:
        with log:
            watched = _Watched(log, is_verbatim, on_signal)
            watched.write("header", {**asdict(rank), "script": command.name})
            watched.write("task", {})
            again = [command.interpreter, *command.words[1:]]
            process = subprocess.Popen(
                again if "cwd" in options else command.words,  # there, a path from here leads nowhere
                executable=command.interpreter,
                env=environment,
                close_fds=False,  # what a shell has opened for it, such as <(…), is the script's
                preexec_fn=functools.partial(_begin_as_plain, before, os.getpid()),
                **options,
            )
            try:
                return watched.wait(process, limit_s, is_over)
            finally:
                _keep(log, file)
    finally:
        file.with_suffix(".task").unlink(missing_ok=True)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep(log: BinaryIO, file: Path) -> None:
    """Write the log again where the script has deleted it with its folder."""
    with contextlib.suppress(OSError):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            log.seek(0)
            file.write_bytes(log.read())


def _begin_as_plain(mask: set[int], parent: int) -> None:
    """Before the script's process becomes Python: signals are as this process found them, and it ends with its parent.

    torchrun kills the parent alone.
    """
    for number in HANDED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed before
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_LIBC = ctypes.CDLL(None)


class _Watched:
    """The script's process while it runs: its end, the signals for it, and the processes that it starts."""

    def __init__(self, log: BinaryIO, is_verbatim: bool, on_signal: Callable[[int], object]) -> None:
        self._log, self._is_verbatim, self._on_signal = log, is_verbatim, on_signal
        self._start = time.monotonic()
        self._seen: set[int] = set()
        self._noted: list[str] = []

    def write(self, what: str, fields: Mapping[str, Any]) -> None:
        """Add a line to the log; the script's process adds others."""
        with contextlib.suppress(OSError):  # a full disk
            self._log.write(f"{json.dumps({'is': what, **fields})}\n".encode())

    def wait(self, process: subprocess.Popen[bytes], limit_s: float, is_asked_to_end: Callable[[], bool]) -> int:
        """Wait for its end; the exit code. Signals go on to it, but for those that a terminal sends to both."""
        over_at, looked, is_stopped = math.inf, 0.0, False
        children = set[int]()
        while process.poll() is None:
            now = time.monotonic() - self._start
            if over_at < now or now > limit_s or is_asked_to_end():
                children |= _descendants(process.pid)
                if over_at == math.inf:
                    process.terminate()
                elif now > over_at + GRACE_S:
                    process.kill()
                over_at = min(over_at, now)
            if now > looked + LOOK_S:
                looked = now
                self._note_children(process.pid)
            _wait_for_end(process.pid, POLL_S)
            is_stopped |= self._hand_on(process)
        is_stopped |= self._hand_on(process)
        self.write("exit", {"code": process.returncode})
        for child in children:  # a loader's workers would run beside whatever comes next
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if over_at < math.inf and not is_stopped:
            raise TimeoutError(
                f"it was ended after {limit_s:.0f} s" if over_at > limit_s else "it was ended with the others"
            )
        return process.returncode

    def _hand_on(self, process: subprocess.Popen[bytes]) -> bool:
        """Hand on the signals that have arrived; True if there were any.

        None is waited for: a wait that SIGSTOP and SIGCONT interrupt gives a record without a signal.
        """
        arrived = None
        while (found := signal.sigtimedwait(HANDED_ON, 0)) is not None:
            arrived = found.si_signo
            self.write("signal", {"number": arrived, "after_s": time.monotonic() - self._start})
            self._on_signal(arrived)
            is_its_own = found.si_pid in {process.pid, *_descendants(process.pid)}  # sent to the group, so it has it
            if found.si_code != FROM_KERNEL and not is_its_own:
                process.send_signal(arrived)
        return arrived is not None

    def _note_children(self, pid: int) -> None:
        """Log the first processes that it has started, but for its loaders' workers and torch's compilers."""
        for child in _descendants(pid) - self._seen if len(self._noted) < MOST_CHILDREN else ():
            self._seen.add(child)
            what = _told(child, pid, self._is_verbatim)
            if what and what not in self._noted:
                self._noted.append(what)
                self.write("elsewhere", {"what": what})


def _wait_for_end(pid: int, timeout_s: float) -> None:
    """Sleep until a process of ours ends, or for `timeout_s`."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # a system without it
        time.sleep(timeout_s / 10)
        return
    try:
        select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)


def _told(child: int, parent: int, is_verbatim: bool) -> str:
    """A process that a script has started, for people: its program alone, as arguments may hold secrets; empty where it
    is torch's or Python's own."""
    try:
        words, own = (Path(f"/proc/{each}/cmdline").read_text(errors="replace").split("\0") for each in (child, parent))
        name = Path(f"/proc/{child}/comm").read_text().strip()
    except OSError:
        return ""
    line = " ".join(words).strip()
    if not line or name == "pt_data_worker" or any(each in line for each in OF_PYTHON):
        return ""
    if words == own:
        return "a process that the script forked"
    if "multiprocessing.spawn" in line:
        return "a process of multiprocessing"
    return f"the command {line[:120] if is_verbatim else Path(words[0]).name!r}"


def _descendants(pid: int) -> set[int]:
    """The processes that one has started, and those that these have, where the system lists them in /proc."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child, *_descendants(child)}
    return found
