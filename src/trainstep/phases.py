"""The phases of a training step, announced once and heard by every instrument.

A step is written as `with phase("forward"): ...`. What `phase` is decides what is measured: the stopwatch's laps, the
memory instrument's peaks, both at once, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from trainstep.config import StepMode

PHASES = ("forward", "loss", "backward", "optimizer")
"""In order. `optimizer` includes gradient unscaling and setting the gradients to None."""

PHASES_OF_MODE: dict[StepMode, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward-backward": ("forward", "loss", "backward"),
    "step": PHASES,
}

PhaseContext = Callable[[str], AbstractContextManager[Any]]
"""Given a phase's name, the context in which that phase runs."""


def no_phases(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def together(*contexts: PhaseContext) -> PhaseContext:
    """Enter several instruments' contexts around each phase, the first outermost."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(name))
            yield

    return phase
