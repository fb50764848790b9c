"""Peak memory of a step, by phase. On a GPU from the caching allocator; on a CPU from every storage torch makes.

The GPU figure is `max_memory_allocated`: bytes in live tensors, not what the allocator keeps cached. The CPU has no
such counter, so an untimed step is run under `LiveStorages`. Compiled code on a CPU allocates outside the dispatcher;
its peak is unknown, and said to be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep.phases import PhaseContext

GIB = 2**30
MIB = 2**20

_TAKES_WHAT_PYTHON_MADE = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)
"""`torch.tensor` hands its new tensor to these."""


@dataclass(slots=True, eq=False)
class StorageLife:
    """When one storage lived, in states: the first is 0, and each making and each release of a storage begins another.

    Times of `LiveStorages` and of `allocations.timeline` are counted so.
    """

    bytes: int
    start: int
    """0 if the storage was there before."""
    end: int | None = None
    """The first state without it; None while it lives."""
    is_found: bool = False
    """Whether an operator was given it though it was neither resident nor made by an operator."""


class LiveStorages(TorchDispatchMode):
    """Follows every storage on a CPU from the operator that returned it to its release, while entered; views add none.

    A storage that an operator is given and none has made was there before, such as state that an optimizer keeps out of
    sight: it is followed too, but not in `bytes` or `peak`. Eager code only.

    Args:
        resident: tensors that are there before.
        on_new: called with each storage when it is first seen, resident ones included.
    """

    def __init__(
        self,
        resident: Iterable[Tensor] = (),
        on_new: Callable[[StorageLife, torch.UntypedStorage], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self.events = 0
        """Storages made plus storages released so far: the number of the present state."""
        self._on_new = on_new
        self._lives: weakref.WeakKeyDictionary[torch.UntypedStorage, StorageLife] = weakref.WeakKeyDictionary()
        self._is_over = False
        for tensor in resident:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TAKES_WHAT_PYTHON_MADE:
            for value in tree_leaves((args, kwargs)):
                self._follow(value, is_found=True)
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            self._follow(value, is_made=True)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._is_over = True

    @property
    def found_bytes(self) -> int:
        """Bytes of the found storages that are alive now."""
        return sum(life.bytes for life in self._lives.values() if life.is_found)

    def _follow(self, value: object, *, is_made: bool = False, is_found: bool = False) -> None:
        for storage in storages_of(value):
            if storage in self._lives or storage.nbytes() == 0:
                continue
            self.events += is_made
            life = StorageLife(storage.nbytes(), self.events if is_made else 0, is_found=is_found)
            self._lives[storage] = life
            if not is_found:
                self.bytes += life.bytes
                self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._release, life).atexit = False
            if self._on_new is not None:
                self._on_new(life, storage)

    def _release(self, life: StorageLife) -> None:
        if not self._is_over:
            self.events += 1
            life.end = self.events
            self.bytes -= 0 if life.is_found else life.bytes


def storages_of(value: object) -> list[torch.UntypedStorage]:
    """What a tensor's elements lie in: one storage, or those of a sparse tensor's indices and values; else none."""
    if not isinstance(value, Tensor):
        return []
    if value.layout == torch.sparse_coo:
        return [*storages_of(value._indices()), *storages_of(value._values())]
    return [value.untyped_storage()]


@dataclass(frozen=True)
class MemoryPeaks:
    """Bytes in live tensors."""

    before: int
    """At rest, before the step. On a CPU with found storages that outlive the step."""
    peak: int
    """The most during the step."""
    by_phase: dict[str, int]
    """The most during each phase."""
    after: dict[str, int]
    """At the end of each phase."""


def step_memory(
    step: Callable[[PhaseContext], object], device: torch.device, resident: Iterable[Tensor]
) -> MemoryPeaks:
    """Run `step` once and return its peaks.

    Args:
        step: announces its phases, as for `measure.timing.time_steps`.
        device: where it runs.
        resident: tensors alive before the step (parameters, optimizer state, the batch); used on a CPU only.
    """
    return _cuda_memory(step, device) if device.type == "cuda" else _cpu_memory(step, resident)


def _cuda_memory(step: Callable[[PhaseContext], object], device: torch.device) -> MemoryPeaks:
    by_phase: dict[str, int] = {}
    after: dict[str, int] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(device)
        yield
        by_phase[name], after[name] = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)

    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    step(phase)
    return MemoryPeaks(before, max(by_phase.values()), by_phase, after)


def _cpu_memory(step: Callable[[PhaseContext], object], resident: Iterable[Tensor]) -> MemoryPeaks:
    by_phase: dict[str, int] = {}
    after: dict[str, int] = {}
    live = LiveStorages(resident)
    before = live.bytes

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        live.peak = live.bytes
        yield
        by_phase[name], after[name] = live.peak, live.bytes

    with live:
        step(phase)
    found = live.found_bytes
    by_phase, after = ({name: size + found for name, size in sizes.items()} for sizes in (by_phase, after))
    return MemoryPeaks(before + found, max(by_phase.values()), by_phase, after)


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor in the optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
