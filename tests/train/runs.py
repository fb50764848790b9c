"""A small run, and training it on the ranks of a test."""

import dataclasses
import json
import os
import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.parallel.process import AgreedError, join_group_or_alone
from trainstep.train.config import BuiltinRun, TrainConfig
from trainstep.train.learner import Learner
from trainstep.train.loop import train
from trainstep.train.metrics import Show

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=2, num_heads=2)
STEP = StepConfig(batch=2, context=32, learning_rate=3e-3, device="cpu")
TRAIN = TrainConfig(
    steps=12, global_batch=8, warmup=0.25, eval_every=6, save_every=4, tensorboard=False,
    validation_fraction=0.1,
)  # fmt: skip
TEXT = Path(__file__).parents[2] / "src" / "trainstep" / "step" / "model" / "transformer.py"


COMMAND = [
    "train", "--vocab-size", "256", "--d-model", "32", "--d-ff", "64", "--num-layers", "2", "--num-heads", "2",
    "--batch", "2", "--context", "32", "--learning-rate", "3e-3", "--device", "cpu", "--global-batch", "8",
    "--no-tensorboard", "--validation-fraction", "0.1", "--data", str(TEXT),
]  # fmt: skip
"""Command of the small run, without its length and schedule."""


def flags(settings):
    """Settings of a `TrainConfig` as words of the command."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def config(model=None, step=None, **changes):
    """The small run with some fields of its `TrainConfig`, `ModelConfig` and `StepConfig` changed."""
    return BuiltinRun(
        "small test",
        dataclasses.replace(STEP, **(step or {})),
        dataclasses.replace(TRAIN, **changes),
        dataclasses.replace(MODEL, **(model or {})),
    )


def on_rank(process, run, out, *, stop_after=None, data=TEXT, by=signal.SIGTERM, **options):
    """Train on this rank of a group; how it ended. `stop_after`: the last rank gets a signal, and update `stop_after`
    is the last."""
    with _signalled(stop_after - 1, by) if stop_after and process.rank == process.world_size - 1 else nullcontext():
        return train(run, data, Path(out), process, Show(None, log_every=10), **options)


def until(process, run, out, step):
    """Train up to this update; the last one that was made."""
    return on_rank(process, run, out, stop_after=step).step


@contextmanager
def _signalled(step, by):
    """At the start of an update this process gets a signal."""
    update = Learner.update

    def interrupted(self, number):
        if number == step:
            os.kill(os.getpid(), by)
        return update(self, number)

    Learner.update = interrupted
    try:
        yield
    finally:
        Learner.update = update


def alone(run, out, **options):
    """Train in this process alone; options as above."""
    mistake = None
    with join_group_or_alone(run.step.device) as process:
        try:
            return on_rank(process, run, out, **options)
        except AgreedError as error:
            mistake = error  # the group is left in order, as the command does
    raise mistake


def rows(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def updates(out):
    """How many have been made so far."""
    path = Path(out) / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def losses(out):
    """The curve, after a look that it has every update once."""
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    return [row["loss"] for row in found]


def far_apart(a, b):
    """The largest relative difference of two curves of one length."""
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def names(out):
    """The checkpoints that are there."""
    return sorted(path.name for path in (Path(out) / "checkpoints").iterdir())
