"""Cases as jobs of submitit: an array on Slurm, or local processes, by which the same path is tried and tested."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainstep.bench.sweep.case import Place
from trainstep.bench.sweep.processes import run_alone
from trainstep.bench.sweep.rows import failed_row
from trainstep.errors import UsageError
from trainstep.records import Status

if TYPE_CHECKING:
    import submitit

SETTLE_S = 30.0
"""How long a file written on a node may take to show here, on a network file system."""


@dataclass(frozen=True)
class Resources:
    """What each case's job asks of the cluster."""

    partition: str | None = None
    account: str | None = None
    minutes: int = 60
    gpus: int = 0
    cpus: int = 8


def run_jobs(
    places: Sequence[Place],
    folder: Path,
    cluster: Literal["slurm", "local"],
    resources: Resources,
    *,
    jobs: int | None = None,
    timeout_s: float | None = None,
) -> Generator[Place, None, None]:
    """Submit the cases and yield each as its job ends. Left early, it cancels what waits and runs.

    Args:
        places: the cases; their folders must be on a file system that the nodes share.
        folder: for submitit's own files.
        cluster: slurm, or local for processes here.
        resources: what each job asks for.
        jobs: jobs at once; None leaves it to Slurm.
        timeout_s: seconds after which a case is ended.

    Raises:
        UsageError: Slurm's commands are not there.
    """
    import submitit

    if cluster == "slurm":
        require_slurm()
    executor = submitit.AutoExecutor(folder=folder / "%j", cluster=cluster)
    executor.update_parameters(
        name="trainstep-sweep",
        timeout_min=resources.minutes,
        gpus_per_node=resources.gpus,
        cpus_per_task=resources.cpus,
        tasks_per_node=1,
        nodes=1,
    )
    if cluster == "slurm":
        wanted = {"partition": resources.partition, "account": resources.account, "array_parallelism": jobs}
        executor.update_parameters(**{f"slurm_{name}": value for name, value in wanted.items() if value is not None})
    waiting, running = list(places), list[tuple[Place, "submitit.Job[None]"]]()
    try:
        while waiting or running:
            room = len(waiting) if cluster == "slurm" else min(len(waiting), (jobs or 1) - len(running))
            batch, waiting = waiting[:room], waiting[room:]
            for place in batch:
                place.folder.mkdir(parents=True, exist_ok=True)
                place.clear()
            if batch:  # as one array
                started = executor.map_array(run_alone, batch, [timeout_s] * len(batch))
                running += zip(batch, started, strict=True)
            ended = [each for each in running if each[1].done()]
            running = [each for each in running if each not in ended]
            for place, job in ended:
                _settle(place, job, SETTLE_S)
                yield place
            if not ended:
                time.sleep(0.1 if cluster == "local" else 2.0)
    finally:
        for _, job in running:
            job.cancel(check=False)
        for place, job in running:  # here we can wait; Slurm sees to its own
            if cluster == "local":
                with contextlib.suppress(Exception):
                    job.wait()
            place.clear()


def require_slurm() -> None:
    """Raise `UsageError` where Slurm's commands are not there."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "Slurm is not on this machine (no sbatch on the PATH); run on a login node, or leave --executor out to "
            "run here"
        )


def _settle(place: Place, job: submitit.Job[None], wait_s: float) -> None:
    """See to it that a case whose job has ended has rows: a job that died itself left none."""
    deadline = time.monotonic() + wait_s
    while place.finished() is None:
        is_well = job.state.upper().startswith("COMPLETED")
        if is_well and time.monotonic() < deadline:
            os.listdir(place.folder)  # makes a network file system look again
            time.sleep(0.2)
            continue
        words = (job.stderr() or "").strip().splitlines()
        status: Status = "out of memory" if job.state.upper().startswith("OUT_OF_ME") else "failed"
        reason = f"job {job.job_id} ended as {job.state}" + (f": {words[-1]}" if words else "")
        place.keep([failed_row(place.case, status, reason[:240], {"folder": place.folder.name})])
