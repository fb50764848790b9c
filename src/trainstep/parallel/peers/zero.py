"""torch.distributed.optim.ZeroRedundancyOptimizer, around DistributedDataParallel with the settings of `peers.ddp`.

Settings that no source is named for have theirs on that class's page of torch's documentation.

parameters_as_bucket_view: on. The parameters that one rank updates are views of one buffer, broadcast in one call; off,
each is broadcast by itself.

overlap_with_ddp: off, since it does not train what one process trains: with static_graph the first three steps update
nothing (two without), until it knows DDP's buckets. One could prepend dummy inputs, as its warning says, but the checks
here are of the first steps. It also takes a single group of parameters.

bucket_cap_mb of the wrapper: 25 and 1000, the two sizes that our sharded optimizer is measured with.

The optimizer inside is the workload's own, fused where the step's is.
"""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from trainstep.parallel.process import Process
from trainstep.step.training_step import recipe


def zero_redundancy_optimizer(made: torch.optim.Optimizer, process: Process) -> ZeroRedundancyOptimizer:
    """An optimizer like `made`, with its groups' own options, whose state is divided among the ranks."""
    groups, options = recipe(made)
    return ZeroRedundancyOptimizer(
        groups,
        optimizer_class=type(made),
        process_group=process.group,
        parameters_as_bucket_view=True,
        **options,
    )
