"""Timers that somebody would write into a script by hand; nothing of trainstep's is used.

Scripts have lines of them as comments, `# by hand: clock("forward")`; `instrumented` makes them code. A run of that
text under `trainstep run` times the same steps in both ways at once, so that what disturbs the machine is in both.
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

COMMENT = "# by hand: "


def instrumented(text: str) -> str:
    """A script's text with its timers."""
    return text.replace(COMMENT, "")


class Clock:
    """Each call says what the time since the last call went to; `step` ends a step. Written to $BY_HAND at the end."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []  # phase → milliseconds; "of" says of which optimizer, if of several
        self._now: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        if path := os.environ.get("BY_HAND"):
            atexit.register(lambda: Path(f"{path}-{os.environ.get('RANK', '0')}").write_text(json.dumps(self.steps)))

    def __call__(self, phase: str) -> None:
        now = time.perf_counter()
        self._now[phase] += (now - self._last) * 1e3
        self._last = now

    def step(self, of: int = 0) -> None:
        """A step is over."""
        self.steps.append({**self._now, "of": of})
        self._now.clear()

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
