"""The state of a sharded optimizer, written and read: each rank's own part, or all of it together.

A slice is kept as a one-dimensional DTensor over the parameter's elements in the order of their memory, a whole
parameter of an elementwise optimizer flattened likewise. So what was written by two ranks can be read by four, by one,
or by three, for which the same parameter may be whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainstep.errors import UsageError
from trainstep.parallel.collectives import all_gather_slices, flat, slice_of
from trainstep.parallel.zero.slices import ParameterBucket, Piece, hyper_parameters

Groups = list[dict[str, Any]]


def dump(
    buckets: list[ParameterBucket],
    groups: Groups,
    process_group: dist.ProcessGroup,
    twin: Callable[[ParameterBucket], ParameterBucket],
) -> dict[str, Any]:
    """This rank's part. `fresh` marks parameters without state yet; they have that of the bucket's `twin`.

    Parameters' numbers are strings here, since torch.distributed.checkpoint makes strings of them.
    """
    state: dict[str, dict[str, Any]] = {}
    fresh: dict[str, bool] = {}
    meshes: dict[str, DeviceMesh] = {}
    for bucket in buckets:
        own = bucket.states()
        stand_ins = twin(bucket).states() if any(values is None for _, values in own) else own
        for (piece, values), (_, stand_in) in zip(own, stand_ins, strict=True):
            name, device = str(piece.number), piece.parameter.device.type
            fresh[name] = values is None
            if piece.owner is None and device not in meshes:
                meshes[device] = DeviceMesh.from_group(process_group, device)
            filled = (stand_in if values is None else values) or {}
            state[name] = {key: _portable(value, piece, meshes.get(device)) for key, value in filled.items()}
    return {"state": state, "fresh": fresh, "param_groups": _numbered(groups)}


def consolidate(buckets: list[ParameterBucket], groups: Groups, process_group: dist.ProcessGroup) -> dict[str, Any]:
    """The undivided optimizer's state dict, on CPU on the first rank of the group; empty on the others."""
    is_first = process_group.rank() == 0
    state: dict[int, dict[str, Any]] = {}
    whole: dict[int, dict[str, Any]] = {}
    for piece, values in (each for bucket in buckets for each in bucket.states() if each[1]):
        assert values is not None
        if piece.owner is not None:
            whole[piece.number] = {key: _on_cpu(value) for key, value in values.items()}
            continue
        full = {key: _gathered(value, piece, process_group) for key, value in values.items()}
        if is_first:
            state[piece.number] = {key: _on_cpu(value) for key, value in full.items()}
    received: list[Any] | None = [None] * process_group.size() if is_first else None
    dist.gather_object(whole, received, group=process_group, group_dst=0)
    if received is None:
        return {}
    for owned in received:
        state |= owned
    return {"state": dict(sorted(state.items())), "param_groups": _numbered(groups)}


def restore(buckets: list[ParameterBucket], groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Take over this rank's part of a state dict made by `dump` or `consolidate`, or by the undivided optimizer."""
    loaded = state_dict["param_groups"]
    counts, expected = [len(group["params"]) for group in loaded], [len(group["params"]) for group in groups]
    if counts != expected:
        raise UsageError(
            f"the state dict has parameter groups of {counts} parameters, this optimizer of {expected}; load it into "
            "an optimizer over the same model, with the same groups"
        )
    for group, values in zip(groups, loaded, strict=True):
        group.update(hyper_parameters(values))
    numbers = [number for group in loaded for number in group["params"]]
    fresh = state_dict.get("fresh", {})
    for bucket in buckets:
        if bucket.optimizer is None:
            continue
        state = {}
        for position, (piece, _) in enumerate(bucket.states()):
            number = numbers[piece.number]
            values = state_dict["state"].get(str(number), state_dict["state"].get(number))
            if values and not fresh.get(str(number), False):
                state[position] = {key: _own_part(value, piece) for key, value in values.items()}
        groups_now = bucket.optimizer.state_dict()["param_groups"]
        bucket.optimizer.load_state_dict({"state": state, "param_groups": groups_now})


def _numbered(groups: Groups) -> Groups:
    """The groups with numbers in place of parameters, as in every optimizer's state dict."""
    numbers = itertools.count()
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": list(itertools.islice(numbers, len(group["params"])))}
        for group in groups
    ]


def _is_elementwise(value: Any, piece: Piece) -> bool:
    assert piece.mine is not None
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.mine.shape


def _portable(value: Any, piece: Piece, mesh: DeviceMesh | None) -> Any:
    if not _is_elementwise(value, piece):
        return value
    if piece.owner is not None:
        return flat(value)
    assert mesh is not None
    shape = torch.Size([piece.parameter.numel()])
    return DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def _gathered(value: Any, piece: Piece, process_group: dist.ProcessGroup) -> Any:
    if not _is_elementwise(value, piece):
        return value
    full = torch.empty_like(piece.parameter, dtype=value.dtype, requires_grad=False)
    slice_of(full, process_group.rank(), process_group.size()).copy_(value)
    all_gather_slices([full], process_group).wait()
    return full


def _own_part(value: Any, piece: Piece) -> Any:
    """This rank's part of a loaded value: a DTensor, all elements in a row, or a tensor of the parameter's shape."""
    if isinstance(value, DTensor):
        value = value.to_local()
    assert piece.mine is not None
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape == piece.mine.shape:
        return value
    if value.numel() != piece.parameter.numel():
        return value  # not one element per element, such as a factored second moment
    row = value
    if value.dim() > 1:  # to the order that the parameter has its elements in memory
        row = torch.empty_like(piece.parameter, dtype=value.dtype, device=value.device, requires_grad=False)
        row = flat(row.copy_(value.view(piece.parameter.shape)))
    if piece.owner is None:
        start = piece.mine.storage_offset() - piece.parameter.storage_offset()
        return row[start : start + piece.mine.numel()].clone()
    shaped = torch.empty_like(piece.mine, dtype=value.dtype, device=value.device, requires_grad=False)
    flat(shaped).copy_(row)
    return shaped


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
