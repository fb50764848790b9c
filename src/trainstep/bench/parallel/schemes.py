"""The schemes that `bench parallel` compares: ours, in all their settings, and torch's own beside them.

Each takes a module that is on its device, checkpointed and compiled as asked, and returns it as one rank trains it.
What a rank then holds of parameters, gradients and optimizer state is read in one way for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from trainstep.bench.parallel.names import SchemeName
from trainstep.blocks import find_blocks
from trainstep.config import StepConfig
from trainstep.measure.memory import optimizer_state_tensors
from trainstep.parallel import FullyShardedDataParallel, ShardedOptimizer
from trainstep.parallel.fsdp.transport import TransportName
from trainstep.parallel.process import Process
from trainstep.precision import AUTOCAST_DTYPES
from trainstep.schemes import check_shardable, data_parallel, fully_sharded, sharded_optimizer
from trainstep.training_step import MakeOptimizer, Replica, alone, recipe

_DDP: dict[str, tuple[float, bool]] = {"naive": (0, False), "flat": (math.inf, False), "overlapped": (0, True)}
"""Name → (bucket_mb, overlap); `bucketed-N` is (N, True)."""


def parallelize(
    name: SchemeName,
    process: Process,
    config: StepConfig,
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    allow_unused: bool = False,
) -> Replica:
    """The module and its optimizer on this rank, under a scheme; `allow_unused` as for `DistributedDataParallel`."""
    if name == "single":
        return alone(module, make_optimizer)
    if "fsdp" in name:
        check_shardable(config)
    if name == "torch-fsdp2":
        return _torch_fsdp2(process, config, module, make_optimizer)
    if name in ("fsdp", "fsdp-collectives"):
        transport: TransportName = "collectives" if name == "fsdp-collectives" else "auto"
        return fully_sharded(process, config, module, make_optimizer, transport=transport)
    if name in ("torch-ddp", "torch-zero"):
        wrapper = _torch_wrapper(process, module, allow_unused)
        optimizer = make_optimizer(module.parameters())
        return Replica(wrapper, _torch_zero(process, optimizer) if name == "torch-zero" else optimizer)
    if name.startswith("sharded-optimizer"):
        bucket_mb = float(name.removeprefix("sharded-optimizer").removeprefix("-") or 25)
        return sharded_optimizer(process, module, make_optimizer, bucket_mb=bucket_mb, allow_unused=allow_unused)
    bucket_mb, overlap = _DDP.get(name) or (float(name.removeprefix("bucketed-")), True)
    return data_parallel(
        process, module, make_optimizer, bucket_mb=bucket_mb, overlap=overlap, allow_unused=allow_unused
    )


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


def _torch_zero(process: Process, undivided: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Its parameter groups keep their own options."""
    groups, options = recipe(undivided)
    return ZeroRedundancyOptimizer(groups, optimizer_class=type(undivided), process_group=process.group, **options)


def _torch_wrapper(process: Process, module: nn.Module, allow_unused: bool) -> nn.Module:
    devices = [process.device.index] if process.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(
        module,
        device_ids=devices,
        process_group=process.group,
        gradient_as_bucket_view=True,
        find_unused_parameters=allow_unused,
    )


def _torch_fsdp2(process: Process, config: StepConfig, module: nn.Module, make_optimizer: MakeOptimizer) -> Replica:
    """Per block, parameters gathered in the compute dtype, gradients reduced in float32."""
    dtype = AUTOCAST_DTYPES.get(config.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    mesh = DeviceMesh.from_group(process.group, process.device.type)
    for block in find_blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    wrapped = fully_shard(module, mesh=mesh, mp_policy=policy)
    assert isinstance(wrapped, FSDPModule)
    return Replica(module, make_optimizer(module.parameters()))
