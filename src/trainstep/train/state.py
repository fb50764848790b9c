"""What a checkpoint holds of a replica, under names that do not depend on how many ranks there are.

Weights and the optimizer's state go by the parameters' names in the plain module, in full shape, whatever part of them
a rank has. So single, ddp and fsdp read each other's checkpoints at any world size. The sharded optimizer cuts
parameters by their memory instead of by rows and keeps its state in a form of its own, for any world size too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from trainstep.errors import UsageError
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.parallel.process import Process
from trainstep.schemes import SCHEMES
from trainstep.train.agreement import AgreedError, on_all_ranks
from trainstep.train.checkpoints import Checkpoint
from trainstep.training_step import Replica

StateForm = Literal["by name", "in slices"]
"""How the optimizer's state is kept."""


def form_of(replica: Replica) -> StateForm:
    """The form in which this replica's optimizer state is written and read."""
    return "in slices" if isinstance(replica.optimizer, ShardedOptimizer) else "by name"


def training_state(replica: Replica) -> dict[str, Any]:
    """Weights, buffers and optimizer state, for torch.distributed.checkpoint. Tensors share memory with the replica."""
    model = _model_state(replica)
    if isinstance(replica.optimizer, ShardedOptimizer):
        return {"model": model, "optimizer": replica.optimizer}
    state = {}
    for name, parameter in _trained(replica).items():
        values = replica.optimizer.state.get(parameter, {})
        state[name] = {
            key: _part_like(value, model[name]) if _has_shape_of(value, parameter) else value
            for key, value in values.items()
        }
    return {"model": model, "optimizer": {"state": state}}


def load_training_state(checkpoint: Checkpoint, replica: Replica, process: Process, group: dist.ProcessGroup) -> None:
    """Read into the replica what `training_state` was when it was written, by this or another number of ranks.

    Args:
        checkpoint: a complete one.
        replica: of the same model, by any scheme that keeps the optimizer's state in the same form.
        process: this rank; all call it.
        group: a Gloo group of all ranks.

    Raises:
        UsageError: the checkpoint has the optimizer's state in another form, or cannot be read.
    """
    kept, wanted = checkpoint.note.get("form"), form_of(replica)
    if kept != wanted:
        alike = [
            each.name
            for each in SCHEMES.values()
            if each.in_train and (each.wrapper == "sharded-optimizer") == (kept == "in slices")
        ]
        raise AgreedError(
            f"{checkpoint.path} keeps the optimizer's state {kept}, and this scheme {wanted}; go on with --scheme "
            f"{' or '.join(alike)}"
        )
    on_all_ranks(process, functools.partial(_read, checkpoint.path, replica, group))


def _read(path: Path, replica: Replica, group: dist.ProcessGroup) -> None:
    try:
        _load(path, replica, group)
    except (Exception, CheckpointException) as error:
        reason = str(error).strip().splitlines()
        raise UsageError(
            f"{path} cannot be read: {reason[-1] if reason else type(error).__name__}; name an older checkpoint with "
            "--resume-from"
        ) from error


def _load(path: Path, replica: Replica, group: dist.ProcessGroup) -> None:
    model = _model_state(replica)
    if isinstance(replica.optimizer, ShardedOptimizer):
        load({"model": model, "optimizer": replica.optimizer}, checkpoint_id=str(path), process_group=group)
        return
    trained = _trained(replica)
    loaded = _empty_state(path, model)
    load({"model": model, "optimizer": {"state": loaded}}, checkpoint_id=str(path), process_group=group)
    numbers = {
        id(parameter): number
        for number, parameter in enumerate(p for each in replica.optimizer.param_groups for p in each["params"])
    }
    state = {
        numbers[id(trained[name])]: {key: _local(value) for key, value in values.items()}
        for name, values in loaded.items()
    }
    groups = replica.optimizer.state_dict()["param_groups"]
    replica.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _model_state(replica: Replica) -> dict[str, Any]:
    module = replica.module
    return (module.module if isinstance(module, DistributedDataParallel) else module).state_dict()


def _trained(replica: Replica) -> dict[str, nn.Parameter]:
    """What the optimizer updates, by name in the plain module."""
    module = replica.module
    if isinstance(module, FullyShardedDataParallel):
        return {parameter.name: parameter.shard for parameter in module.sharded_parameters()}
    return dict((module.module if isinstance(module, DistributedDataParallel) else module).named_parameters())


def _has_shape_of(value: Any, parameter: nn.Parameter) -> bool:
    """Whether a state is one number per element of the parameter, such as a moment, and not a step count."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _part_like(value: Tensor, weight: Tensor) -> Tensor:
    """A state of a weight as the part of a whole that the weight is."""
    if not isinstance(weight, DTensor):
        return value
    return DTensor.from_local(
        value, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _empty_state(path: Path, model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The checkpoint's optimizer state by parameter name, with memory to read it into."""
    metadata = FileSystemReader(str(path)).read_metadata()
    empty: dict[str, Any] = {}
    for name, where in (metadata.planner_data or {}).items():
        if where[:2] != ("optimizer", "state"):
            continue
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
        weight = model[where[2]]
        if stored.size == weight.shape:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            value: Tensor = _part_like(torch.empty_like(local, dtype=stored.properties.dtype), weight)
        else:
            value = torch.empty(stored.size, dtype=stored.properties.dtype)
        set_element(empty, where[2:], value)
    return empty


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
