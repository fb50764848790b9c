"""A sweep's cases run as processes of this machine, each started with a folder and GPUs of its own, and ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

from trainstep.base.errors import UsageError
from trainstep.bench.sweep import keeper
from trainstep.bench.sweep.cases import Case
from trainstep.bench.sweep.rows import rows_of

POLL_S = 0.05


class Child:
    """The running process of one case. Its output goes to stdout.txt and stderr.txt in the case's folder.

    Around it is a keeper (`keeper.py`), which has `lock` open, where there is one, until the case has ended.
    """

    def __init__(
        self,
        case: Case,
        *,
        gpus: Sequence[str] | None,
        threads: int | None,
        timeout_s: float | None,
        lock: int | None = None,
    ) -> None:
        self.case, self.gpus, self._timeout_s = case, gpus, timeout_s
        case.folder.mkdir(parents=True, exist_ok=True)
        case.clear()
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # so that a crash says where
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
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
    cases: Sequence[Case],
    *,
    jobs: int = 1,
    gpus: Sequence[str] = (),
    timeout_s: float | None = None,
    lock: int | None = None,
) -> Generator[Case, None, None]:
    """Run the cases, `jobs` at once, and yield each as it ends. Left early, it ends what still runs.

    Args:
        jobs: cases at once. With more than one they share the cores (as OMP_NUM_THREADS, where that is not set), and
            every case that may use a GPU sees only its own.
        gpus: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them.
        timeout_s: seconds after which a case is ended.
        lock: a file descriptor that is open until all cases have ended, even where this process is killed.

    Raises:
        UsageError: fewer GPUs than cases at once need.
    """
    free = list(gpus)
    threads = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None
    waiting = [(case, _gpus_needed(case) if jobs > 1 and gpus else None) for case in cases]
    most = max((needed or 0 for _, needed in waiting), default=0)
    if jobs * most > len(free):
        raise UsageError(
            f"{jobs} jobs of {most} GPUs each need {jobs * most}, and {len(free)} are visible; give fewer --jobs"
        )
    running: list[Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                case, needed = waiting.pop(0)
                own = None if needed is None else [free.pop(0) for _ in range(needed)]
                running.append(Child(case, gpus=own, threads=threads, timeout_s=timeout_s, lock=lock))
            ended = [child for child in running if child.poll()]
            running = [child for child in running if child not in ended]
            free += [gpu for child in ended for gpu in child.gpus or ()]
            yield from (child.case for child in ended)
            if not ended:
                time.sleep(POLL_S)
    finally:
        for child in running:
            child.end()


def _gpus_needed(case: Case) -> int:
    return 0 if case.settings.get("device") == "cpu" else case.processes or 1


def visible_gpus() -> list[str]:
    """The GPUs that a process started now would see; none without a driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [each.strip() for each in chosen.split(",") if each.strip()]
    import pynvml

    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
