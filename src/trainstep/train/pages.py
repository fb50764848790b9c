"""A run's page while it trains: drawn from its metrics now and then by a process of its own; training goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

DRAW = ("-m", "trainstep", "report")


class Pages:
    """Draws `report.html` into a run's folder at most every `every_s` seconds; 0 draws none.

    The process has the lowest priority, knows nothing of the run but its folder, and replaces the page when the new one
    is whole. One that fails changes nothing.

    Args:
        out: the run's folder; None on all ranks but the first, which draw none.
    """

    def __init__(self, out: Path | None, every_s: float) -> None:
        self._out, self._every_s = out, every_s
        self._due = time.monotonic() + every_s
        self._drawing: subprocess.Popen[bytes] | None = None

    @property
    def draws(self) -> bool:
        return self._out is not None and self._every_s > 0

    def draw(self) -> None:
        """Begin to draw if it is time to and nothing is being drawn; returns at once."""
        if not self.draws or time.monotonic() < self._due:
            return
        if self._drawing is not None and self._drawing.poll() is None:
            return
        nice = shutil.which("nice")
        politely = [] if nice is None else [nice, "-n", "19"]
        nowhere = subprocess.DEVNULL
        try:
            self._drawing = subprocess.Popen(
                [*politely, sys.executable, *DRAW, str(self._out)],
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                start_new_session=True,  # Ctrl-C is the run's
            )
        except OSError:  # no process more can be started: the run goes on without a newer page
            self._drawing = None
        self._due = time.monotonic() + self._every_s

    def close(self) -> None:
        """Wait for what is being drawn, so that a page of before is not put in the place of a later one."""
        if self._drawing is not None:
            self._drawing.wait()
