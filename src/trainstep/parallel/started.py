"""The collectives that this process has started: torch's, as its flight recorder has them, and others that were noted.

The recorder is a ring of the last 2,000 calls that torch keeps by itself (`TORCH_FR_BUFFER_SIZE`), of Gloo and of NCCL,
and that any thread may read. Where it is switched off, none of them are found.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from trainstep.parallel.announced import noted

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
