"""The measurement of a script in the script's own process, from when the script has imported torch to Python's end."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

from trainstep.observe.log import LogWriter


class Run:
    """Measures as a task says, and writes how the script ends.

    Args:
        task: "rank", "script" (its name), "plan" (fields of a `session.Plan`, and "verbatim"); for a ladder "trial".
        log: descriptor of the log, which the parent has begun.
    """

    def __init__(self, task: Mapping[str, Any], log: int) -> None:
        self._task, self._log = task, LogWriter(log, task["rank"])
        self._session: Any = None
        self._trial: Any = None
        if "trial" in task:
            self._trial = pkgutil.resolve_name(task["trial"]["by"])(task["trial"], self._log)
            self._trial.begin()
            self._end_before_exit()

    def measure(self) -> None:
        """Measure from here on; torch is there. Without a trial, the script goes on whatever fails here."""
        try:
            self._measure()
        except Exception as error:
            if self._trial is not None:
                raise
            self._note(error)

    def _measure(self) -> None:
        from trainstep.observe.session import Plan, Session

        if self._trial is not None:
            self._trial.prepare()
        self._session = Session(Plan(**self._task["plan"]), self._log, self._task["script"])
        self._session.on_stop = self._leave_for_certain
        self._session.start()
        if self._trial is not None:
            self._trial.attach(self._session)

    def _note(self, error: BaseException) -> None:
        self._log.write("note", {"text": f"trainstep could not measure all: {type(error).__name__}: {error}"})

    def _leave_for_certain(self) -> None:
        """A script that catches even `SystemExit` ends where it would update its model once more."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from trainstep.observe.border import left_uncompiled

        def leave(*_: object) -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

        register_optimizer_step_pre_hook(left_uncompiled(leave))

    def _end_before_exit(self) -> None:
        """Have `os._exit` write a trial's results first."""
        leave, process = os._exit, os.getpid()

        def _exit(status: int) -> None:
            if os.getpid() == process:
                self.end()
            leave(status)

        os._exit = _exit  # type: ignore[assignment]

    def end(self) -> None:
        """Write what is left, and how the script has ended; Python is about to do so.

        A signal that comes now would end nothing of the script's, which is done.
        """
        try:
            if self._trial is not None:
                self._trial.finish()
            if self._session is not None:
                self._session.finish()
        except BaseException as error:
            if self._trial is not None:
                raise
            self._note(error)
        raised: BaseException | None = getattr(sys, "last_value", None)
        if raised is None:
            self._log.write("end", {"how": "returned"})
            return
        from trainstep.base.errors import place_of

        text = str(raised).strip().partition("\n")[0][:240] if self._task["verbatim"] else ""
        self._log.write(
            "end", {"how": "raised", "error": type(raised).__name__, "text": text, "place": place_of(raised)}
        )
