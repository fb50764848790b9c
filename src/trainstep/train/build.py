"""The step of a run on one rank: the built-in model under the run's scheme."""

from __future__ import annotations

import dataclasses
import functools

from torch import nn

from trainstep.parallel.process import Process
from trainstep.schemes import data_parallel, fully_sharded, sharded_optimizer
from trainstep.train.config import RunConfig
from trainstep.training_step import MakeOptimizer, Replica, TrainingStep, alone
from trainstep.workload import builtin_workload, make_optimizer


def build_training_step(config: RunConfig, process: Process) -> TrainingStep:
    """The model with its weights from the seed, the same on every rank and for every scheme, ready to step."""
    step = dataclasses.replace(config.step, device=str(process.device))
    workload = builtin_workload(config.model, step, batches=())
    workload.optimizer = functools.partial(
        make_optimizer, step.optimizer, step.learning_rate, weight_decay=config.train.weight_decay
    )

    def parallelize(module: nn.Module, optimizer: MakeOptimizer) -> Replica:
        scheme, bucket_mb = config.scheme(process.world_size), config.train.bucket_mb
        if scheme == "single":
            return alone(module, optimizer)
        if scheme == "ddp":
            return data_parallel(process, module, optimizer, bucket_mb=bucket_mb)
        if scheme == "sharded-optimizer":
            return sharded_optimizer(process, module, optimizer, bucket_mb=bucket_mb)
        return fully_sharded(process, step, module, optimizer)

    return TrainingStep(workload, step, parallelize)
