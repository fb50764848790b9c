"""The step of a run on one rank: the built-in model under the run's scheme."""

from __future__ import annotations

import dataclasses
import functools

from trainstep.parallel.process import Process
from trainstep.replicas import build
from trainstep.train.config import RunConfig
from trainstep.training_step import TrainingStep
from trainstep.workload import builtin_workload, make_optimizer


def build_training_step(config: RunConfig, process: Process) -> TrainingStep:
    """The model with its weights from the seed, the same on every rank and for every scheme, ready to step."""
    step = dataclasses.replace(config.step, device=str(process.device))
    workload = builtin_workload(config.model, step, batches=())
    workload.optimizer = functools.partial(
        make_optimizer, step.optimizer, step.learning_rate, weight_decay=config.train.weight_decay
    )
    return TrainingStep(workload, step, functools.partial(build, config.scheme(process.world_size), process, step))
