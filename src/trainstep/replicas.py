"""A module and its optimizer on this rank, as a scheme has them: ours, in all their settings, and torch's own.

`build` takes a module that is on its device, checkpointed and compiled as asked, and returns what `TrainingStep` takes
steps with. `bench parallel` compares them, `train` trains with them. What a rank then holds of parameters, gradients
and optimizer state is read in one way for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from trainstep.blocks import find_blocks
from trainstep.casting import autocast_dtype
from trainstep.config import StepConfig
from trainstep.measure.memory import optimizer_state_tensors
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.parallel.process import Process
from trainstep.schemes import Scheme
from trainstep.training_step import MakeOptimizer, Replica, alone, recipe


def build(
    scheme: Scheme,
    process: Process,
    config: StepConfig,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    allow_unused: bool = False,
) -> Replica:
    """The module and its optimizer on this rank, under a scheme.

    Args:
        scheme: which, with its settings.
        process: this rank.
        config: the step's; FSDP gathers weights in the dtype that they compute in.
        module: of this rank, the same on all.
        make_optimizer: called once, on the parameters that this rank has.
        allow_unused: whether parameters may get no gradient, as for `DistributedDataParallel`.

    Raises:
        UnsupportedError: sharded weights with the chunked loss.
    """
    scheme.check(config)
    match scheme.wrapper:
        case "none":
            return alone(module, make_optimizer)
        case "ddp" | "sharded-optimizer":
            return _data_parallel(scheme, process, module, make_optimizer, allow_unused)
        case "fsdp":
            return _fully_sharded(scheme, process, config, module, make_optimizer)
        case "torch-ddp" | "torch-zero":
            return _torch_data_parallel(scheme, process, module, make_optimizer, allow_unused)
        case "torch-fsdp2":
            return _torch_fully_sharded(process, config, module, make_optimizer)


def _data_parallel(
    scheme: Scheme, process: Process, module: nn.Module, make_optimizer: MakeOptimizer, allow_unused: bool
) -> Replica:
    """Weights on every rank; gradients are averaged, by the sharded optimizer slice by slice."""
    wrapper = DistributedDataParallel(
        module,
        bucket_mb=scheme.bucket_mb,
        overlap=scheme.overlap,
        process_group=process.group,
        allow_unused=allow_unused,
    )
    optimizer = make_optimizer(module.parameters())
    clip = None
    if scheme.wrapper == "sharded-optimizer":
        groups, options = recipe(optimizer)
        optimizer = sharded = ShardedOptimizer(groups, type(optimizer), ddp=wrapper, **options)
        clip = sharded.clip_grad_norm_
    return Replica(wrapper, optimizer, wrapper.finish_gradient_synchronization, wrapper.no_sync, clip)


def _fully_sharded(
    scheme: Scheme, process: Process, config: StepConfig, module: nn.Module, make_optimizer: MakeOptimizer
) -> Replica:
    """Weights, gradients and the optimizer's state in shards; weights are gathered in the dtype they compute in."""
    wrapper = FullyShardedDataParallel(
        module,
        compute_dtype=autocast_dtype(config.precision),
        process_group=process.group,
        transport=scheme.transport,
    )
    return Replica(
        wrapper,
        make_optimizer(wrapper.parameters()),
        wrapper.finish_gradient_synchronization,
        wrapper.no_sync,
        wrapper.clip_grad_norm_,
    )


def _torch_data_parallel(
    scheme: Scheme, process: Process, module: nn.Module, make_optimizer: MakeOptimizer, allow_unused: bool
) -> Replica:
    """torch's DistributedDataParallel; its ZeroRedundancyOptimizer keeps each parameter group's own options."""
    wrapper = nn.parallel.DistributedDataParallel(
        module,
        device_ids=[process.device.index] if process.device.type == "cuda" else None,
        process_group=process.group,
        gradient_as_bucket_view=True,
        find_unused_parameters=allow_unused,
    )
    optimizer = make_optimizer(module.parameters())
    if scheme.wrapper == "torch-zero":
        groups, options = recipe(optimizer)
        optimizer = ZeroRedundancyOptimizer(
            groups, optimizer_class=type(optimizer), process_group=process.group, **options
        )
    return Replica(wrapper, optimizer)


def _torch_fully_sharded(
    process: Process, config: StepConfig, module: nn.Module, make_optimizer: MakeOptimizer
) -> Replica:
    """Per block, parameters gathered in the compute dtype, gradients reduced in float32."""
    dtype = autocast_dtype(config.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    mesh = DeviceMesh.from_group(process.group, process.device.type)
    for block in find_blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    wrapped = fully_shard(module, mesh=mesh, mp_policy=policy)
    assert isinstance(wrapped, FSDPModule)
    return Replica(module, make_optimizer(module.parameters()))


def full_parameters(replica: Replica, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in full, by its name in the plain module. All ranks must go through all of them."""
    if isinstance(replica.module, FullyShardedDataParallel):
        yield from replica.module.gather_full_parameters().items()
        return
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def local_gradients(replica: Replica) -> list[Tensor]:
    """What this rank holds of the gradients."""
    if isinstance(replica.optimizer, ShardedOptimizer):
        return replica.optimizer.local_gradients()
    return [parameter.grad for parameter in replica.module.parameters() if parameter.grad is not None]


def local_state(replica: Replica) -> list[Tensor]:
    """What this rank holds of the optimizer's state."""
    optimizer = replica.optimizer
    own = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return list(optimizer_state_tensors(own))


def uncounted_bytes(replica: Replica) -> int:
    """What this rank holds for communication that torch's allocator does not count."""
    return replica.module.uncounted_bytes if isinstance(replica.module, FullyShardedDataParallel) else 0
