"""Brings the observer into a script's process: Python imports this file by its name before the script begins.

The parent puts this folder in front of PYTHONPATH and names a task in TRAINSTEP_TASK. Both are undone here, and at last
comes the `sitecustomize` that was there before, if there is one. So the script's process is as plain Python has it:
its arguments, paths, environment and modules. What measures is imported when the script has imported torch.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STOPS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


class _Undisturbed:
    """A signal that comes meanwhile is sent again when no frame of ours is there, for the script's handler or as a
    KeyboardInterrupt."""

    def __enter__(self) -> None:
        self._before = _signal.pthread_sigmask(_signal.SIG_BLOCK, STOPS)

    def __exit__(self, *_: object) -> None:
        late = [_signal.sigwait([each]) for each in _signal.sigpending() if each in STOPS]
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._before)
        if late:
            _thread.start_new_thread(_send_again, (late,))


_undisturbed = _Undisturbed()


def _begin() -> None:
    here, loaded = os.path.dirname(__file__), set(sys.modules)
    file = os.environ.pop("TRAINSTEP_TASK", None)
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join(added)  # in its place among the others
    sys.path.remove(here)
    sys.path_importer_cache.pop(here, None)
    if file is None:
        return
    with open(file, "rb") as opened:
        task = marshal.load(opened)
    os.unlink(file)
    if not task["has_path"]:  # an empty one is the same to Python, and not to a script
        del os.environ["PYTHONPATH"]
    name, folder = "trainstep.observe.imports", os.path.dirname(here)
    ours: dict[str, Any] = {"__name__": name}
    exec(type(__loader__)(name, f"{folder}/imports.py").get_code(name), ours)  # type: ignore[name-defined]
    beside = ours["Beside"](os.path.dirname(folder), [os.path.abspath(each) for each in added])
    log = _high(os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    process, runs = os.getpid(), []
    os.write(log, b'{"is": "begun", "pid": %d}\n' % process)

    def run() -> None:
        from trainstep.observe.script import Run

        runs.append(Run(task, log))

    def measure() -> None:
        if os.getpid() != process:
            return
        try:
            with _undisturbed, beside:
                if not runs:
                    run()
                runs[0].measure()
        except Exception:  # the script goes on, and the parent sees that nothing was measured
            if "trial" in task:
                raise

    def end() -> None:
        if os.getpid() != process:
            return
        try:
            if runs or task["verbatim"]:
                with beside:
                    if not runs:
                        run()
                    runs[0].end()
            else:  # no torch, and nothing to import for what is known
                error = getattr(sys, "last_value", None)
                how = b'"returned"' if error is None else b'"raised", "error": "%s"' % type(error).__name__.encode()
                os.write(log, b'{"is": "end", "how": %s}\n' % how)
        except BaseException:  # a signal that comes now ends nothing: the script is done
            if "trial" in task:
                raise

    import atexit

    atexit.register(end)  # the first, so that it runs last
    for each in set(sys.modules) - loaded:
        del sys.modules[each]
    if "trial" in task:
        with beside:
            run()
    ours["after_import"]("torch", measure)


def _send_again(numbers: list[int]) -> None:
    time.sleep(0.01)
    for each in numbers:
        os.kill(os.getpid(), each)


def _high(descriptor: int) -> int:
    """The descriptor under a number that the script's own files do not come to."""
    for number in range(255, descriptor, -1):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(descriptor, number, inheritable=False)
            os.close(descriptor)
            return number
    return descriptor


if __name__ == "sitecustomize":
    try:
        with _undisturbed:
            _begin()
    except Exception as _error:  # the script runs without us, and the parent sees that nothing has begun
        del _error
    del sys.modules[__name__]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # where there is none, the error is the one that Python expects
