"""Calls to other ranks that are under way in this process, also those that torch's own tools do not see.

Copies between GPUs and our calls over Gloo are *announced*: operators that do nothing tell torch's dispatcher, where a
recorder of collectives (`measure.collectives`) or a profile finds the tensors and the number of ranks. Copies are
*noted* as well. `started` returns those and torch's own calls, which its flight recorder has: a ring of the last 2,000
calls of Gloo and NCCL (`TORCH_FR_BUFFER_SIZE`) that any thread may read. Where it is switched off, they are not found.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

Announced = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

_library = torch.library.Library("trainstep_exchanges", "DEF")
for _name in get_args(Announced):
    _library.define(f"{_name}(Tensor[] payload, int ranks) -> ()")
    _library.impl(_name, lambda payload, ranks: None, "CompositeExplicitAutograd")


def announce(name: Announced, payload: Sequence[Tensor], ranks: int) -> None:
    """Say that `payload`, the full tensors that are gathered, exchanged or reduced, is about to be sent."""
    profiled = torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
    if torch._C._len_torch_dispatch_stack() or profiled:  # else nobody watches
        getattr(torch.ops.trainstep_exchanges, name)(list(payload), ranks)


@dataclass(eq=False)
class Record:
    """The last copies of a kind; it holds none of their memory, and its owner changes it for every exchange."""

    group: str  # as torch's flight recorder names it, with another word in place of the backend
    number: int  # of the group's exchanges, from 1
    name: Announced
    since: float  # time.time(), of the oldest that has not ended, or up to a tenth of a second before
    end: torch.cuda.Event | None = None  # behind the last
    timeout_s: float | None = None  # after which the GPU itself gives up, with an error that says nothing

    @property
    def has_ended(self) -> bool:
        try:
            return self.end is not None and self.end.query()
        except RuntimeError:  # the GPU has given up
            return False


_noted: weakref.WeakSet[Record] = weakref.WeakSet()
_change = threading.Lock()


def note(record: Record) -> None:
    """Let others find a record, as long as its owner keeps it."""
    with _change:
        _noted.add(record)


def noted() -> list[Record]:
    """The records of this process of which copies have begun."""
    with _change:
        return [each for each in _noted if each.number]


BESIDE = "checkpoints"
"""The description of groups that threads use beside training: not to have come there does not make a rank late."""
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True)
class Call:
    group: str
    """Backend, name and description of the process group: `gloo:0:default_pg`; with `copies` in place of the
    backend for those, which count for themselves."""
    number: int
    name: str  # as torch calls the operation
    is_over: bool
    seconds: float  # since it was started


def started() -> list[Call]:
    """The last collectives, the oldest first."""
    found = []
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:  # torch was built without this backend
            continue
        for entry in json.loads(dump(True, False)).get("entries", ()):
            if entry["is_p2p"]:
                continue
            backend, _, operation = entry["profiling_name"].rpartition(":")
            group = ":".join((backend, *entry["process_group"]))
            seconds = (time.time_ns() - entry["time_created_ns"]) / 1e9
            found.append(Call(group, entry["collective_seq_id"], operation, entry["retired"], seconds))
    now = time.time()
    found += [Call(each.group, each.number, each.name, each.has_ended, now - each.since) for each in noted()]
    return sorted(found, key=lambda call: -call.seconds)


def members(group: str) -> list[int]:
    """The ranks of a call's group, by its name; none if this process has left it."""
    name = group.split(":")[1]
    return next((dist.get_process_group_ranks(each) for each, called in _world.pg_names.items() if called == name), [])
