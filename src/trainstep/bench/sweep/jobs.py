"""A sweep's cases run as jobs on Slurm, in arrays that submitit submits.

A case has ended when its rows are there, or when Slurm says that its job will not run again. A job that Slurm
ends writes no row: the sweep does, which sees how it ended; and a job that was put back into the queue runs anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainstep.base.errors import UsageError
from trainstep.bench.sweep import slurm
from trainstep.bench.sweep.cases import Case
from trainstep.bench.sweep.run import run_here
from trainstep.rows import SweepRow
from trainstep.rows.records import Status, make_row

if TYPE_CHECKING:
    import submitit

SETTLE_S = 30.0  # how long a file written on a node may take to show here, on a network file system
POLL_S = 0.5  # between two looks at the cases' files
ASK_S, ASK_MOST_S = 2.0, 30.0  # between two questions to Slurm: the longer nothing has ended, the more
OUT_OF_MEMORY = re.compile(r"exceeded (job |step )?memory limit|oom[-_ ]?kill", re.IGNORECASE)
"""Text that Slurm writes into a job's error output where it, or the kernel, ended a process of it for its memory."""
_OF_LAUNCHERS = re.compile(r"srun: |slurmstepd|submitit ")
_SIGKILL = "killed by SIGKILL"
_NO_SIGNAL = "B:CONT@1"
"""submitit has Slurm signal its jobs 90 s before their time is up, which would end a case then. This disturbs none."""


@dataclass(frozen=True)
class Resources:
    """Resources that each case's job asks of the cluster."""

    partition: str | None = None
    account: str | None = None
    minutes: int = 60
    gpus: int = 0
    cpus: int = 8
    memory_gib: float | None = None  # of the node; None: what Slurm gives by default


def slurm_jobs(
    cases: Sequence[Case],
    folder: Path,
    asked: Resources,
    *,
    jobs: int | None = None,
    timeout_s: float | None = None,
    tell: Callable[[str], None] = print,
) -> Generator[Case, None, None]:
    """Submit the cases as arrays, and yield each as its job ends. Left early, it cancels what waits and runs.

    Killed, it cannot: then a process beside it (`slurm.py`) cancels them, and where that was killed too, the next sweep
    into the folder does, before it submits anything.

    Args:
        cases: their folders must be on a file system that the nodes share.
        folder: for submitit's own files.
        jobs: jobs at once; None leaves it to Slurm.
        timeout_s: seconds after which a case is ended.
        tell: takes a line that says for what jobs wait, where it is not for others to end.

    Raises:
        UsageError: Slurm's commands are not there, it refuses the jobs, or it cannot cancel those of an earlier sweep.
    """
    require_slurm()
    submitted = folder / slurm.SUBMITTED
    slurm.cancel(submitted)
    if submitted.exists():
        raise UsageError(
            f"an earlier sweep's jobs may be running, by {submitted}, and Slurm does not answer; try again later"
        )
    name = slurm.new_name(submitted)
    guard = subprocess.Popen(
        [sys.executable, "-I", slurm.__file__, str(submitted)], stdin=subprocess.PIPE, start_new_session=True
    )
    executor = _executor(name, folder, asked)
    waiting, running = list(cases), dict[str, tuple[Case, "submitit.Job[None]"]]()
    largest, is_full, told = slurm.largest_array(), False, set[str]()
    changed = ask_at = time.monotonic()
    try:
        while waiting or running:
            if waiting and not is_full and (jobs is None or not running):  # jobs is a limit within one array
                batch = [_made_ready(case) for case in waiting[:largest]]
                # A case has its rows before its job has ended, and until then the job counts for Slurm's limits.
                is_needed = not running and len(batch) == 1 and not slurm.some_left(name)
                started = _submit(executor, batch, timeout_s, jobs, is_needed=is_needed)
                if started:
                    waiting = waiting[len(batch) :]
                    running |= {job.job_id: (case, job) for case, job in zip(batch, started, strict=True)}
                    changed = ask_at = time.monotonic()
                elif len(batch) > 1:
                    largest = len(batch) // 2
                else:
                    is_full = True  # one may submit no more, until some have ended
                continue
            ended: dict[str, slurm.State | None] = dict.fromkeys(
                job_id for job_id, (case, _) in running.items() if _is_settled(case)
            )
            found = None
            if (now := time.monotonic()) >= ask_at and (found := slurm.states(name)) is not None:
                ended |= _ended(running.keys() - ended, found)
                for line in _held(found, told):
                    tell(line)
            for job_id, state in ended.items():
                case, job = running.pop(job_id)
                if state is not None:
                    _settle(case, job, state, asked.minutes)
                yield case
            if ended:
                changed = time.monotonic()
            if ended or not running:
                is_full = False
            if now >= ask_at or ended:
                ask_at = time.monotonic() + min(ASK_MOST_S, max(ASK_S, (now - changed) / 4))
            if not ended:
                time.sleep(POLL_S)
    finally:
        if running:
            slurm.cancel(submitted)
        else:
            submitted.unlink(missing_ok=True)
        for case, _ in running.values():
            if case.finished() is None:
                case.clear()
        assert guard.stdin is not None, "it is a pipe"
        guard.stdin.close()
        guard.wait()


def run_alone(case: Case, timeout_s: float | None) -> None:
    """Run one case: what a job does. A signal that asks the job to end also ends the case, which then has no row."""
    for each in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(each, _leave)
    list(run_here([case], timeout_s=timeout_s))


def _leave(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def require_slurm() -> None:
    """Raise `UsageError` where Slurm's commands are not there."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "Slurm is not on this machine (no sbatch on the PATH); run on a login node, or leave --executor out to "
            "run here"
        )


def _made_ready(case: Case) -> Case:
    case.folder.mkdir(parents=True, exist_ok=True)
    case.clear()
    return case


def _executor(name: str, folder: Path, asked: Resources) -> submitit.AutoExecutor:
    """Executor that submits jobs of that name."""
    import submitit

    executor = submitit.AutoExecutor(folder=folder / "%j", cluster="slurm")
    executor.update_parameters(name=name, timeout_min=asked.minutes, nodes=1, tasks_per_node=1)
    wanted = {
        "partition": asked.partition,
        "account": asked.account,
        "gpus_per_node": asked.gpus or None,
        "cpus_per_task": asked.cpus or None,
        "srun_args": [f"--cpus-per-task={asked.cpus}"] if asked.cpus else None,  # which srun does not take over from
        # the job since Slurm 22.05, and so would bind the case to one core
        "mem": None if asked.memory_gib is None else f"{round(asked.memory_gib * 1024)}M",
        "additional_parameters": {"signal": _NO_SIGNAL},
    }
    executor.update_parameters(**{f"slurm_{key}": value for key, value in wanted.items() if value is not None})
    return executor


def _submit(
    executor: submitit.AutoExecutor,
    batch: Sequence[Case],
    timeout_s: float | None,
    jobs: int | None,
    *,
    is_needed: bool,
) -> Sequence[submitit.Job[None]] | None:
    """Submit the cases as one array; None where Slurm refuses, unless that `is_needed`: then a `UsageError`."""
    from submitit.core.utils import FailedJobError

    executor.update_parameters(slurm_array_parallelism=jobs or len(batch))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the error has it too
            return executor.map_array(run_alone, batch, [timeout_s] * len(batch))
    except FailedJobError as error:
        if not is_needed:
            return None
        said = " ".join(str(error).replace("sbatch: error: ", "").split()).rstrip(".")
        raise UsageError(
            f"Slurm refuses the jobs: {said}; check --partition, --account, --time, --gpus, --cpus and --memory"
        ) from error


def _is_settled(case: Case) -> bool:
    """True if the case has rows, of which none may be for want of memory, as only its job's state tells."""
    rows = case.finished()
    return rows is not None and not any(row.reason.startswith(_SIGKILL) for row in rows)


def _ended(jobs: set[str], found: Mapping[str, slurm.State]) -> dict[str, slurm.State]:
    """Jobs that have ended → how."""
    states = {job: found.get(job) or slurm.remembered(job) for job in jobs}
    return {job: state for job, state in states.items() if state.is_final}


def _held(found: Mapping[str, slurm.State], told: set[str]) -> list[str]:
    """Lines for reasons to wait that were not told before."""
    new = {reason: count for reason, count in slurm.waits_for(found.values()).items() if reason not in told}
    told.update(new)
    return [f"Slurm has jobs wait ({count} now) for: {reason}" for reason, count in new.items()]


def _settle(case: Case, job: submitit.Job[None], state: slurm.State, minutes: int) -> None:
    """See to it that a case whose job has ended has rows: a job that was ended itself left none."""
    deadline = time.monotonic() + SETTLE_S
    while (rows := case.finished()) is None and state.name in ("COMPLETED", slurm.GONE) and time.monotonic() < deadline:
        os.listdir(case.folder)  # makes a network file system look again
        time.sleep(0.2)
    words = [line for line in (job.stderr() or "").splitlines() if line.strip()]
    starved = [line for line in words if OUT_OF_MEMORY.search(line)]
    is_starved = state.name == "OUT_OF_MEMORY" or bool(starved)
    if rows is not None:
        if is_starved:
            case.keep([_starved(row, starved) if row.reason.startswith(_SIGKILL) else row for row in rows])
        return
    status: Status = "out of memory" if is_starved else "failed"
    ending = f"job {job.job_id} ended as {state.name}"
    if state.name == "TIMEOUT":
        ending += f": not done in the {minutes} minutes that --time gives"
    elif said := starved[:1] or [line for line in words if not _OF_LAUNCHERS.match(line)][-1:]:
        ending += f": {said[0].strip()}"
    elif state.reason not in ("", "None"):
        ending += f": {state.reason}"
    case.keep([make_row(SweepRow, case.columns(), {"folder": case.folder.name}, status=status, reason=ending[:240])])


def _starved(row: SweepRow, words: Sequence[str]) -> SweepRow:
    """A row of a case that was killed, by Slurm or by the kernel: `words`, if there are any, are Slurm's about it."""
    said = f": {words[0].strip()}" if words else ""
    return replace(row, status="out of memory", reason=f"killed, as the job had no more memory{said}"[:240])
