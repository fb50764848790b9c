"""Checkpoints of sharded training, in the format of torch.distributed.checkpoint.

Every tensor is written under the name it has without sharding, in the shards that the ranks have, with its full shape;
so it can be read at another number of ranks, and by a plain model. The optimizer's state goes by parameter names; the
functions for it serve a plain module as well, whose weights are no DTensors.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from trainstep.base.errors import UsageError
from trainstep.base.files import read_json
from trainstep.parallel.checkpoint_files import METADATA, checksums, damaged_file, load_files, read_metadata
from trainstep.parallel.fsdp.extra_state import is_extra_state, set_extra_states
from trainstep.parallel.fsdp.shards import by_identity
from trainstep.parallel.fsdp.wrapper import FullyShardedDataParallel
from trainstep.parallel.partial import updated_in

SUMS = "checksums.json"
State = dict[str, dict[str, Any]]  # parameter name → key → value


def save_checkpoint(
    folder: str | Path, module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write parameters, buffers and the optimizer's state; every rank writes its own shards. All ranks call it.

    Beside torch's files there is `checksums.json`, by which `load_checkpoint` notices damage.
    """
    weights = module.state_dict()
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        names = _names_by_group(module, optimizer)
        groups = [{**group, "params": members} for group, members in zip(optimizer.param_groups, names, strict=True)]
        trained = {name: parameter.shard for name, parameter in module.saved_parameters().items()}
        updated = {name: trained[name] for name in chain(*names)}
        state["optimizer"] = {"state": state_by_name(optimizer, updated, weights), "param_groups": groups}
    sums = Path(folder) / SUMS
    if module.process_group.rank() == 0:
        sums.unlink(missing_ok=True)  # of what is overwritten
    save(state, checkpoint_id=str(folder), process_group=module.process_group)
    if module.process_group.rank() == 0:
        sums.write_text(json.dumps(checksums([*Path(folder).glob("*.distcp"), Path(folder) / METADATA])))


def load_checkpoint(
    folder: str | Path, module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read what `save_checkpoint` wrote, at this or another number of ranks. All ranks call it.

    A plain model reads it by torch's own means: `dcp.load({"model": model.state_dict()}, checkpoint_id=folder)`.

    Raises:
        UsageError: the folder holds no checkpoint, a damaged one, or that of another model or optimizer.
    """
    if not (Path(folder) / METADATA).exists():
        raise UsageError(f"{folder} holds no checkpoint; give a folder that save_checkpoint wrote")
    damage: list[str | None] = [None]
    if module.process_group.rank() == 0:
        damage = [_damage(Path(folder))]
    dist.broadcast_object_list(damage, group=module.process_group, group_src=0)
    if damage[0] is not None:
        raise UsageError(f"the checkpoint in {folder} is damaged: {damage[0]}; load another one")
    metadata = read_metadata(Path(folder))
    weights = module.state_dict()
    state: dict[str, Any] = {"model": weights}
    _check_fit(folder, metadata, weights)
    if optimizer is not None:
        state["optimizer"] = {"state": {}} | empty_optimizer(metadata, weights)
        if len(state["optimizer"]) == 1:
            raise UsageError(f"{folder} holds no optimizer's state; it was saved without one")
    load_files(Path(folder), state, module.process_group)
    set_extra_states(module.module, state["model"])
    if optimizer is not None:
        loaded = state["optimizer"]
        _check_groups(_names_by_group(module, optimizer), [group["params"] for group in loaded["param_groups"]])
        for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
            group.update({**saved, "params": group["params"]})
        trained = {name: parameter.shard for name, parameter in module.saved_parameters().items()}
        load_state_by_name(optimizer, trained, loaded["state"])


def _damage(folder: Path) -> str | None:
    if not (folder / SUMS).exists():
        warnings.warn(f"{folder} has no {SUMS}, so damage to it goes unnoticed; save it anew", stacklevel=3)
        return None
    try:
        return damaged_file(folder, read_json(folder / SUMS, dict[str, str]))
    except UsageError as error:
        return str(error)


def state_by_name(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], weights: Mapping[str, Any]
) -> State:
    """The optimizer's state of parameters, to be saved. Tensors share memory with the optimizer's.

    Args:
        trained: name → what the optimizer updates: a parameter or its shard.
        weights: name → the weight as it is saved. A state with an element for each of the parameter's (a moment, not a
            step count) is saved as the same part of a whole.
    """
    state: State = {}
    with updated_in(optimizer):
        for name, parameter in trained.items():
            state[name] = {key: getattr(own, "plain", own) for key, own in optimizer.state.get(parameter, {}).items()}
            for key, value in state[name].items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name][key] = _part_like(value, weights[name])
    return state


def load_state_by_name(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give the optimizer what `state_by_name` returned of it."""
    with updated_in(optimizer):
        numbers = {id(each): i for i, each in enumerate(chain(*(group["params"] for group in optimizer.param_groups)))}
        numbered = {
            numbers[id(trained[name])]: {key: _local(value) for key, value in values.items()}
            for name, values in state.items()
        }
        optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def empty_optimizer(metadata: Metadata, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of a checkpoint under `optimizer`, with memory to read it into; empty if it holds nothing there."""
    empty: dict[str, Any] = {}
    for flat_name, path in (metadata.planner_data or {}).items():
        if path[0] != "optimizer":
            continue
        stored = metadata.state_dict_metadata[flat_name]
        value: Any = None
        if isinstance(stored, TensorStorageMetadata):
            weight = weights.get(path[2]) if path[1] == "state" else None
            if isinstance(weight, Tensor) and stored.size == weight.shape:
                value = _part_like(torch.empty_like(_local(weight), dtype=stored.properties.dtype), weight)
            else:
                value = torch.empty(stored.size, dtype=stored.properties.dtype)
        set_element(empty, path[1:], value)
    return empty


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _part_like(value: Tensor, weight: Tensor) -> Tensor:
    """A tensor of this rank's part of a weight, as the part of a whole that the weight is."""
    if not isinstance(weight, DTensor):
        return value
    return DTensor.from_local(
        value, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _check_fit(folder: str | Path, metadata: Metadata, weights: Mapping[str, Any]) -> None:
    for name, value in weights.items():
        stored = metadata.state_dict_metadata.get(f"model.{name}")
        if is_extra_state(name) and any(key.startswith(f"model.{name}.") for key in metadata.state_dict_metadata):
            continue  # a dict, of which each entry has a name
        if stored is None:
            raise UsageError(f"{folder} holds another model: it has no {name}")
        if isinstance(value, Tensor) and isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
            shapes = f"shape {tuple(stored.size)}, this one's {tuple(value.shape)}"
            raise UsageError(f"{folder} holds another model: its {name} has {shapes}")


def _names_by_group(module: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    first_name = {parameter: name for name, parameter in module.saved_parameters().items()}
    name_of = {key: first_name[parameter] for key, parameter in by_identity(first_name).items()}
    if any(id(each) not in name_of for group in optimizer.param_groups for each in group["params"]):
        raise UsageError("the optimizer has a parameter that is not this module's; save it with its own module")
    return [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def _check_groups(names: list[list[str]], saved: list[list[str]]) -> None:
    if names != saved:
        different = sorted(set(chain(*names)) ^ set(chain(*saved)))
        raise UsageError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups of {[len(group) for group in saved]} "
            f"parameters, this one {len(names)} of {[len(group) for group in names]}"
            + (f"; only one of them has {different[0]}" if different else "")
            + "; build it as it was built when it was saved"
        )
