"""Checkpoints of sharded training, in the format of torch.distributed.checkpoint.

Every tensor is written under the name it has without sharding, in the pieces that the ranks have, with its full shape;
so it can be read at another number of ranks, and by a plain model. The optimizer's state goes by parameter names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainstep.errors import UsageError
from trainstep.parallel.sharding.parameter import ShardedParameter

if TYPE_CHECKING:
    from trainstep.parallel.fsdp import FullyShardedDataParallel


def save_checkpoint(
    folder: str | Path, module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write parameters, buffers and the optimizer's state; every rank writes its own part. All ranks call it."""
    state: dict[str, Any] = {"model": module_state(module)}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(module, optimizer)
    save(state, checkpoint_id=str(folder), process_group=module.process_group)


def load_checkpoint(
    folder: str | Path, module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what `save_checkpoint` wrote, at this or another number of ranks. All ranks call it.

    A plain model reads it by torch's own means: `dcp.load({"model": model.state_dict()}, checkpoint_id=folder)`.

    Raises:
        UsageError: the folder holds no checkpoint, or that of another model or optimizer.
    """
    if not (Path(folder) / ".metadata").exists():
        raise UsageError(f"{folder} holds no checkpoint; give a folder that save_checkpoint wrote")
    metadata = FileSystemReader(str(folder)).read_metadata()
    state: dict[str, Any] = {"model": module_state(module)}
    _check_fit(folder, metadata, state["model"])
    if optimizer is not None:
        state["optimizer"] = _empty_optimizer_state(folder, metadata, module)
    load(state, checkpoint_id=str(folder), process_group=module.process_group)
    if optimizer is not None:
        _load_optimizer(module, optimizer, state["optimizer"])


def _check_fit(folder: str | Path, metadata: Metadata, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        stored = metadata.state_dict_metadata.get(f"model.{name}")
        if stored is None:
            raise UsageError(f"{folder} holds another model: it has no {name}")
        if isinstance(value, Tensor) and isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
            raise UsageError(
                f"{folder} holds another model: its {name} has shape {tuple(stored.size)}, this one's "
                f"{tuple(value.shape)}"
            )


def module_state(module: FullyShardedDataParallel) -> dict[str, Any]:
    """Parameters and buffers by their names without sharding. Tensors share memory with the module's."""
    by_name = {name: parameter for parameter in module.sharded_parameters() for name in parameter.names}
    mesh = _mesh(module)
    return {
        name: _as_saved(by_name[name], by_name[name].shard.detach(), mesh) if name in by_name else value
        for name, value in module.module.state_dict().items()
    }


def load_module_state(module: FullyShardedDataParallel, state: Mapping[str, Any], *, strict: bool) -> None:
    """Copy `state`, of DTensors or of full tensors, into the module.

    Raises:
        UsageError: a shape is wrong; or, if `strict`, names are missing or unknown.
    """
    own = module_state(module)
    by_name = {name: parameter for parameter in module.sharded_parameters() for name in parameter.names}
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if strict and (missing or unknown):
        raise UsageError(
            f"the state does not fit: missing are {', '.join(missing) or 'none'}; "
            f"unknown are {', '.join(unknown) or 'none'}"
        )
    with torch.no_grad():
        for name in own.keys() & state.keys():
            value = state[name]
            if not isinstance(value, Tensor):
                continue
            if value.shape != own[name].shape:
                raise UsageError(f"{name} has shape {tuple(value.shape)}; expected {tuple(own[name].shape)}")
            parameter = by_name.get(name)
            if parameter is None:
                own[name].copy_(value)
            elif parameter.rows is None:
                parameter.shard.copy_(value)
            elif isinstance(value, DTensor):
                here = value.redistribute(_mesh(module), [Shard(0)]).to_local()
                parameter.shard.copy_(here)
            else:
                parameter.shard.copy_(value[parameter.rows.start : parameter.rows.stop])


def _mesh(module: FullyShardedDataParallel) -> DeviceMesh:
    return DeviceMesh.from_group(module.process_group, module.device.type)


def _as_saved(parameter: ShardedParameter, local: Tensor, mesh: DeviceMesh) -> Tensor:
    """A tensor of the shard's shape as the part of a whole that it is."""
    if parameter.rows is None:
        return local
    stride = torch.empty(parameter.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=stride)


def _optimizer_state(module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_shard = {id(parameter.shard): parameter for parameter in module.sharded_parameters()}
    mesh = _mesh(module)
    state: dict[str, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        names = []
        for shard in group["params"]:
            if id(shard) not in of_shard:
                raise UsageError("the optimizer has a parameter that is not this module's; save it with its own module")
            parameter = of_shard[id(shard)]
            names.append(parameter.name)
            state[parameter.name] = {
                key: _as_saved(parameter, value, mesh) if _is_like(value, shard) else value
                for key, value in optimizer.state.get(shard, {}).items()
            }
        groups.append({**group, "params": names})
    return {"state": state, "param_groups": groups}


def _is_like(value: Any, shard: Tensor) -> bool:
    """Whether a state is one number per element of the parameter, such as a moment, and not a step count."""
    return isinstance(value, Tensor) and value.shape == shard.shape


def _empty_optimizer_state(folder: str | Path, metadata: Metadata, module: FullyShardedDataParallel) -> dict[str, Any]:
    """The checkpoint's optimizer state with memory to read it into."""
    by_name = {parameter.name: parameter for parameter in module.sharded_parameters()}
    mesh = _mesh(module)
    empty: dict[str, Any] = {}
    for flat, path in (metadata.planner_data or {}).items():
        if path[0] != "optimizer":
            continue
        stored = metadata.state_dict_metadata[flat]
        value: Any = None
        if isinstance(stored, TensorStorageMetadata):
            dtype = stored.properties.dtype
            parameter = by_name.get(path[2]) if path[1] == "state" else None
            if parameter is not None and stored.size == parameter.shape:
                value = _as_saved(parameter, torch.empty_like(parameter.shard.detach(), dtype=dtype), mesh)
            else:
                value = torch.empty(stored.size, dtype=dtype)
        set_element(empty, path[1:], value)
    if not empty:
        raise UsageError(f"{folder} holds no optimizer's state; it was saved without one")
    return {"state": {}} | empty


def _load_optimizer(module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    of_shard = {id(parameter.shard): parameter for parameter in module.sharded_parameters()}
    names = [[of_shard[id(shard)].name for shard in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in loaded["param_groups"]]
    if names != saved:
        different = sorted({name for group in names for name in group} ^ {name for group in saved for name in group})
        raise UsageError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups of {[len(group) for group in saved]} "
            f"parameters, this one {len(names)} of {[len(group) for group in names]}"
            + (f"; only one of them has {different[0]}" if different else "")
            + "; build it as it was built when it was saved"
        )
    index = {name: position for position, name in enumerate(name for group in names for name in group)}
    state = {
        index[name]: {key: _local(value) for key, value in values.items()} for name, values in loaded["state"].items()
    }
    start, groups = 0, []
    for group, members in zip(loaded["param_groups"], names, strict=True):
        groups.append({**group, "params": list(range(start, start + len(members)))})
        start += len(members)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
