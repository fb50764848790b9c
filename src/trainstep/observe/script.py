"""The process in which a script runs as if Python had been given it, measured from when it imports torch.

Started as a file, with what to do as JSON in its first argument. Its own imports before the script's are few, and torch
is not among them: a script without torch runs without it. The script's directory, arguments, exit code and
traceback are those that it would have without this.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import pkgutil
import runpy
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


def main() -> None:
    """Run what the first argument describes."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    target, is_module = task["target"], task["is_module"]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    sys.argv = [target, *task["arguments"]]
    _die_with(task["parent"])

    from trainstep.observe.elsewhere import note_processes
    from trainstep.observe.imports import after_import
    from trainstep.observe.log import LogWriter, log_path

    log = LogWriter(log_path(Path(task["folder"]), task["rank"]), task["rank"])
    log.write("header", {"pid": os.getpid(), **task["header"]})
    note_processes(log)
    trial = None
    if "trial" in task:
        trial = pkgutil.resolve_name(task["trial"]["by"])(task["trial"], log)
        trial.begin()
    run = Run(task["plan"], log, task["header"]["script"], trial)
    after_import("torch", run.measure)
    run.catch_exits()
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_path(target)
    except BaseException as error:
        run.ended(error)
        sys.excepthook = _shortened(sys.excepthook)
        raise
    run.ended(None)


def _run_path(target: str) -> None:
    """Run as `python target` does: `__file__` and lines of a traceback are absolute, `sys.argv[0]` is as it was
    given."""
    if not os.path.isfile(target) or zipfile.is_zipfile(target) or target.endswith(".pyc"):
        runpy.run_path(target, run_name="__main__")
        return
    path = os.path.abspath(target)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = sys.modules["__main__"] = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__builtins__=builtins, __file__=path, __cached__=None, __loader__=loader, __annotations__={})
    sys.argv[0] = target
    exec(code, vars(module))


class Run:
    """The measurement of this process, and how the script ends."""

    def __init__(self, plan: dict[str, Any], log: Any, script: str, trial: Any = None) -> None:
        self._plan, self._log, self._script, self._trial = plan, log, script, trial
        self._session: Any = None

    def measure(self) -> None:
        """Measure from here on; torch is there."""
        from trainstep.observe.session import Plan, Session

        if self._trial is not None:
            self._trial.prepare()
        self._session = Session(Plan(**self._plan), self._log, self._script)
        self._session.on_stop = self._leave_for_certain
        self._session.start()
        if self._trial is not None:
            self._trial.attach(self._session)

    def _leave_for_certain(self) -> None:
        """A script that catches even `SystemExit` ends where it would update its model once more."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from trainstep.observe.compiling import untraced

        def leave(*_: object) -> None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

        register_optimizer_step_pre_hook(untraced(leave))

    def catch_exits(self) -> None:
        """Have `os._exit` write what is known first."""
        leave = os._exit

        def _exit(status: int) -> None:
            if os.getpid() == pid:
                self._finish()
                self._end(how="os._exit", code=status)
            leave(status)

        pid = os.getpid()
        os._exit = _exit  # type: ignore[assignment]

    def ended(self, error: BaseException | None) -> None:
        """The script has returned, or was left by an exception."""
        self._finish()
        if error is None:
            self._end(how="returned", code=0)
        elif isinstance(error, SystemExit):
            self._end(how="sys.exit", code=error.code)
        else:
            from trainstep.base.errors import place_of

            name, text = type(error).__name__, str(error).strip().partition("\n")[0][:240]
            self._end(how="raised", error=name, text=text, place=place_of(error))

    def _end(self, **how: Any) -> None:
        self._log.write("end", how)
        self._log.flush()

    def _finish(self) -> None:
        if self._trial is not None:
            self._trial.finish()
        if self._session is not None:
            self._session.finish()


def _die_with(parent: int) -> None:
    """On Linux, end when the process that started this one is killed: torchrun kills that one alone."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed before
            os._exit(1)


def _shortened(show: Callable[..., object]) -> Callable[..., object]:
    """`sys.excepthook`, for tracebacks without the frames from here to the script; of one that there is not, or that
    cannot be compiled, what Python says."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        kept = trace
        while kept is not None and _is_before_script(kept.tb_frame.f_code):
            kept = kept.tb_next
        if kept is None and isinstance(error, ImportError):  # of `-m`
            print(f"{sys.executable}: {error}", file=sys.stderr)
            return
        shown = trace if kept is None and not isinstance(error, SyntaxError) else kept
        show(kind, error.with_traceback(shown), shown)

    return hook


def _is_before_script(code: CodeType) -> bool:
    return code.co_filename in (__file__, runpy.__file__, "<frozen runpy>")


if __name__ == "__main__":
    main()
