"""A small workload, and what the judge of steps says of it."""

import functools

import torch
from torch.nn import functional as F

from trainstep.base.config import StepConfig
from trainstep.check.step import StepCheck
from trainstep.step.workload import Workload, WorkloadSource


def source_of(make, scale=lambda step: 1.0):
    def build(step):
        torch.manual_seed(step.seed)
        module, factor = make(), scale(step)
        return Workload(
            module=module,
            batches=[(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)),)],
            loss=lambda out, batch: out.square().mean() + factor * F.cosine_similarity(out[0], out[1], dim=0),
            optimizer=functools.partial(torch.optim.SGD, lr=1e-3),
        )

    return WorkloadSource("toy", build)


def verdict_of(source, device="cpu", **change):
    return StepCheck(source, StepConfig(device=device)).judge(StepConfig(device=device, **change))


def is_plain(step):
    """Whether a step is the one that others are held against."""
    return (step.precision, step.compile, step.optimizer) == ("fp32", "off", StepConfig().optimizer)
