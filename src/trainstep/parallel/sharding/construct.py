"""From a module to shards, one module's parameters at a time, so that no rank ever holds the whole model.

Parameters and buffers become rank 0's. Those on the meta device are first given memory and initialised, module by
module, on every rank (so that all ranks draw the same random numbers), and cut before the next module's are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from trainstep.errors import UsageError
from trainstep.parallel.collectives import broadcast_from_first
from trainstep.parallel.sharding.parameter import Rows, ShardedParameter
from trainstep.parallel.sharding.plan import PlannedParameter

Initialize = Callable[[nn.Module], None]
"""Fills the parameters and buffers that a module has itself, not those of the modules inside it."""


def shard_parameters(
    root: nn.Module,
    planned: Sequence[PlannedParameter],
    process_group: dist.ProcessGroup,
    device: torch.device,
    initialize: Initialize | None,
) -> dict[PlannedParameter, ShardedParameter]:
    """Put shards in the place of all parameters, and rank 0's buffers in the place of all buffers.

    The parameters that are replaced lose their memory.

    Raises:
        UsageError: a module has parameters on the meta device, and nothing can initialise it.
    """
    plan_of = {slot: entry for entry in planned for slot in entry.slots}
    sharded: dict[PlannedParameter, ShardedParameter] = {}
    for name, module in root.named_modules():
        own = {
            attribute: plan_of[module, attribute]
            for attribute, there in module._parameters.items()
            if there is not None
        }
        if _has_meta(module):
            _materialise(name, module, own, device, initialize)
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[attribute] = buffer.to(device)
        broadcast_from_first([buffer for buffer in module._buffers.values() if buffer is not None], process_group)
        for attribute, entry in own.items():
            if entry not in sharded:
                full = module._parameters[attribute]
                assert full is not None
                sharded[entry] = _shard(entry, full, process_group, device)
            for owner, name_there in entry.slots:
                owner._parameters[name_there] = sharded[entry].shard
    return sharded


def _has_meta(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _materialise(
    name: str,
    module: nn.Module,
    own: dict[str, PlannedParameter],
    device: torch.device,
    initialize: Initialize | None,
) -> None:
    """Give a module's own parameters and buffers memory and values.

    A tied parameter has its values from the module that has it first; what this one would give it is thrown away.
    """
    for attribute, entry in own.items():
        memory = torch.empty_like(entry.parameter, device=device)
        module._parameters[attribute] = nn.Parameter(memory, requires_grad=entry.parameter.requires_grad)
    for attribute, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[attribute] = torch.empty_like(buffer, device=device)
    with torch.no_grad():
        if initialize is not None:
            initialize(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            raise UsageError(
                f"{name or 'the module'} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(); give initialize=, a function that fills the parameters and buffers of the one "
                "module it is called with"
            )


def _shard(
    entry: PlannedParameter, full: nn.Parameter, process_group: dist.ProcessGroup, device: torch.device
) -> ShardedParameter:
    values = full.detach().to(device)
    broadcast_from_first([values], process_group)
    rows = None
    if values.dim() >= 2 and values.numel() > 0:
        rows = Rows(values.shape, process_group.rank(), process_group.size())
        values = values[rows.start : rows.stop]
    shard = nn.Parameter(values.clone(memory_format=torch.contiguous_format), requires_grad=full.requires_grad)
    shard.__dict__.update(vars(entry.parameter))  # marks that users set on parameters
    shape = full.shape
    if not entry.parameter.is_meta:
        entry.parameter.data = entry.parameter.data.new_empty(0)
    return ShardedParameter(entry.names, entry.slots, shard, shape, rows)
