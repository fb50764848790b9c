"""A ladder on a tiny model: climbed for real, or with steps that are right and times that are told."""

import dataclasses
import itertools

import torch

import trainstep.ladder.steps as ladder
from trainstep.base.advice import Line
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.check.verdict import Deviation, Part, Verdict
from trainstep.ladder.change import Change
from trainstep.ladder.steps import climb
from trainstep.rows import FINAL
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

TOY = ModelConfig(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=256)
SOURCE = builtin_source("toy", TOY)
BASE = StepConfig(batch=2, context=32, device="cpu")


def change(name, step):
    return Change(name, Line(""), step=step)


class Trusting:
    """Finds every step right, at once: for what the ladder makes of right ones."""

    def __init__(self, source, plain):
        self.source = source

    def start(self, config):
        return build_step(self.source, config), Verdict(RIGHT, parts={"update": Part()})

    def end(self, step, verdict):
        return verdict


RIGHT = Deviation(0.0, 1e-6, 0.0, 1e-6, 0.0, 1e-6, 0.0, 1e-6, "")


def climb_with(rungs, source=SOURCE, **options):
    rows = list(climb(source, BASE, changes=rungs, **({"warmup": 1, "steps": 7} | options)))
    assert rows[-1].change == FINAL
    return rows[:-1]


def faked(monkeypatch, alone, turns=(), peaks=None):
    """Steps are taken as ever; the times (ms) and peaks that are told are these, in the order of the measurements.

    Args:
        alone: of each step measured by itself. Several times are those of its steps, in turn; None is a failure.
        turns: of the step before and of its own, each time that two take turns; None where they do not fit together.
        peaks: of each step measured by itself; None where unknown.
    """
    original, in_turns, measured, taken = ladder.measure_training_step, ladder.time_in_turns, [], []
    monkeypatch.setattr(ladder, "StepCheck", Trusting)

    def retimed(steps, ms):
        told = itertools.cycle(ms if isinstance(ms, list) else [ms])
        return tuple(dataclasses.replace(each, wall_ms=next(told)) for each in steps)

    def measure(*arguments):
        found = original(*arguments)
        measured.append(found)
        ms, memory = alone[len(measured) - 1], found.memory
        if ms is None:
            raise torch.OutOfMemoryError("no room")
        if peaks:
            peak = peaks[len(measured) - 1]
            memory = None if peak is None else dataclasses.replace(memory, peak=peak)
        timing = dataclasses.replace(found.timing, steps=retimed(found.timing.steps, ms))
        return dataclasses.replace(found, timing=timing, memory=memory)

    def take_turns(*arguments, **options):
        taken.append(in_turns(*arguments, **options))
        told = turns[len(taken) - 1]
        if told is None:
            raise torch.OutOfMemoryError("no room for both")
        return [list(retimed(each, ms)) for each, ms in zip(taken[-1], told, strict=True)]

    monkeypatch.setattr(ladder, "measure_training_step", measure)
    monkeypatch.setattr(ladder, "time_in_turns", take_turns)
    return taken


TWO = [change("one", {"attention": "sdpa"}), change("two", {"optimizer": "adamw-fused"})]
