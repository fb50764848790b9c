"""Memory of one host's ranks that all of them read and write."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerMemory:
    """A buffer on every rank that all ranks of one host can read and write, by plain copies.

    Between GPUs it is torch's symmetric memory: every rank maps the others' buffers through NVLink or PCIe, and a copy
    to or from them is the work of a copy engine, which takes no multiprocessor from computation. Between processes on
    CPUs it is a file that all map.

    Nothing here orders the ranks but `barrier`: whoever copies must have one before, so that the buffers are ready, and
    one after, before their owners touch them again. All ranks of the group must construct it, with the same size.

    Raises:
        OSError: memory cannot be had or shared, on this rank or another; every rank raises it, and says whose.

    Attributes:
        buffers: by rank: (nbytes,), uint8, on this rank's device.
        timeout_s: seconds after which a barrier of streams is an error of the GPU; None where the caller waits in it.
        uncounted: bytes of it that `torch.cuda.memory_allocated` does not know of (all or none, by torch's version).
    """

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.uncounted = nbytes
        self.timeout_s: float | None = None
        self._group = group
        self._handle: Any = None
        if device.type == "cuda":
            from torch.distributed import _symmetric_memory as symmetric_memory

            before = torch.cuda.memory_allocated(device)
            with _agreed(group):
                self._own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            if torch.cuda.memory_allocated(device) > before:
                self.uncounted = 0
            with _agreed(group):
                handle = symmetric_memory.rendezvous(self._own, group)
            self.buffers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
            self._handle = handle
            self.timeout_s = group._get_backend(device).options._timeout.total_seconds()
        else:
            self.buffers = _mapped_by_all(nbytes, group)

    def barrier(self, channel: int = 0) -> None:
        """Order the current stream's work from here on after what every rank's stream was given before its barrier.

        On a CPU the caller waits. A rank that does not come is an error, after the group's timeout. Barriers that
        different streams may be at in one moment have different channels.
        """
        if self.timeout_s is not None:
            self._handle.barrier(channel=channel, timeout_ms=int(self.timeout_s * 1000))
        else:
            dist.barrier(self._group)


def obstacle_to_sharing(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Reason why the ranks cannot copy to each other directly; None if they can. Every rank must call it."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""  # by which two hosts of one name differ
    mine = (platform.node(), boot, device.type, device.index)
    everyone: list[tuple[str, str, str, int | None]] = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    hosts = {(node, boot) for node, boot, _, _ in everyone}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if device.type == "cpu":
        return None
    if len({index for *_, index in everyone}) < group.size():
        return "ranks share the number of a GPU, so which GPU is whose cannot be told"
    others = [index or 0 for *_, index in everyone if index != device.index]
    barred = not all(torch.cuda.can_device_access_peer(device.index, index) for index in others)
    of_all = [barred] * group.size()
    dist.all_gather_object(of_all, barred, group=group)
    return "not every GPU can read every other's memory" if any(of_all) else None


def _mapped_by_all(nbytes: int, group: dist.ProcessGroup) -> list[Tensor]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(prefix="trainstep-", dir=folder) as own:  # without its name the mappings stay
        with _agreed(group):
            os.posix_fallocate(own.fileno(), 0, nbytes)  # or writing where there is no room would be a bus error
        paths = [own.name] * group.size()
        dist.all_gather_object(paths, own.name, group=group)
        with _agreed(group):
            for path in paths:
                if not os.path.exists(path):  # in a container with a /dev/shm of its own; from_file would make it
                    raise FileNotFoundError(f"{path}, which another rank has, is not here")
            return [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]


@contextmanager
def _agreed(group: dist.ProcessGroup) -> Iterator[None]:
    """Every rank goes on from here, or none does: what one fails with, all raise. Inside, no rank waits for another
    that may have failed before."""
    failure: str | None = None
    try:
        yield
    except (RuntimeError, OSError) as error:  # of the driver, or where a container lets no memory be shared
        failure = f"rank {group.rank()}: {error}"
    failures = [failure] * group.size()
    dist.all_gather_object(failures, failure, group=group)
    if first := next(filter(None, failures), None):
        raise OSError(first)
