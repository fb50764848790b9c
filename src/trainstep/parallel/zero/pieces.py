"""Pieces of parameters that a rank updates, the buckets they are updated and exchanged in, and their state as it is
kept.

A parameter is cut into equal slices of its memory, so that its gradient can be reduce-scattered, and the parameter
gathered again, in place and without padding. What cannot be cut evenly goes whole to the rank that has least so far;
those are small or rare. Optimizers that are not elementwise (they need a matrix as a matrix) get whole parameters only.

In state dicts a slice is a one-dimensional DTensor over the parameter's elements in the order of their memory, a whole
parameter of an elementwise optimizer flattened likewise. So what was written by two ranks can be read by four, by one,
or by three, for which the same parameter may be whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import all_gather_slices, broadcast
from trainstep.parallel.ddp.scattered import ScatteredGradient
from trainstep.parallel.gloo import Waitable
from trainstep.parallel.side_stream import Pending, SideStream
from trainstep.parallel.slices import flat, is_lazy, laid_out_as, slice_of
from trainstep.parallel.transport.by_collectives import Start
from trainstep.parallel.transport.by_copies import Transport, padded


@dataclass(frozen=True)
class Piece:
    """A parameter, and what this rank updates of it."""

    number: int  # position among all parameters of the optimizer, as in its state dict
    group: int
    parameter: nn.Parameter
    owner: int | None  # the rank that updates all of it; None where every rank updates its slice
    mine: nn.Parameter | None  # what this rank updates: its slice, sharing memory, or the parameter, or nothing


def cut(
    parameters: Iterable[tuple[int, int, nn.Parameter]], *, rank: int, loads: list[int], sliced: bool
) -> list[Piece]:
    """Divide `parameters`, (number, group, parameter), among the ranks, evenly by bytes; `sliced`: they may be cut.

    To `loads`, the bytes that each rank has as whole parameters, these are added.
    """
    parameters, world_size = list(parameters), len(loads)
    owners: dict[int, int | None] = {}  # None: sliced
    whole = []
    for number, _, parameter in parameters:
        divisible = parameter.dim() > 0 and parameter.numel() % world_size == 0 and not parameter.is_complex()
        if sliced and world_size > 1 and divisible:
            owners[number] = None
        else:
            whole.append((parameter.nbytes, number))
    for size, number in sorted(whole, key=lambda item: (-item[0], item[1])):  # the largest first, to the least loaded
        owner = min(range(world_size), key=lambda each: (loads[each], each))
        loads[owner] += size
        owners[number] = owner
    pieces = []
    for number, group, parameter in parameters:
        owned_by = owners[number]
        mine = parameter if owned_by == rank else None
        if owned_by is None:
            mine = nn.Parameter(slice_of(parameter.detach(), rank, world_size))
        pieces.append(Piece(number, group, parameter, owned_by, mine))
    return pieces


@dataclass(frozen=True)
class GathersBeside:
    """Function that gathers slices while something else is computed."""

    transport: Transport
    stream: SideStream
    device: torch.device


@dataclass
class ParameterBucket:
    """Parameters of one dtype and device, all of them sliced or none, that are gathered in as few calls as can be."""

    pieces: list[Piece]
    optimizer: torch.optim.Optimizer | None  # updates this rank's part; None where it has none
    groups: list[int]  # for each parameter group of `optimizer`, which one of the whole it belongs to
    _gather: Start | None = field(default=None, init=False)

    @property
    def slice_bytes(self) -> int:
        """Bytes of this rank's slices, each as it is staged for a gather."""
        return sum(padded(mine.nbytes) for _, mine in self.slices())

    def states(self) -> list[tuple[Piece, dict[str, Any] | None]]:
        """Pieces that this rank updates, in the order of `optimizer`, each with its state; None before its first
        step."""
        return [
            (piece, self.optimizer.state.get(piece.mine))
            for group in self.groups
            for piece in self.pieces
            if piece.group == group and piece.mine is not None and self.optimizer is not None
        ]

    def groups_beside(self, param_groups: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each parameter group of `optimizer`, and the one of the whole, in `param_groups`, that it belongs to."""
        own = [] if self.optimizer is None else self.optimizer.param_groups
        return [(group, param_groups[index]) for group, index in zip(own, self.groups, strict=True)]

    def slices(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter, this rank's slice) for what is sliced."""
        return [(p.parameter, p.mine) for p in self.pieces if p.owner is None and p.mine is not None]

    @functools.cached_property
    def _sliced(self) -> list[Tensor]:
        """Slices, as views that are made once: the optimizer raises where these parameters were moved."""
        return [flat(parameter.detach()) for parameter, _ in self.slices()]

    @functools.cached_property
    def _mine(self) -> list[Tensor]:
        """This rank's slice of each, likewise."""
        return [mine.detach() for _, mine in self.slices()]

    def update(self, process_group: dist.ProcessGroup) -> None:
        if self.optimizer is None:
            return
        rank, size = process_group.rank(), process_group.size()
        for parameter, mine in self.slices():
            if not isinstance(parameter.grad, ScatteredGradient):  # else the slice's is there
                gradient = None if parameter.grad is None else laid_out_as(parameter, parameter.grad)
                mine.grad = None if gradient is None else slice_of(gradient, rank, size)
        self.optimizer.step()
        for parameter, mine in self.slices():
            if not isinstance(parameter.grad, ScatteredGradient):
                mine.grad = None  # a view of the whole gradient, which would live on with it

    def exchange(self, process_group: dist.ProcessGroup, beside: GathersBeside | None = None) -> list[Waitable]:
        """Start giving every rank the new parameters, slices by `beside` if it is given."""
        if process_group.size() == 1:
            return []
        if self.pieces[0].owner is None and beside is not None and self.pieces[0].parameter.device == beside.device:
            if self._gather is None and not any(map(is_lazy, self._sliced)):  # whose bytes are not their values
                self._gather = beside.transport.gather_of([each.view(torch.uint8) for each in self._sliced])
            if self._gather is not None:
                return [beside.stream.run(self._gather)]
        if self.pieces[0].owner is None:
            return [all_gather_slices(self._sliced, process_group, self._mine)]
        calls: list[Waitable] = []
        for owner in range(process_group.size()):
            owned = [flat(piece.parameter.detach()) for piece in self.pieces if piece.owner == owner]
            if owned:
                calls.append(_broadcast(owned, owner, process_group))
        return calls


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a parameter group besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _broadcast(tensors: list[Tensor], owner: int, process_group: dist.ProcessGroup) -> Waitable:
    """Send one rank's tensors to the others in one call; its wait puts them in place."""
    together = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    work = broadcast(together, owner, process_group)

    def unpack() -> None:
        if len(tensors) == 1 or process_group.rank() == owner:
            return
        parts = together.split([tensor.numel() for tensor in tensors])
        if not any(map(is_lazy, tensors)):
            torch._foreach_copy_(tensors, list(parts))
            return
        for tensor, part in zip(tensors, parts, strict=True):  # torch's call over lists refuses lazy ones
            tensor.copy_(part)

    return Pending(work=work, then=unpack)


def dump(
    buckets: list[ParameterBucket],
    groups: list[dict[str, Any]],
    process_group: dist.ProcessGroup,
    twin: Callable[[ParameterBucket], ParameterBucket],
) -> dict[str, Any]:
    """This rank's part. `fresh` marks parameters without state yet; they have that of the bucket's `twin`.

    Parameters' numbers are strings here, since torch.distributed.checkpoint makes strings of them.
    """
    state: dict[str, dict[str, Any]] = {}
    fresh: dict[str, bool] = {}
    mesh = functools.cache(functools.partial(DeviceMesh.from_group, process_group))
    for bucket in buckets:
        own = bucket.states()
        stand_ins = twin(bucket).states() if any(values is None for _, values in own) else own
        for (piece, values), (_, stand_in) in zip(own, stand_ins, strict=True):
            name, filled = str(piece.number), (stand_in if values is None else values) or {}
            fresh[name] = values is None
            state[name] = {key: _portable(value, piece, mesh) for key, value in filled.items()}
    return {"state": state, "fresh": fresh, "param_groups": _numbered(groups)}


def consolidate(
    buckets: list[ParameterBucket], groups: list[dict[str, Any]], process_group: dist.ProcessGroup
) -> dict[str, Any]:
    """The undivided optimizer's state dict, on CPU on the first of all ranks; empty on the others."""
    is_first = process_group.rank() == 0
    state: dict[int, dict[str, Any]] = {}
    whole: dict[int, dict[str, Any]] = {}
    for piece, values in (each for bucket in buckets for each in bucket.states() if each[1]):
        assert values is not None
        if piece.owner is None:
            values = {key: _gathered(value, piece, process_group) for key, value in values.items()}
        if piece.owner is not None or is_first:
            kept = state if piece.owner is None else whole
            kept[piece.number] = {
                key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
    received: list[Any] | None = [None] * process_group.size() if is_first else None
    dist.gather_object(whole, received, group=process_group, group_dst=0)
    if received is None:
        return {}
    for owned in received:
        state |= owned
    return {"state": dict(sorted(state.items())), "param_groups": _numbered(groups)}


def restore(buckets: list[ParameterBucket], groups: list[dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
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


def _numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


def _portable(value: Any, piece: Piece, mesh: Callable[[str], DeviceMesh]) -> Any:
    if not _is_elementwise(value, piece):
        return value
    if piece.owner is not None:
        return flat(value)
    shape, own_mesh = torch.Size([piece.parameter.numel()]), mesh(piece.parameter.device.type)
    return DTensor.from_local(value, own_mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


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
