"""Slurm's word on a sweep's jobs, and their end: all of them bear one name, by which they are found.

The name is on disk before the first job is submitted, so that none is forgotten, whenever the sweep is killed. Then
this file is what cancels them: it is run beside the sweep, `python -I slurm.py SUBMITTED`, and needs the standard
library alone. Standard input is a pipe from the sweep, which closes when the sweep ends, even by SIGKILL.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SUBMITTED = "submitted.txt"  # in the folder of submitit's files: the name of jobs that may be there
WAIT_S = 60.0  # that one of Slurm's commands may take, and cancelled jobs to end: its KillWait is 30 s by default
POLL_S = 0.5
LATE_S = 3.0  # after which a submission that was under way when the sweep was killed has come through
FINAL = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
"""States that a job does not leave; after all others it may still run, also once more."""
GONE = "GONE"
"""Name for a job that Slurm has forgotten, where no accounting remembers it."""


@dataclass(frozen=True)
class State:
    """A job's state in Slurm's word, and its reason for it."""

    name: str
    reason: str = ""

    @property
    def is_final(self) -> bool:
        return self.name in FINAL or self.name == GONE


def new_name(submitted: Path) -> str:
    """A name for jobs that are about to be submitted, kept in the file until they have ended."""
    name = f"trainstep-sweep-{uuid.uuid4().hex[:8]}"
    submitted.parent.mkdir(parents=True, exist_ok=True)
    submitted.write_text(f"{name}\n", encoding="utf-8")
    return name


def states(name: str) -> dict[str, State] | None:
    """Job → its state, of all jobs with that name; None where Slurm does not answer now.

    Slurm's controller forgets a job some minutes after its end (MinJobAge), so one may be missing.
    """
    words = ["--noheader", "--array", "--states=all", "--format=%i|%T|%r"]
    told = _run("squeue", f"--user={os.getuid()}", f"--name={name}", *words)
    if told is None:
        return None
    lines = [line.split("|", 2) for line in told.splitlines() if line.count("|") >= 2]
    return {job.strip(): State(state.strip(), reason.strip()) for job, state, reason in lines}


def remembered(job: str) -> State:
    """The state of a job that the controller has forgotten, by Slurm's accounting if there is any."""
    told = _run("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", f"--jobs={job}")
    state = (told or "").split()  # as CANCELLED by 0
    return State(state[0]) if state else State(GONE, "Slurm has forgotten it, and keeps no accounting")


def largest_array() -> int:
    """Number of jobs that Slurm takes as one array; 1 where it takes none."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _run("scontrol", "show", "config") or "", re.MULTILINE)
    return max(1, int(found[1])) if found else 1001  # Slurm's default


def cancel(submitted: Path) -> None:
    """Cancel the jobs whose name the file has, wait until they have ended, and remove it; nothing where there is none.

    Where Slurm does not answer, the file stays for the next sweep.
    """
    try:
        name = submitted.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return
    if name and _run("scancel", f"--user={os.getuid()}", f"--name={name}") is None:
        return
    deadline = time.monotonic() + WAIT_S
    while name and some_left(name) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    submitted.unlink(missing_ok=True)


def some_left(name: str) -> bool:
    """True if jobs with that name have not ended, or Slurm does not answer."""
    found = states(name)
    return found is None or any(not state.is_final for state in found.values())


def _run(*words: str) -> str | None:
    """Output of a command; None where it fails, as when the controller is away."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def waits_for(found: Iterable[State]) -> dict[str, int]:
    """Reason → how many jobs wait for it, of reasons that may never pass by themselves."""
    held = [state.reason for state in found if state.name == "PENDING" and state.reason not in PASSING]
    return {reason: held.count(reason) for reason in dict.fromkeys(held)}


PASSING = frozenset(["None", "Resources", "Priority", "JobArrayTaskLimit", "BeginTime", "Cleaning", "Prolog"])
"""Reasons for which a job waits that will run when others have ended."""


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of the terminal that closes
    sys.stdin.buffer.read()  # until the sweep ends
    if Path(sys.argv[1]).exists():  # it did not end in order
        time.sleep(LATE_S)
        cancel(Path(sys.argv[1]))
