"""Cases as processes of this machine: each started with a folder and GPUs of its own, watched, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

from trainstep.bench.sweep.case import Place
from trainstep.bench.sweep.rows import rows_of
from trainstep.errors import UsageError

POLL_S = 0.05
GRACE_S = 10.0
"""Between asking a process to end and ending it; torchrun uses it to end its workers."""


class Child:
    """The running process of one case. Its output goes to stdout.txt and stderr.txt in the case's folder."""

    def __init__(
        self, place: Place, *, gpus: Sequence[str] | None, threads: int | None, timeout_s: float | None
    ) -> None:
        self.place, self.gpus, self._timeout_s = place, gpus, timeout_s
        place.folder.mkdir(parents=True, exist_ok=True)
        place.clear()
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # so that a crash says where
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        self._start = time.monotonic()
        with (place.folder / "stdout.txt").open("wb") as out, (place.folder / "stderr.txt").open("wb") as err:
            self._process = subprocess.Popen(
                command_of(place),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a group that can be ended as one, and that Ctrl-C here does not reach
            )

    def poll(self) -> bool:
        """Whether the case has ended, by itself or because its time was up. If so, its rows are kept."""
        code = self._process.poll()
        seconds = time.monotonic() - self._start
        is_late = code is None and self._timeout_s is not None and seconds > self._timeout_s
        if code is None and not is_late:
            return False
        self.end()  # also what a crash left running
        self.place.keep(rows_of(self.place.case, self.place.folder, code, seconds, self._timeout_s))
        return True

    def end(self) -> None:
        """End the process and whatever it started."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def command_of(place: Place) -> list[str]:
    """The command line of a case."""
    words = ["-m", "trainstep", *place.case.words, "--out", str(place.folder)]
    if place.case.processes is None:
        return [sys.executable, *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={place.case.processes}"]
    return [sys.executable, *launcher, *words]


def run_here(
    places: Sequence[Place], *, jobs: int = 1, gpus: Sequence[str] = (), timeout_s: float | None = None
) -> Generator[Place, None, None]:
    """Run the cases, `jobs` at once, and yield each as it ends. Left early, it ends what still runs.

    Args:
        places: the cases and their folders.
        jobs: cases at once. With more than one they share the cores (as OMP_NUM_THREADS, where that is not set), and
            every case that may use a GPU sees only its own.
        gpus: this machine's GPUs, as CUDA_VISIBLE_DEVICES names them.
        timeout_s: seconds after which a case is ended.

    Raises:
        UsageError: fewer GPUs than cases at once need.
    """
    free = list(gpus)
    threads = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None
    shares = {id(place): _gpus_needed(place) if jobs > 1 and gpus else None for place in places}
    most = max((share or 0 for share in shares.values()), default=0)
    if jobs * most > len(free):
        raise UsageError(
            f"{jobs} jobs of {most} GPUs each need {jobs * most}, and {len(free)} are visible; give fewer --jobs"
        )
    waiting, running = list(places), list[Child]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                place = waiting.pop(0)
                share = shares[id(place)]
                own = None if share is None else [free.pop(0) for _ in range(share)]
                running.append(Child(place, gpus=own, threads=threads, timeout_s=timeout_s))
            ended = [child for child in running if child.poll()]
            running = [child for child in running if child not in ended]
            free += [gpu for child in ended for gpu in child.gpus or ()]
            yield from (child.place for child in ended)
            if not ended:
                time.sleep(POLL_S)
    finally:
        for child in running:
            child.end()


def run_alone(place: Place, timeout_s: float | None) -> None:
    """Run one case: what a job of a cluster does."""
    for _ in run_here([place], timeout_s=timeout_s):
        pass


def _gpus_needed(place: Place) -> int:
    return 0 if place.case.settings.get("device") == "cpu" else place.case.processes or 1


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
