"""The checkpoints of a run: what they hold, written beside training, complete or not there, the newest ones kept.

All ranks write their parts into a hidden folder, in a thread, while training goes on; the tensors were copied to the
host before. When every rank's part is on disk, rank 0 adds a note (what was trained, and every file's size and
checksum) and renames the folder. So a folder called `step-…` is a complete checkpoint, whenever a process was killed or
a host lost its power, and one that was damaged since is not loaded. What is hidden is removed at the next start. Each
start hides under a name of its own: a host that was cut off may still write what an earlier start had begun.

Weights and the optimizer's state go by the parameters' names in the plain module, in full shape, whatever part of them
a rank has. The sharded optimizer cuts parameters by their memory instead of by rows and keeps its state in a form of
its own, "in slices": a row of all elements in the order of their memory, under the parameter's number. All schemes read
each other's checkpoints, at any world size. Of what was written in one form, a rank reads what it has in the other: a
stretch of the row for its rows of a parameter, or the rows that its slice lies in.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainstep.base.errors import UsageError
from trainstep.base.files import read_json
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.parallel.checkpoint_files import Part, checksums, damaged_file, load_files, read_metadata
from trainstep.parallel.fsdp.checkpoint import empty_optimizer, load_state_by_name, state_by_name
from trainstep.parallel.process import Process, on_all_ranks
from trainstep.parallel.rollcall import is_of_a_collective
from trainstep.parallel.zero.pieces import Piece
from trainstep.step.training_step import Replica

SLICES = "in slices"
NAMES = "by name"
NOTE = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8})")
_HIDDEN = re.compile(r"\.step-\d{8}\.([0-9a-f]{8}\.)?(writing|removed)")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int  # updates made when it was taken
    note: Mapping[str, Any]
    """`identity`; `form` of the optimizer's state, and its `slices`; `world_size`; `tokens` trained on;
    `resumed_from`, which its command was told to go back to; `files` with their sizes; their `sha256`."""


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there, oldest first."""
    return sorted(int(found[1]) for path in folder.glob("step-*") if (found := _NAME.fullmatch(path.name)))


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def open_checkpoint(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, after a look at all its files.

    Raises:
        UsageError: a file is missing or is not what was written; older checkpoints are named.
    """
    path = folder / name_of(step)
    instead = "there is no older checkpoint; start anew with another --out"
    if older := [name_of(each) for each in steps_in(folder) if each < step]:
        instead = f"to go on from an older one, give --resume-from {older[-1]}"
    try:
        note = read_json(path / NOTE, dict[str, Any])
        files, sums = dict(note["files"]), dict(note["sha256"])
        if note["note_sha256"] != _sum_of_note(note):
            raise ValueError("its content is not what was written")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"checkpoint {path} is damaged: {NOTE} cannot be read ({error}); {instead}") from error
    for name, size in files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise UsageError(f"checkpoint {path} is damaged: {name} {what}; {instead}")
    if damage := damaged_file(path, sums):
        raise UsageError(f"checkpoint {path} is damaged: {damage}; {instead}")
    return Checkpoint(path, step, note)


def _sum_of_note(note: Mapping[str, Any]) -> str:
    told = {name: value for name, value in note.items() if name != "note_sha256"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def tidy(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for path in folder.glob("*"):
        if _HIDDEN.fullmatch(path.name):
            shutil.rmtree(path)


def set_aside(folder: Path, steps: Iterable[int]) -> list[str]:
    """Rename the checkpoints of these steps, so that training may come there again; returns their new names."""
    renamed = []
    for step in steps:
        names = (folder / f"aside-{number}-{name_of(step)}" for number in itertools.count(1))
        target = next(name for name in names if not name.exists())
        (folder / name_of(step)).rename(target)
        renamed.append(target.name)
    return renamed


class CheckpointWriter:
    """Writes checkpoints of all ranks; every rank has one and calls it at the same steps.

    Args:
        folder: seen by all ranks; `keep` of its checkpoints, the newest, stay.
        group: a Gloo group of all ranks that nothing else uses, since it is used from a thread; `close` ends it.
        last: the step of the checkpoint that the run goes on from; None where there is none.
    """

    def __init__(self, folder: Path, *, keep: int, group: dist.ProcessGroup, last: int | None) -> None:
        self.folder, self._keep, self.group = folder, keep, group
        self._underway: tuple[int, Future[Any], Mapping[str, Any]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        mark = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(mark, group=group, group_src=0)
        self._mark = mark[0]
        self.last = last  # step of the last checkpoint that is complete, as far as this process has seen

    def save(self, step: int, state: dict[str, Any], note: Mapping[str, Any]) -> None:
        """Copy `state` to the host and start writing it; waits for the checkpoint before, if it is still under way."""
        self.wait()
        saved = async_save(state, checkpoint_id=str(self._hidden(step)), process_group=self.group)
        assert isinstance(saved, Future), "the default stager answers when the copy is made"
        if self.group.rank() == 0:
            saved = self._thread.submit(self._summed, saved, self._hidden(step))
        self._underway = (step, saved, note)

    def poll(self) -> None:
        """If the checkpoint under way is written, complete it. Takes no time."""
        if self._underway is not None and self._underway[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint under way and complete it.

        Raises:
            UsageError: it could not be written; the one before is still there. Where other ranks were missing, this is
                of a collective's error.
        """
        if self._underway is None:
            return
        step, saved, note = self._underway
        self._underway = None
        try:
            sums = saved.result()
            if self.group.rank() == 0:
                self._complete(step, note, sums)
        except (Exception, CheckpointException) as error:
            last = self.last
            before = "there is none before it" if last is None else f"the last complete one is {name_of(last)}"
            told = f"checkpoint {name_of(step)} could not be written: {_last_line(error)}; {before}"
            if not is_of_a_collective(error):
                told += f". See that there is room in {self.folder}, then give the same command again to go on"
            raise UsageError(told) from error
        self.last = step

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        dist.destroy_process_group(self.group)

    @staticmethod
    def _summed(saved: Future[Any], hidden: Path) -> dict[str, str]:
        saved.result()  # there when every rank's files are
        return checksums(sorted(hidden.iterdir()))

    def _complete(self, step: int, note: Mapping[str, Any], sums: Mapping[str, str]) -> None:
        hidden = self._hidden(step)
        files = {name: (hidden / name).stat().st_size for name in sums}
        whole = {"step": step, **note, "files": files, "sha256": sums}
        whole["note_sha256"] = _sum_of_note(json.loads(json.dumps(whole)))
        with (hidden / NOTE).open("w", encoding="utf-8") as file:
            file.write(json.dumps(whole, indent=1))
            file.flush()
            os.fsync(file.fileno())  # the other files' writer did the same
        _keep(hidden)
        hidden.rename(self.folder / name_of(step))
        _keep(self.folder)
        for old in steps_in(self.folder)[: -self._keep]:
            leaving = self.folder / f".{name_of(old)}.removed"
            (self.folder / name_of(old)).rename(leaving)  # at once: half a folder never has a checkpoint's name
            shutil.rmtree(leaving)

    def _hidden(self, step: int) -> Path:
        return self.folder / f".{name_of(step)}.{self._mark}.writing"


def _keep(folder: Path) -> None:
    """Have the disk keep what the folder's entries are now, whatever happens to the host."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def form_of(replica: Replica) -> dict[str, Any]:
    """Form in which this replica's optimizer state is written, for a checkpoint's note."""
    if isinstance(replica.optimizer, ShardedOptimizer):
        return {"form": SLICES, "slices": numbering(replica.optimizer, _plain(replica.module))}
    return {"form": NAMES}


def training_state(replica: Replica) -> dict[str, Any]:
    """Weights, buffers and optimizer state, for torch.distributed.checkpoint. Tensors share memory with the replica."""
    model = _plain(replica.module).state_dict()
    if isinstance(replica.optimizer, ShardedOptimizer):
        return {"model": model, "optimizer": replica.optimizer}
    state = state_by_name(replica.optimizer, _trained(replica), model)
    return {"model": model, "optimizer": {"state": state}}


def load_training_state(checkpoint: Checkpoint, replica: Replica, process: Process, group: dist.ProcessGroup) -> None:
    """Read into the replica what `training_state` was when it was written, by this or another number of ranks.

    All ranks call it; `group` is a Gloo group of them. The replica is of the same model, by any scheme.

    Raises:
        UsageError: the checkpoint cannot be read.
    """
    on_all_ranks(process, functools.partial(_load, checkpoint, replica, group))


def _load(checkpoint: Checkpoint, replica: Replica, group: dist.ProcessGroup) -> None:
    path, plain, optimizer = checkpoint.path, _plain(replica.module), replica.optimizer
    model, was = plain.state_dict(), checkpoint.note.get("form")
    try:
        if isinstance(optimizer, ShardedOptimizer):
            if was == SLICES:
                load_files(path, {"model": model, "optimizer": optimizer}, group)
            else:
                read_names_in_slices(path, model, optimizer, plain, group)
        elif was == SLICES:
            read_slices_by_name(path, checkpoint.note["slices"], model, optimizer, _trained(replica), group)
        else:  # an optimizer without state, as plain SGD, leaves nothing in a checkpoint
            state: Any = {"state": {}} | empty_optimizer(read_metadata(path), model)
            load_files(path, {"model": model, "optimizer": state}, group)
            load_state_by_name(optimizer, _trained(replica), state["state"])
    except (Exception, CheckpointException) as error:
        why = f"{_last_line(error)}; name an older checkpoint with --resume-from"
        raise UsageError(f"{path} cannot be read: {why}") from error


def _plain(module: nn.Module) -> nn.Module:
    """Module inside DistributedDataParallel; FSDP answers for the module itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def _trained(replica: Replica) -> dict[str, nn.Parameter]:
    """Parameters that the optimizer updates, by name in the plain module."""
    if isinstance(replica.module, FullyShardedDataParallel):
        return {name: parameter.shard for name, parameter in replica.module.saved_parameters().items()}
    return dict(_plain(replica.module).named_parameters())


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


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
    told: Mapping[str, Sequence[str]],
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
