"""The command under torchrun: killed and started again, and asked to stop."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import COMMAND, alone, config, far_apart, flags, losses, names, updates

pytestmark = pytest.mark.distributed

RUN = {"steps": 100, "warmup": 0.05, "eval_every": 60, "save_every": 10, "eval_batches": 1}
WORDS = [*COMMAND, *flags(RUN), "--timeout", "60"]


def torchrun(*words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    return subprocess.Popen(
        [*command, "-m", "trainstep", *WORDS, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def workers(pid):
    """The processes that torchrun has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"\0-m\0trainstep\0" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for(condition, running):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.01)


@pytest.mark.thorough
def test_a_killed_worker_is_started_again_and_the_curve_goes_on(tmp_path):
    out, dice = tmp_path / "run", random.Random(time.time_ns())
    step = dice.randint(11, 50)
    running = torchrun("--out", str(out))
    try:
        # The first checkpoint may take longer to write than the updates until then.
        wait_for(lambda: updates(out) >= step and any(out.glob("checkpoints/step-*")), running)
        os.kill(dice.choice(workers(running.pid)), signal.SIGKILL)
        output, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 0, output
    assert output.count("resumed from step-000000") == 1, (step, output)
    alone(config(**RUN), tmp_path / "expected")
    assert far_apart(losses(tmp_path / "expected"), losses(out)) < 1e-5, step
    assert names(out) == names(tmp_path / "expected")


def test_sigterm_to_torchrun_saves_on_all_ranks(tmp_path):
    out = tmp_path / "run"
    running = torchrun("--scheme", "fsdp", "--out", str(out))
    try:
        wait_for(lambda: updates(out) >= 13, running)
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert "SIGTERM: stopped after update" in output, output
    made = updates(out)
    assert names(out)[-1] == f"step-{made:08d}"
    assert 13 <= made < 100
