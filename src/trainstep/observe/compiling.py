"""torch.compile in a script: what it compiled and why it did again, and how instruments keep it from compiling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from trainstep.observe.imports import after_import
from trainstep.observe.lines import Place, place_of_call
from trainstep.observe.log import LogWriter


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


class Recompilations:
    """Looks at what dynamo keeps of its last compilations; costs one look-up where nothing was compiled.

    Dynamo's own account names the function that it began at, which for a compiled module is torch's; the line that
    called it is told by a callback when a compilation starts.
    """

    def __init__(self, log: LogWriter) -> None:
        self._log = log
        self._seen: set[int] = set()  # by identity: dynamo keeps the last 64
        self._kept: list[Any] = []
        self._places: dict[str, Place] = {}  # compilation → the line that called what is compiled
        self._codes: dict[str, list[Any]] = {}  # number of a frame → the function's definition
        self._undo: list[Callable[[], object]] = []

    def start(self) -> None:
        """Look from here on, once dynamo is there."""
        self._undo.append(after_import("torch._dynamo.callback", self._listen))
        known = getattr(sys.modules.get("torch._dynamo.utils"), "_compilation_metrics", ())
        self._kept += known
        self._seen.update(map(id, known))

    def stop(self) -> None:
        """Take the callback back."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _listen(self) -> None:
        handler = sys.modules["torch._dynamo.callback"].callback_handler

        def begins(started: Any) -> None:
            with suppress(Exception):  # else it would be the script's error
                self._places[str(started.compile_id)] = place_of_call(sys._getframe(1))

        def forget() -> None:
            if begins in handler.start_callbacks:
                handler.remove_start_callback(begins)

        handler.register_start_callback(begins)
        self._undo.append(forget)

    def look(self, step: int) -> int:
        """Log the compilations since the last look, made in or before the step that has just ended; how many."""
        known = getattr(sys.modules.get("torch._dynamo.utils"), "_compilation_metrics", None)
        if not known or id(known[-1]) in self._seen:
            return 0
        new = [each for each in known if id(each) not in self._seen]
        self._kept += new  # alive, so that no other object gets its number
        self._seen.update(map(id, new))
        for each in new:
            number, fails = str(getattr(each, "compile_id", None)), str(getattr(each, "fail_reason", ""))
            place = self._places.get(number, Place("", 0, ""))
            names = [getattr(each, f"co_{name}", None) for name in ("filename", "firstlineno", "name")]
            code = self._codes.setdefault(number.rpartition("/")[0], names)
            entry = {
                "step": step,
                "function": getattr(each, "co_name", None),
                "called": list(place[:3]),
                "user": list(place[3:]),
                "reason": getattr(each, "recompile_reason", None) or None,
                "seconds": getattr(each, "entire_frame_compile_time_s", None),
            }
            if "recompile limit exceeded" in fails:
                entry["limit"] = code
            self._log.write("recompilation", entry)
        return len(new)
