"""The optimizer's state of a checkpoint, read in another form than it was written in.

"By name" every state has its parameter's shape and name; "in slices" (the sharded optimizer's) it is a row of all
elements in the order of their memory, under the parameter's number. Of what was written in one form, a rank reads what
it has in the other: a stretch of the row for its rows of a parameter, or the rows that its slice lies in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainstep.base.errors import UsageError
from trainstep.parallel import ShardedOptimizer
from trainstep.parallel.checkpoint_files import Part, load_files, read_metadata
from trainstep.parallel.fsdp.checkpoint import load_state_by_name
from trainstep.parallel.zero.pieces import Piece

SLICES = "in slices"
NAMES = "by name"


def numbering(optimizer: ShardedOptimizer, module: nn.Module) -> dict[str, list[str]]:
    """Numbering that a checkpoint in slices has of itself, so that it can be read by name.

    `names` of the parameters by their number; `unordered`, those whose memory is not in the order of their rows.
    """
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    unordered = [name_of[id(each)] for each in parameters if not each.is_contiguous()]
    return {"names": [name_of[id(each)] for each in parameters], "unordered": unordered}


def read_slices_by_name(
    path: Path,
    told: Mapping[str, Sequence[str]] | None,
    model: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
) -> None:
    """Read `model`, and into an optimizer that keeps state by name what `ShardedOptimizer` wrote.

    Args:
        told: the checkpoint's `numbering`.
        trained: what the optimizer updates, by name in the plain module.

    Raises:
        UsageError: the checkpoint does not say which parameter is which, or has some in another order of memory.
    """
    if told is None:
        raise UsageError("it is of an earlier version, which only --scheme sharded-optimizer reads")
    if told["unordered"]:
        raise UsageError(
            f"it has {', '.join(told['unordered'])} in the order of their memory, which is not that of their rows, and "
            "only --scheme sharded-optimizer reads that"
        )
    metadata, names = read_metadata(path), told["names"]
    state, parts = _Empty("state", "fresh"), {}
    for flat_name, place in (metadata.planner_data or {}).items():
        if place[0] != "optimizer" or place[1] not in ("state", "fresh"):
            continue
        stored = metadata.state_dict_metadata[flat_name]
        if isinstance(stored, TensorStorageMetadata):
            weight = model[names[int(place[2])]]
            if len(stored.size) == 1 and stored.size[0] == weight.numel():
                parts[flat_name] = _stretch(weight, stored)
        state.add(place, stored, parts.get(flat_name))
    load_files(path, {"model": model, "optimizer": state.values}, group, parts)
    by_name = {
        names[int(number)]: {
            key: _shaped(parts.get(f"optimizer.state.{number}.{key}"), value, model[names[int(number)]])
            for key, value in values.items()
        }
        for number, values in state.values["state"].items()
        if not state.values["fresh"][number]
    }
    load_state_by_name(optimizer, trained, by_name)


class _Empty:
    """Contents of a checkpoint under `optimizer`, with memory to read it into where it is no part of something."""

    def __init__(self, *rooms: str) -> None:
        self.values: dict[str, Any] = {room: {} for room in rooms}

    def add(self, place: tuple[Any, ...], stored: Any, part: Part | None) -> None:
        value = None
        if part is None and isinstance(stored, TensorStorageMetadata):
            value = torch.empty(stored.size, dtype=stored.properties.dtype)
        set_element(self.values, place[1:], value)


def _stretch(weight: Tensor, stored: TensorStorageMetadata) -> Part:
    """The part of a row of all elements that this rank's rows of a weight are."""
    local, start = weight, 0
    if isinstance(weight, DTensor):
        local = weight.to_local()
        _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        start = offsets[0] * (weight.numel() // weight.shape[0]) if weight.dim() and weight.shape[0] else 0
    tensor = torch.empty(local.numel(), dtype=stored.properties.dtype, device=local.device)
    return Part(torch.Size([weight.numel()]), torch.Size([start]), tensor)


def _shaped(part: Part | None, value: Any, weight: Tensor) -> Any:
    if part is None:
        return value
    return part.tensor.view((weight.to_local() if isinstance(weight, DTensor) else weight).shape)


def read_names_in_slices(
    path: Path, model: dict[str, Any], optimizer: ShardedOptimizer, module: nn.Module, group: dist.ProcessGroup
) -> None:
    """Read `model`, and into a `ShardedOptimizer` what was written by name."""
    metadata, names = read_metadata(path), numbering(optimizer, module)["names"]
    pieces = {names[piece.number]: piece for piece in optimizer.pieces() if piece.mine is not None}
    state, parts = _Empty("state"), {}
    for flat_name, place in (metadata.planner_data or {}).items():
        if place[:2] != ("optimizer", "state") or place[2] not in pieces:
            continue
        stored, piece = metadata.state_dict_metadata[flat_name], pieces[str(place[2])]
        is_whole = isinstance(stored, TensorStorageMetadata) and stored.size == piece.parameter.shape
        if is_whole and piece.parameter.dim() > 0:
            parts[flat_name] = _rows_around(piece, stored)
        state.add(place, stored, parts.get(flat_name))
    load_files(path, {"model": model, "optimizer": state.values}, group, parts)
    by_number = {
        str(pieces[name].number): {
            key: _cut(parts.get(f"optimizer.state.{name}.{key}"), value, pieces[name]) for key, value in values.items()
        }
        for name, values in state.values["state"].items()
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def _rows_around(piece: Piece, stored: Any) -> Part:
    """The rows in which this rank's slice lies; all, where it has all, or where memory is not in the order of rows."""
    size, device = stored.size, piece.parameter.device
    first, last = 0, size[0]
    if piece.owner is None and piece.parameter.is_contiguous():
        assert piece.mine is not None, "only what this rank updates is read"
        start, width = _start(piece), piece.parameter.numel() // size[0]
        first, last = start // width, -(-(start + piece.mine.numel()) // width)
    offsets = torch.Size([first, *[0] * (len(size) - 1)])
    return Part(size, offsets, torch.empty((last - first, *size[1:]), dtype=stored.properties.dtype, device=device))


def _cut(part: Part | None, value: Any, piece: Piece) -> Any:
    """This rank's slice, in a row; what it has whole stays as it is, and the optimizer cuts what has another order."""
    if part is None:
        return value
    if piece.owner is not None or not piece.parameter.is_contiguous():
        return part.tensor
    assert piece.mine is not None, "only what this rank updates is read"
    width = piece.parameter.numel() // part.shape[0]
    start = _start(piece) - part.offsets[0] * width
    return part.tensor.view(-1)[start : start + piece.mine.numel()].clone()


def _start(piece: Piece) -> int:
    assert piece.mine is not None, "only what this rank updates is read"
    return int(piece.mine.storage_offset() - piece.parameter.storage_offset())
