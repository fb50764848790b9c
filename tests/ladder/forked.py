"""Runs of a ladder whose processes are forked from one that has imported torch, which saves seconds of each.

Everything else is as the command has it: the script's process is measured by the same `Run`.
"""

import marshal
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainstep.observe import supervise
from trainstep.observe.script import Run


def _child(words, place, output, environment):
    os.chdir(place)
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    multiprocessing.set_start_method(None, force=True)  # not the server's: as a process of its own would have it
    described = marshal.loads(Path(os.environ.pop("TRAINSTEP_TASK")).read_bytes())
    log = os.open(described["log"], os.O_WRONLY | os.O_APPEND)
    os.write(log, b'{"is": "begun"}\n')
    run = Run(described, log)
    run.measure()
    sys.argv = words[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(words[1]))
    sys.last_value = None
    try:
        sys.audit("cpython.run_file", words[1])  # as the interpreter does, before it opens the script
        runpy.run_path(words[1], run_name="__main__")
    except BaseException as error:
        sys.last_value = None if isinstance(error, SystemExit) else error
        raise
    finally:
        run.end()


class Forked:
    """What `supervise` needs of a `subprocess.Popen`."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "trainstep.observe.session", "trainstep.ladder.trial.capture"]
    )

    def __init__(self, words, *, cwd, stdout, env, **_):
        self.process = self.context.Process(target=_child, args=(words, str(cwd), os.path.abspath(stdout.name), env))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    @property
    def returncode(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)


@pytest.fixture(scope="module")
def forked_runs(tmp_path_factory):
    """`supervise` starts processes so, in a folder where nobody else writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        patch.setattr(supervise, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))
        yield
