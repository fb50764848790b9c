"""Cases on this machine: one process each, so many at once, each with GPUs of its own where several run."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence

from trainstep.bench.sweep.case import Place
from trainstep.bench.sweep.child import Child
from trainstep.errors import UsageError

POLL_S = 0.05


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
