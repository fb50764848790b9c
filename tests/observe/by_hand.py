"""Timers that somebody would write into a script by hand; nothing of trainstep's is used.

Scripts have lines of them as comments, `# by hand: clock("forward")`; `instrumented` makes them code. A run of that
text under `trainstep run` times the same steps in both ways at once, so that what disturbs the machine is in both.
Where the script trains on a GPU they are events in its queue, recorded without waiting and read at the end.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

COMMENT = "# by hand: "


def instrumented(text: str) -> str:
    """A script's text with its timers."""
    return text.replace(COMMENT, "")


class Clock:
    """Each call says what the time since the last call went to; `step` ends a step. Written to $BY_HAND at the end.

    Args:
        on_gpu: whether the current GPU's time is meant, not the host's; by default where there is one.
    """

    def __init__(self, on_gpu: bool | None = None) -> None:
        self._on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
        self._steps: list[tuple[int, list[tuple[str, Any]]]] = []  # of which optimizer; phases, each with its end
        self._now: list[tuple[str, Any]] = []
        self._start: Any = None if self._on_gpu else time.perf_counter()
        if path := os.environ.get("BY_HAND"):
            atexit.register(lambda: Path(f"{path}-{os.environ.get('RANK', '0')}").write_text(json.dumps(self.steps())))

    def __call__(self, phase: str) -> None:
        mark: Any
        if self._on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        if self._start is None:  # nothing was in the queue before
            self._start = mark
        self._now.append((phase, mark))

    def step(self, of: int = 0) -> None:
        """A step is over."""
        self._steps.append((of, self._now))
        self._now = []

    def steps(self) -> list[dict[str, float]]:
        """Phase → milliseconds of each step; "of" says of which optimizer, if of several."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found, last = [], self._start
        for of, marks in self._steps:
            times: defaultdict[str, float] = defaultdict(float)
            for phase, mark in marks:
                times[phase] += last.elapsed_time(mark) if self._on_gpu else (mark - last) * 1e3
                last = mark
            found.append({**times, "of": of})
        return found

    def around(self, owner: Any, name: str, phase: str, *, ends: bool = False) -> None:
        """Time a method of an object or a class; `ends` for the one that ends a step."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self("other")
            try:
                return original(*args, **kwargs)
            finally:
                self(phase)
                if ends:
                    self.step()

        setattr(owner, name, timed)


clock = Clock()
