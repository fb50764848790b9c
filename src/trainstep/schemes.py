"""Our schemes of data parallel training, as `TrainingStep` takes them: a module and its optimizer, on this rank.

Each takes a module that is on its device, checkpointed and compiled as asked. `bench parallel` compares them, `train`
trains with them.
"""

from __future__ import annotations

from torch import nn

from trainstep.config import StepConfig
from trainstep.errors import UnsupportedError
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.parallel.fsdp.transport import TransportName
from trainstep.parallel.process import Process
from trainstep.precision import AUTOCAST_DTYPES
from trainstep.training_step import MakeOptimizer, Replica, recipe


def data_parallel(
    process: Process,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    bucket_mb: float = 25,
    overlap: bool = True,
    allow_unused: bool = False,
) -> Replica:
    """Everything on every rank; gradients are averaged."""
    wrapper = DistributedDataParallel(
        module, bucket_mb=bucket_mb, overlap=overlap, process_group=process.group, allow_unused=allow_unused
    )
    return Replica(
        wrapper, make_optimizer(module.parameters()), wrapper.finish_gradient_synchronization, wrapper.no_sync
    )


def sharded_optimizer(
    process: Process,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    bucket_mb: float = 25,
    allow_unused: bool = False,
) -> Replica:
    """Weights on every rank; gradients and the optimizer's state in slices."""
    wrapper = DistributedDataParallel(
        module, bucket_mb=bucket_mb, process_group=process.group, allow_unused=allow_unused
    )
    undivided = make_optimizer(module.parameters())
    groups, options = recipe(undivided)
    optimizer = ShardedOptimizer(groups, type(undivided), ddp=wrapper, **options)
    return Replica(
        wrapper, optimizer, wrapper.finish_gradient_synchronization, wrapper.no_sync, optimizer.clip_grad_norm_
    )


def fully_sharded(
    process: Process,
    config: StepConfig,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    transport: TransportName = "auto",
) -> Replica:
    """Weights, gradients and the optimizer's state in shards; weights are gathered in the dtype they compute in.

    Raises:
        UnsupportedError: the chunked loss.
    """
    check_shardable(config)
    dtype = AUTOCAST_DTYPES.get(config.precision)
    wrapper = FullyShardedDataParallel(module, compute_dtype=dtype, process_group=process.group, transport=transport)
    return Replica(
        wrapper,
        make_optimizer(wrapper.parameters()),
        wrapper.finish_gradient_synchronization,
        wrapper.no_sync,
        wrapper.clip_grad_norm_,
    )


def check_shardable(config: StepConfig) -> None:
    """Raise `UnsupportedError` where a step reads weights outside of the modules that have them."""
    if config.loss == "chunked":
        raise UnsupportedError("the chunked loss reads the head's weight outside of the model: use --loss dense")


def uncounted_bytes(replica: Replica) -> int:
    """What this rank holds for communication that torch's allocator does not count."""
    return replica.module.uncounted_bytes if isinstance(replica.module, FullyShardedDataParallel) else 0
