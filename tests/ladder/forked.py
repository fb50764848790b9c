"""Runs of a ladder whose processes are forked from one that has imported torch, which saves seconds of each.

Everything else is as the command has it: the script's process does what `script.main` does.
"""

import json
import multiprocessing
import os
import sys

import pytest

from trainstep.observe import supervise


def _child(task, place, output, environment):
    os.chdir(place)
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    multiprocessing.set_start_method(None, force=True)  # not the server's: as a process of its own would have it
    from trainstep.observe import script

    sys.argv = ["script.py", json.dumps({**task, "parent": os.getppid()})]
    script.main()


class Forked:
    """What `supervise` needs of a `subprocess.Popen`."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "trainstep.observe.session", "trainstep.ladder.trial.capture"]
    )

    def __init__(self, words, *, cwd, stdin, stdout, stderr, env):
        task = json.loads(words[-1])
        self.process = self.context.Process(target=_child, args=(task, str(cwd), os.path.abspath(stdout.name), env))
        self.process.start()

    def poll(self):
        self.process.join(60)  # no SIGCHLD comes of a process that the server started
        return self.process.exitcode

    @property
    def returncode(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)


@pytest.fixture(scope="module")
def forked_runs():
    """`supervise` starts processes so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervise.subprocess, "Popen", Forked)
        yield
