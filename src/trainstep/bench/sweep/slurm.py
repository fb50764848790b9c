"""Cancels the Slurm jobs of a sweep that was killed, which could not do so itself.

It is run as a file beside the sweep, `python -I slurm.py SUBMITTED`, and needs the standard library alone. Standard
input is a pipe from the sweep, which closes when the sweep ends, even by SIGKILL. What the file SUBMITTED lists then is
cancelled; a sweep that ended in order has removed it.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SUBMITTED = "submitted.txt"  # in the folder of submitit's files: a job on each line
WAIT_S = 60.0  # that Slurm's commands may take


def note(submitted: Path, jobs: Iterable[str]) -> None:
    """Remember jobs that were submitted; those of an array are cancelled together."""
    with submitted.open("a", encoding="utf-8") as file:
        file.writelines(f"{job}\n" for job in dict.fromkeys(job.partition("_")[0] for job in jobs))


def cancel(submitted: Path) -> None:
    """Cancel the jobs that the file lists, and remove it; nothing where there is none."""
    try:
        jobs = submitted.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(["scancel", *jobs], stdin=subprocess.DEVNULL, timeout=WAIT_S, check=False)
        if ended.returncode == 0:
            submitted.unlink(missing_ok=True)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of the terminal that closes
    sys.stdin.buffer.read()  # until the sweep ends
    cancel(Path(sys.argv[1]))
