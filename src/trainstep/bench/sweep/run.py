"""A sweep's cases run: as processes of this machine, or as jobs of submitit.

Here each case is started with a folder and GPUs of its own, watched, and ended. Jobs are an array on Slurm, or local
processes, by which the same path is tried and tested.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainstep.bench.sweep import keeper, slurm
from trainstep.bench.sweep.cases import Case
from trainstep.bench.sweep.rows import rows_of
from trainstep.errors import UsageError
from trainstep.kinds import SweepRow
from trainstep.records import Status, make_row

if TYPE_CHECKING:
    import submitit

POLL_S = 0.05
OUTPUT_CAP = 2**24  # bytes that are kept of each of a case's outputs, and the end of what is beyond
SETTLE_S = 30.0  # how long a file written on a node may take to show here, on a network file system


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
        outputs = [str(case.folder / name) for name in ("stdout.txt", "stderr.txt")]
        self._process = subprocess.Popen(
            [sys.executable, "-I", keeper.__file__, str(OUTPUT_CAP), *outputs, *command_of(case)],
            stdin=subprocess.PIPE,  # its end tells the keeper that this process has
            env=environment,
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,  # Ctrl-C here does not reach it
        )

    def poll(self) -> bool:
        """Whether the case has ended, by itself or because its time was up. If so, its rows are kept."""
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


@dataclass(frozen=True)
class Resources:
    """What each case's job asks of the cluster."""

    partition: str | None = None
    account: str | None = None
    minutes: int = 60
    gpus: int = 0
    cpus: int = 8


def run_jobs(
    cases: Sequence[Case],
    folder: Path,
    cluster: Literal["slurm", "local"],
    asked: Resources,
    *,
    jobs: int | None = None,
    timeout_s: float | None = None,
) -> Generator[Case, None, None]:
    """Submit the cases and yield each as its job ends. Left early, it cancels what waits and runs.

    Killed, it cannot: then a process beside it (`slurm.py`) cancels them, and where that was killed too, the next sweep
    into the folder does, before it submits anything.

    Args:
        cases: their folders must be on a file system that the nodes share.
        folder: for submitit's own files.
        cluster: slurm, or local for processes here.
        jobs: jobs at once; None leaves it to Slurm.
        timeout_s: seconds after which a case is ended.

    Raises:
        UsageError: Slurm's commands are not there.
    """
    import submitit

    if cluster == "slurm":
        require_slurm()
    executor = submitit.AutoExecutor(folder=folder / "%j", cluster=cluster)
    executor.update_parameters(name="trainstep-sweep", timeout_min=asked.minutes, nodes=1, tasks_per_node=1)
    executor.update_parameters(gpus_per_node=asked.gpus, cpus_per_task=asked.cpus)
    if cluster == "slurm":
        wanted = {"partition": asked.partition, "account": asked.account, "array_parallelism": jobs}
        executor.update_parameters(**{f"slurm_{name}": value for name, value in wanted.items() if value is not None})
    waiting, running = list(cases), list[tuple[Case, "submitit.Job[None]"]]()
    submitted = folder / slurm.SUBMITTED
    guard = _watched(submitted) if cluster == "slurm" else None
    try:
        while waiting or running:
            room = len(waiting) if cluster == "slurm" else min(len(waiting), (jobs or 1) - len(running))
            batch, waiting = waiting[:room], waiting[room:]
            for case in batch:
                case.folder.mkdir(parents=True, exist_ok=True)
                case.clear()
            if batch:  # as one array
                started = executor.map_array(run_alone, batch, [timeout_s] * len(batch))
                running += zip(batch, started, strict=True)
                if guard is not None:
                    slurm.note(submitted, [job.job_id for job in started])
            ended = [each for each in running if each[1].done()]
            running = [each for each in running if each not in ended]
            for case, job in ended:
                _settle(case, job, SETTLE_S)
                yield case
            if not ended:
                time.sleep(0.1 if cluster == "local" else 2.0)
    finally:
        for _, job in running:
            job.cancel(check=False)
        for case, job in running:  # here we can wait; Slurm sees to its own
            if cluster == "local":
                with contextlib.suppress(Exception):
                    job.wait()
            case.clear()
        if guard is not None and guard.stdin is not None:
            submitted.unlink(missing_ok=True)  # nothing is left to cancel
            guard.stdin.close()
            guard.wait()


def _watched(submitted: Path) -> subprocess.Popen[bytes]:
    """Cancel what an earlier sweep left, and start the process that does so for this one."""
    slurm.cancel(submitted)
    submitted.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-I", slurm.__file__, str(submitted)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)


def run_alone(case: Case, timeout_s: float | None) -> None:
    """Run one case: what a job of a cluster does."""
    list(run_here([case], timeout_s=timeout_s))


def require_slurm() -> None:
    """Raise `UsageError` where Slurm's commands are not there."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "Slurm is not on this machine (no sbatch on the PATH); run on a login node, or leave --executor out to "
            "run here"
        )


def _settle(case: Case, job: submitit.Job[None], wait_s: float) -> None:
    """See to it that a case whose job has ended has rows: a job that died itself left none."""
    deadline = time.monotonic() + wait_s
    while case.finished() is None:
        is_well = job.state.upper().startswith("COMPLETED")
        if is_well and time.monotonic() < deadline:
            os.listdir(case.folder)  # makes a network file system look again
            time.sleep(0.2)
            continue
        words = (job.stderr() or "").strip().splitlines()
        status: Status = "out of memory" if job.state.upper().startswith("OUT_OF_ME") else "failed"
        reason = f"job {job.job_id} ended as {job.state}" + (f": {words[-1]}" if words else "")
        values = {"folder": case.folder.name}
        case.keep([make_row(SweepRow, case.columns(), values, status=status, reason=reason[:240])])
