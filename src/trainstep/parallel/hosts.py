"""Which machine a rank is on, and whether all of a group are on one."""

from __future__ import annotations

import platform
import weakref
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_on_one: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def this_host() -> tuple[str, str]:
    """Its name and, where the kernel tells, a word of this boot, by which two hosts of one name differ."""
    return platform.node(), _BOOT_ID.read_text() if _BOOT_ID.exists() else ""


def are_on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group over Gloo are. They tell each other at the first call, which all of them make."""
    if group not in _on_one:
        mine = int.from_bytes(sha256(repr(this_host()).encode()).digest()[:7], "big")
        everyone = torch.empty(group.size(), dtype=torch.int64)
        backend: Any = group._get_backend(everyone.device)  # past torch's dispatcher: it is no collective of the step
        backend._allgather_base(everyone, torch.tensor([mine])).wait()
        _on_one[group] = len(set(everyone.tolist())) == 1
    return _on_one[group]
