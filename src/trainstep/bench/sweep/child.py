"""A case's process: started with a folder and GPUs of its own, watched, and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from trainstep.bench.sweep.case import Place
from trainstep.bench.sweep.outcome import rows_of

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
