"""Hooks beside torch.compile, which traces whatever the code it compiles calls.

Traced, hooks would be a part of graphs that are compiled again whenever something of ours has changed, and of none at
all where `fullgraph` is asked for. So dynamo traces none of them: compiled code that comes to one runs it between two
graphs, or, where the hook is made by `untraced.when_eager`, passes it by.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainstep.observe.imports import after_import

_HERE = __name__.rpartition(".")[0]
OURS = (
    *(f"{_HERE}.{each.name}" for each in pkgutil.iter_modules([str(Path(__file__).parent)]) if each.name != "untraced"),
    *("trainstep.ladder.trial", "trainstep.measure"),
)
"""Modules that call a script's code from inside hooks, or are called in between."""

FUNCTIONAL = "torch.distributed._functional_collectives"
"""Module in which dynamo has a table of collectives."""


def leave_untraced(calls: Iterable[Callable[..., Any]]) -> Callable[[], object]:
    """Have dynamo trace no hook, once it is there; returns what takes the hooks out of its tables again.

    Args:
        calls: hooks that `when_eager` made, which are still traced as a part of other code, and not by themselves.
    """

    def tell() -> None:
        _leave_out()
        for call in calls:
            sys.modules["torch._dynamo.eval_frame"].skip_code(call.__code__)

    waiting = [after_import("torch._dynamo", tell), after_import(FUNCTIONAL, lambda: _stand_for(calls))]

    def undo() -> None:
        for call_off in waiting:
            call_off()
        traced = getattr(sys.modules.get(FUNCTIONAL), "traceable_collective_remaps", {})
        for call in calls:
            traced.pop(call, None)

    return undo


def _stand_for(calls: Iterable[Callable[..., Any]]) -> None:
    """dynamo knows what to trace in the place of a collective by its function: hooks and what they are around alike."""
    traced = sys.modules[FUNCTIONAL].traceable_collective_remaps
    for known, instead in list(traced.items()):
        for call in calls:
            original = vars(call)["__wrapped__"]
            if known is call or known is original:
                traced |= {call: instead, original: instead}


@functools.cache
def _leave_out() -> None:
    for package in OURS:
        sys.modules["torch._dynamo.trace_rules"].add(package)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, and whatever it calls, run as they are where compiled code comes to it."""
    disabled: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            if "torch._dynamo.decorators" not in sys.modules:  # slow to import, and whoever compiles has done so
                return hook(*args, **kwargs)
            disabled.append(torch.compiler.disable(hook))
        return disabled[0](*args, **kwargs)

    return call


@contextmanager
def nothing_is_compiled() -> Iterator[None]:
    """While entered, what is to be compiled runs as it is written: torch compiles nothing under modes that see every
    operator, and raises there where `fullgraph` is asked for."""
    entered: list[Any] = []
    forget = after_import("torch._dynamo", lambda: entered.append(torch.compiler.set_stance("force_eager")))
    try:
        yield
    finally:
        forget()
        for stance in entered:
            stance.__exit__(None, None, None)


def is_anything_compiled() -> bool:
    """True if dynamo has compiled anything in this process."""
    return bool(getattr(sys.modules.get("torch._dynamo.utils"), "_compilation_metrics", None))
