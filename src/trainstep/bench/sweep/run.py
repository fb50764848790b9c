"""A sweep's cases run as processes of this machine, each started with a folder of its own, and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

from trainstep.bench.sweep import keeper
from trainstep.bench.sweep.cases import Case
from trainstep.bench.sweep.rows import rows_of

POLL_S = 0.05


class Child:
    """The running process of one case. Its output goes to stdout.txt and stderr.txt in the case's folder.

    Around it is a keeper (`keeper.py`), which has `lock` open, where there is one, until the case has ended.
    """

    def __init__(self, case: Case, *, timeout_s: float | None, lock: int | None = None) -> None:
        self.case, self._timeout_s = case, timeout_s
        case.folder.mkdir(parents=True, exist_ok=True)
        case.clear()
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # so that a crash says where
        self._start = time.monotonic()
        with (case.folder / "stdout.txt").open("wb") as stdout, (case.folder / "stderr.txt").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, *command_of(case)],
                stdin=subprocess.PIPE,  # its end tells the keeper that this process has
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=() if lock is None else (lock,),
                start_new_session=True,  # Ctrl-C here does not reach it
            )

    def poll(self) -> bool:
        """True if the case has ended, by itself or because its time was up. If so, its rows are kept."""
        code = self._process.poll()
        seconds = time.monotonic() - self._start
        if code is None and (self._timeout_s is None or seconds <= self._timeout_s):
            return False
        self.end()
        self.case.keep(rows_of(self.case, code, seconds, self._timeout_s))
        return True

    def end(self) -> None:
        """End the process and whatever it started."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * keeper.GRACE_S)
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


def command_of(case: Case) -> list[str]:
    """The command line of a case."""
    words = ["-m", "trainstep", *case.words, "--out", str(case.folder)]
    if case.processes is not None:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}", *words]
    return [sys.executable, *words]


def run_here(
    cases: Sequence[Case], *, timeout_s: float | None = None, lock: int | None = None
) -> Generator[Case, None, None]:
    """Run the cases, one after the other, as benchmarks disturb one another, and yield each when it has ended.

    Left early, it ends the one that runs.

    Args:
        timeout_s: seconds after which a case is ended.
        lock: a file descriptor that is open until all cases have ended, even where this process is killed.
    """
    for case in cases:
        child = Child(case, timeout_s=timeout_s, lock=lock)
        try:
            while not child.poll():
                time.sleep(POLL_S)
        except BaseException:
            child.end()
            raise
        yield case
