"""Peak memory of a step, by phase. On a GPU from the caching allocator; on a CPU from every tensor torch makes.

The GPU figure is `max_memory_allocated`: bytes in live tensors, not what the allocator keeps cached. The CPU has no
such counter, so an untimed step is run under a dispatch mode that follows each storage from the operator that made it
to its release. A tensor that an operator is given and none has made was there before, such as state that an optimizer
keeps out of sight; if it outlives the step it counts as at rest. Compiled code on a CPU allocates outside the
dispatcher; its peak is unknown, and said to be.
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


@dataclass(frozen=True)
class MemoryPeaks:
    """Bytes in live tensors."""

    before: int
    """At rest, before the step."""
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


_TAKES_WHAT_PYTHON_MADE = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)
"""`torch.tensor` hands its new tensor to these."""


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, from creation to release; views add nothing."""

    def __init__(self, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()
        self._found: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        for tensor in resident:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TAKES_WHAT_PYTHON_MADE:
            for value in tree_leaves((args, kwargs)):
                for storage in storages_of(value):
                    if storage not in self._known:
                        self._found[storage] = storage.nbytes()
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            self._follow(value)
        return result

    @property
    def found_bytes(self) -> int:
        """Bytes of storages, alive now, that operators were given though none had made them; not in `bytes`."""
        return sum(self._found.values())

    def _follow(self, value: object) -> None:
        for storage in storages_of(value):
            if storage in self._known or storage in self._found:
                continue
            self._known[storage] = None
            size = storage.nbytes()
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.bytes -= size


def storages_of(value: object) -> list[torch.UntypedStorage]:
    """What a tensor's elements lie in: one storage, or those of a sparse tensor's indices and values; else none."""
    if not isinstance(value, Tensor):
        return []
    if value.layout == torch.sparse_coo:
        return [*storages_of(value._indices()), *storages_of(value._values())]
    return [value.untyped_storage()]


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def optimizer_state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor in the optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
