"""Memory of one host's ranks that all of them read and write, and many copies between it in one call of the driver.

A gather by copies is one copy for each parameter and each other rank, and so is an exchange of gradients. Started one
by one, each costs the host several microseconds, and with four ranks a forward took the host longer than the GPU
(notebook/parallel.md). CUDA's driver takes a list of copies from 12.8 on (`cuMemcpyBatchAsync`), torch has none.
"""

from __future__ import annotations

import ctypes
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.side_stream import current_stream

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


LEGACY_STREAM = 0
"""The default stream, for which the driver takes no lists."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the locations are hints that memory of a GPU needs none of."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the stream's turn, not when called
_BESIDE_COMPUTATION = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: by copy engines


class Copies:
    """Copies of whole tensors, to be started any number of times on the current stream.

    Args:
        targets, sources: in pairs, contiguous, of equal dtypes and shapes, on one device, where memory of other GPUs
            may be mapped. Their storage may come and go in between: it is looked for when they are started.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._targets, self._sources = tuple(targets), tuple(sources)
        self._list = _List(self._targets)
        self._to, self._from = _Addresses(self._targets), _Addresses(self._sources)

    def start(self) -> None:
        """Start all of them, in no particular order.

        Raises:
            RuntimeError: the driver refused.
        """
        if (stream := self._list.stream()) is not None:
            self._list.start(self._to.now(), self._from.now(), stream)
            return
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)


class PieceCopies:
    """Copies of pieces of tensors, which are others each time, to places that stay, or from there.

    Args:
        pieces: each piece's tensor, by number, and its first element there.
        places: of each, (its elements,); contiguous, on one device, as of `Copies`. Their memory stays.
    """

    def __init__(self, pieces: Sequence[tuple[int, int]], places: Sequence[Tensor]) -> None:
        self._places = tuple(places)
        self._list = _List(self._places)
        self._pieces = list(pieces)
        self._bytes = [(number, first * at.element_size()) for (number, first), at in zip(pieces, places, strict=True)]
        self._addresses = self._list.pointers(*[each.data_ptr() for each in self._places])

    def fill_places(self, tensors: Sequence[Tensor]) -> None:
        """Start copies to all places, in no particular order, from contiguous tensors of the places' dtype.

        Raises:
            RuntimeError: the driver refused.
        """
        if (stream := self._list.stream()) is not None:
            self._list.start(self._addresses, self._pointers(tensors), stream)
            return
        for place, piece in zip(self._places, self._in(tensors), strict=True):
            place.copy_(piece)

    def fill_pieces(self, tensors: Sequence[Tensor], *, by_driver: bool = True) -> None:
        """Start copies from all places into the tensors; otherwise as `fill_places`.

        `by_driver`: by copy engines, whose way is the links; a kernel is faster within one memory.
        """
        if by_driver and (stream := self._list.stream()) is not None:
            self._list.start(self._pointers(tensors), self._addresses, stream)
        elif self._places:
            torch._foreach_copy_(list(self._in(tensors)), list(self._places))

    def _pointers(self, tensors: Sequence[Tensor]) -> Any:
        begin = [each.data_ptr() for each in tensors]
        return self._list.pointers(*[begin[number] + skipped for number, skipped in self._bytes])

    def _in(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        plain = [each.view(-1) for each in tensors]
        for (number, first), place in zip(self._pieces, self._places, strict=True):
            yield plain[number][first : first + place.numel()]


class _Addresses:
    """Addresses of tensors, as the driver is told. Storages are asked, not tensors, of which there are many more."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        self._storages, numbers = list(storages.values()), {key: number for number, key in enumerate(storages)}
        self._places = [
            (numbers[each.untyped_storage()._cdata], int(each.storage_offset()) * each.element_size())
            for each in tensors
        ]
        self._begin: list[int] = []
        self._array: Any = None

    def now(self) -> Any:
        begin = [storage.data_ptr() for storage in self._storages]
        if begin != self._begin:
            self._begin = begin
            addresses = [begin[number] + offset for number, offset in self._places]
            self._array = (ctypes.c_uint64 * len(addresses))(*addresses)
        return self._array


class _List:
    """Arguments of the driver's copies of the sizes of `likes`."""

    def __init__(self, likes: Sequence[Tensor]) -> None:
        count = len(likes)
        self.pointers = ctypes.c_uint64 * count
        self._sizes, self._count = (ctypes.c_size_t * count)(*(each.nbytes for each in likes)), count
        self._device = likes[0].device if likes and likes[0].is_cuda else None

    def stream(self) -> int | None:
        """The current stream, if the driver takes lists for it."""
        if self._device is None or _batch_call() is None:
            return None
        stream: int = current_stream(self._device).cuda_stream
        return None if stream == LEGACY_STREAM else stream

    def start(self, targets: Any, sources: Any, stream: int) -> None:
        batch = _batch_call()
        assert batch is not None
        batch(targets, sources, self._sizes, self._count, stream)


@cache
def _batch_call() -> Callable[[Any, Any, Any, int, int], None] | None:
    """The driver's call for a list of copies (targets, sources, bytes of each, how many, stream); None before 12.8."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync  # the first version, which later drivers keep
    except (OSError, AttributeError):
        return None
    pointer = ctypes.c_void_p
    call.argtypes = [pointer, pointer, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_size_t, pointer, pointer]
    call.restype = ctypes.c_int
    attributes = _Attributes(source_access_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTATION)
    of_all, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)

    def start(targets: Any, sources: Any, sizes: Any, count: int, stream: int) -> None:
        error = call(
            targets, sources, sizes, count, ctypes.byref(attributes), ctypes.byref(of_all), 1,
            ctypes.byref(failed), stream,
        )  # fmt: skip
        if error:
            raise RuntimeError(f"CUDA's driver refused {count} copies between GPUs, error {error}")

    return start
