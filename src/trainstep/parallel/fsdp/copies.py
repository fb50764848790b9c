"""Many copies on one GPU's stream, given to the driver in one call.

A gather by copies is one copy for each parameter and each other rank. Started one by one, each costs the host several
microseconds, and with four ranks a forward took the host longer than the GPU (docs/parallel.md). CUDA's driver takes a
list of copies from 12.8 on (`cuMemcpyBatchAsync`), and torch has no call for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
        count = len(self._targets)
        self._pointers = ctypes.c_uint64 * count
        self._sizes = (ctypes.c_size_t * count)(*(each.nbytes for each in self._targets))
        self._on_gpu = count > 0 and self._targets[0].is_cuda

    def start(self) -> None:
        """Start all of them, in no particular order.

        Raises:
            RuntimeError: the driver refused.
        """
        if self._on_gpu and (batch := _batch_call()) is not None:
            stream = torch.cuda.current_stream(self._targets[0].device).cuda_stream
            if stream != LEGACY_STREAM:
                targets = self._pointers(*[each.data_ptr() for each in self._targets])
                sources = self._pointers(*[each.data_ptr() for each in self._sources])
                batch(targets, sources, self._sizes, len(self._targets), stream)
                return
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)


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
