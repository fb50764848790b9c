"""Starts a script's process, hands signals on to it, and waits until it ends, however it does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.base.errors import UsageError
from trainstep.observe.log import log_path

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun", "horovodrun", "lightning")
GRACE_S = 10.0
"""From SIGTERM to SIGKILL for a process whose time is up."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
EXPECTED = "expected a script: trainstep run [options] python train.py …, train.py …, or -m module …"


@dataclass(frozen=True)
class Command:
    """A command to run."""

    target: str  # the script's path, or a module's name
    is_module: bool
    arguments: tuple[str, ...]
    interpreter: str
    options: tuple[str, ...] = ()  # the interpreter's own

    @property
    def name(self) -> str:
        """Name of the script in reports."""
        return self.target if self.is_module else Path(self.target).name


def command_of(words: Sequence[str]) -> Command:
    """The script that words name, as after `trainstep run` and its options.

    Raises:
        UsageError: no script, one that is not there, or a launcher, which goes in front of `trainstep run`.
    """
    if not words:
        raise UsageError(f"nothing to run; {EXPECTED}")
    first, rest = words[0], list(words[1:])
    name = Path(first).name
    if name in LAUNCHERS:
        raise UsageError(
            f"{name} starts processes, each of which is measured by itself: put it in front, as in "
            "torchrun --nproc-per-node=8 -m trainstep run train.py …"
        )
    interpreter, options = sys.executable, []
    if name.startswith("python") and not name.endswith(".py"):
        # Without a path it is the one that has trainstep, as in an environment that is not activated.
        found = sys.executable if first in ("python", "python3") else shutil.which(first)
        if found is None:
            raise UsageError(f"there is no {first}; {EXPECTED}")
        interpreter = found
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            options.append(rest.pop(0))
            if options[-1] in ("-X", "-W") and rest:
                options.append(rest.pop(0))
            elif options[-1] in ("-c", "-"):
                raise UsageError(f"{options[-1]} names no script; {EXPECTED}")
        if not rest:
            raise UsageError(f"{first} is given no script; {EXPECTED}")
        first, rest = rest[0], rest[1:]
    if first == "-m":
        if not rest:
            raise UsageError(f"-m is given no module; {EXPECTED}")
        return Command(rest[0], True, tuple(rest[1:]), interpreter, tuple(options))
    if not Path(first).exists():
        raise UsageError(f"there is no script {first}; {EXPECTED}")
    if Path(first).is_dir() and not (Path(first) / "__main__.py").exists():
        raise UsageError(f"{first} is a folder without a __main__.py; {EXPECTED}")
    return Command(first, False, tuple(rest), interpreter, tuple(options))


@dataclass(frozen=True)
class Rank:
    """This process among those that torchrun started; alone without it."""

    rank: int
    world_size: int
    launch: str  # the same for all ranks of one start, and for no other

    @staticmethod
    def of(environment: Mapping[str, str]) -> Rank:
        """Take the rank that torchrun tells."""
        number, count = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        launch = ":".join(environment.get(name, "") for name in names)
        return Rank(number, count, launch if "RANK" in environment else str(os.getpid()))


def run_script(
    command: Command,
    rank: Rank,
    folder: Path,
    plan: Mapping[str, Any],
    further: Mapping[str, Any] = {},
    *,
    limit_s: float = math.inf,
    is_over: Callable[[], bool] = lambda: False,
    **options: Any,
) -> int:
    """Run it until it ends, its input and outputs being those of this process; its exit code, −n for signal n.

    Args:
        further: what else its process is to do.
        limit_s: how long it may take.
        is_over: asked twice a second: whether it is to be ended.
        options: of its process, as `subprocess.Popen` has them.

    Raises:
        UsageError: the folder cannot be written, or the interpreter has no trainstep.
        TimeoutError: it took longer than `limit_s`, or `is_over` said so, and it was ended.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log_path(folder, rank.rank).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error
    task = {
        "target": command.target,
        "is_module": command.is_module,
        "arguments": command.arguments,
        "parent": os.getpid(),
        "folder": str(folder.resolve()),
        "rank": rank.rank,
        "header": {
            "rank": rank.rank,
            "world_size": rank.world_size,
            "launch": rank.launch,
            "script": command.name,
        },
        "plan": {**plan, "folder": str(folder.resolve())},
        **further,
    }
    words = [command.interpreter, *command.options, str(Path(__file__).with_name("script.py")), json.dumps(task)]
    sys.stdout.flush()
    sys.stderr.flush()
    return _wait(subprocess.Popen(words, **options), limit_s, is_over)


def _wait(process: subprocess.Popen[bytes], limit_s: float, is_asked_to_end: Callable[[], bool]) -> int:
    """Wait for its end. Signals sent to this process go on to it; Ctrl-C in a terminal reaches both anyway."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDED_ON, signal.SIGCHLD})
    start, children, over_at, is_asked = time.monotonic(), set[int](), math.inf, False
    try:
        while process.poll() is None:
            now = time.monotonic()
            if over_at < now or now - start > limit_s or is_asked_to_end():
                children |= _descendants(process.pid)
                if over_at == math.inf:
                    process.terminate()
                elif now > over_at + GRACE_S:
                    process.kill()
                over_at = min(over_at, now)
            arrived = signal.sigtimedwait({*HANDED_ON, signal.SIGCHLD}, 0.5)
            if arrived is None or arrived.si_signo == signal.SIGCHLD or arrived.si_pid == 0:
                continue
            is_asked = True
            process.send_signal(arrived.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for child in children:  # a loader's workers would run beside whatever comes next
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    if over_at < math.inf and not is_asked:
        is_late = over_at - start > limit_s
        raise TimeoutError(f"it was ended after {limit_s:.0f} s" if is_late else "it was ended with the others")
    return process.returncode


def _descendants(pid: int) -> set[int]:
    """The processes that one has started, and those that these have, where the system lists them in /proc."""
    found = set[int]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child, *_descendants(child)}
    return found
