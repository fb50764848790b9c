"""A module and its optimizer on this rank, as a scheme has them: ours, in all their settings, and torch's own.

`build` takes a module that is on its device, checkpointed and compiled as asked, and returns what `TrainingStep` takes
steps with. `bench parallel` compares them, `train` trains with them. What a rank then holds of parameters, gradients
and optimizer state is read in one way for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.schemes import Scheme
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.parallel.peers.ddp import distributed_data_parallel
from trainstep.parallel.peers.fsdp2 import shard_fully
from trainstep.parallel.peers.zero import zero_redundancy_optimizer
from trainstep.parallel.process import Process
from trainstep.step.blocks import blocks_in_runs
from trainstep.step.casting import autocast_dtype
from trainstep.step.training_step import MakeOptimizer, Replica, alone, recipe
from trainstep.step.weights import optimizer_state_tensors


def build(
    scheme: Scheme,
    process: Process,
    config: StepConfig,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    allow_unused: bool = False,
) -> Replica:
    """The module, the same on all ranks, and its optimizer on this rank, under a scheme.

    `make_optimizer` is called once, on the parameters that this rank has. With `allow_unused` parameters may get no
    gradient, as for `DistributedDataParallel`.

    Raises:
        UnsupportedError: the ranks make no replicas.
    """
    scheme.check(process.world_size)
    group, dtype = process.group, autocast_dtype(config.precision)
    match scheme.wrapper:
        case "none":
            return alone(module, make_optimizer)
        case "ddp" | "sharded-optimizer":
            ddp = DistributedDataParallel(
                module,
                bucket_mb=scheme.bucket_mb,
                overlap=scheme.overlap,
                process_group=group,
                transport=scheme.transport,
                allow_unused=allow_unused,
            )
            optimizer, clip = make_optimizer(module.parameters()), None
            if scheme.wrapper == "sharded-optimizer":
                groups, options = recipe(optimizer)
                optimizer = sharded = ShardedOptimizer(
                    groups, type(optimizer), ddp=ddp, overlap_gather=scheme.overlap_gather, **options
                )
                clip = sharded.clip_grad_norm_
            return Replica(ddp, optimizer, ddp.finish_gradient_synchronization, ddp.no_sync, clip)
        case "fsdp":  # weights are gathered in the dtype they compute in
            plain, names = _sorted_by_name(make_optimizer, module)
            mesh = _mesh(scheme, process)
            runs = blocks_in_runs(module, scheme.blocks_per_group)
            fsdp = FullyShardedDataParallel(
                module, compute_dtype=dtype, mesh=mesh, groups=runs, transport=scheme.transport
            )
            optimizer = _of_shards(plain, names, fsdp, make_optimizer)
            finish = fsdp.finish_gradient_synchronization
            return Replica(fsdp, optimizer, finish, fsdp.no_sync, fsdp.clip_grad_norm_)
        case "torch-ddp" | "torch-zero":
            assert scheme.bucket_mb is not None, "torch's own have one"
            wrapped = distributed_data_parallel(module, process, bucket_mb=scheme.bucket_mb, allow_unused=allow_unused)
            optimizer = make_optimizer(module.parameters())
            if scheme.wrapper == "torch-zero":
                optimizer = zero_redundancy_optimizer(optimizer, process)
            return Replica(wrapped, optimizer)
        case "torch-fsdp2":
            mesh, fixed_order = _mesh(scheme, process), not allow_unused
            settings = {"narrow_reduce": scheme.narrow_reduce, "fixed_order": fixed_order}
            shard_fully(module, mesh, dtype, blocks_in_runs(module, scheme.blocks_per_group), **settings)
            return Replica(module, make_optimizer(module.parameters()))


def _sorted_by_name(make_optimizer: MakeOptimizer, module: nn.Module) -> tuple[torch.optim.Optimizer, list[list[str]]]:
    """The optimizer of the plain module, and the names of the parameters in each of its groups, which it lets go.

    A user's optimizer may sort parameters by what they are in the module, which a shard does not tell.
    """
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    optimizer = make_optimizer(module.parameters())
    if any(id(parameter) not in name_of for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError("the optimizer has a parameter that is not the module's; give it those that it is called with")
    groups = [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if not optimizer.state:
        for group in optimizer.param_groups:
            group["params"] = []
    return optimizer, groups


def _of_shards(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str]],
    module: FullyShardedDataParallel,
    make_optimizer: MakeOptimizer,
) -> torch.optim.Optimizer:
    """The optimizer with the shards of these names in its groups; one that has a state already is made anew.

    Raises:
        UsageError: made of shards, it has other groups.
    """
    shards = dict(module.named_parameters(remove_duplicate=False))
    sharded = [[shards[f"module.{name}"] for name in names] for names in groups]
    if not optimizer.state:
        for group, parameters in zip(optimizer.param_groups, sharded, strict=True):
            group["params"] = parameters
        return optimizer
    again = make_optimizer(module.parameters())  # such as Adagrad, whose state begins in the shape of its parameters
    if [list(map(id, group["params"])) for group in again.param_groups] != [list(map(id, each)) for each in sharded]:
        raise UsageError(
            f"{type(again).__name__}, which has a state from the start, sorts shards into other groups than the "
            "module's own parameters; sort them by shape or order, or use --scheme ddp"
        )
    return again


def _mesh(scheme: Scheme, process: Process) -> DeviceMesh:
    """Mesh of a scheme that shards weights: over all ranks, or over those of each replica."""
    if scheme.replicas is None:
        return DeviceMesh.from_group(process.group, process.device.type)
    return process.mesh(scheme.replicas)


def full_parameters(replica: Replica, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in full, by its name in the plain module. All ranks must go through all of them."""
    if isinstance(replica.module, FullyShardedDataParallel):
        yield from replica.module.gather_full_parameters().items()
        return
    wait_for_parameters(replica)
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def local_gradients(replica: Replica) -> list[Tensor]:
    """Gradients that this rank holds."""
    if isinstance(replica.optimizer, ShardedOptimizer):
        return replica.optimizer.local_gradients()
    return [parameter.grad for parameter in local_weights(replica) if parameter.grad is not None]


def local_weights(replica: Replica) -> list[nn.Parameter]:
    """Parameters that this rank holds."""
    if isinstance(replica.module, FullyShardedDataParallel):
        return [parameter.shard for parameter in replica.module.sharded_parameters()]
    return list(replica.module.parameters())


def local_state(replica: Replica) -> list[Tensor]:
    """Optimizer state that this rank holds."""
    optimizer = replica.optimizer
    own = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return list(optimizer_state_tensors(own))


def uncounted_bytes(replica: Replica) -> int:
    """Bytes that this rank holds for communication and that torch's allocator does not count."""
    ours = (replica.module, DistributedDataParallel | FullyShardedDataParallel), (replica.optimizer, ShardedOptimizer)
    return sum(each.uncounted_bytes for each, kind in ours if isinstance(each, kind))


def transports_of(replica: Replica) -> tuple[str | None, str | None]:
    """Transports of our shards and gradients, and of gradients between replicas."""
    module = replica.module
    if isinstance(module, FullyShardedDataParallel):
        return module.transport, module.transport_between
    return (module.transport if isinstance(module, DistributedDataParallel) else None), None


def wait_for_parameters(replica: Replica) -> None:
    """Let the current stream wait for parameters that a step leaves to arrive beside the next."""
    if isinstance(replica.optimizer, ShardedOptimizer):
        replica.optimizer.wait_for_parameters()
