"""The log of a step's allocations on a CPU: every storage that an operator returns, from creation to release.

As `measure.memory.LiveStorages`, and exact in the same way for eager code. An operator's argument that no operator made
was there before the log began.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep.measure.allocations.attribution import StepWatch, python_frames
from trainstep.measure.allocations.timeline import Block, Frame, Timeline
from trainstep.measure.memory import storages_of


def record_on_cpu(step: Callable[[], object], watch: StepWatch, batch: Any) -> Timeline:
    """Run `step` once and return its timeline.

    Args:
        step: takes one step on `batch`, announcing itself to `watch`; eager code.
    """
    log = _StorageLog()
    watch.position = lambda: log.events
    log.follow_old(leaf for leaf in (*watch.resident(), *tree_leaves(batch)) if isinstance(leaf, Tensor))
    with watch.watching(batch), log:
        step()
    return watch.attribute(log.blocks(), log.events)


class _StorageLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()
        self._made: list[tuple[int, int, int, tuple[Frame, ...]]] = []
        self._ended: dict[int, int] = {}
        self._closed = False

    def blocks(self) -> list[Block]:
        """What was logged; the log is closed."""
        self._closed = True
        return [
            Block(start, self._ended.get(index), size, address, frames)
            for index, (start, size, address, frames) in enumerate(self._made)
        ]

    def follow_old(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that were there before."""
        for tensor in tensors:
            self._follow(tensor, is_new=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.lift_fresh.default:  # its argument is what torch.tensor(…) has just made
            self.follow_old(
                leaf
                for each in itertools.chain(args, kwargs.values())
                for leaf in (each if isinstance(each, (list, tuple)) else (each,))
                if isinstance(leaf, Tensor)
            )
        result = func(*args, **kwargs)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self._follow(value, is_new=True)
        return result

    def _follow(self, tensor: Tensor, is_new: bool) -> None:
        for storage in storages_of(tensor):
            if storage not in self._known and storage.nbytes() > 0:
                self._follow_storage(storage, is_new)

    def _follow_storage(self, storage: torch.UntypedStorage, is_new: bool) -> None:
        self._known[storage] = None
        self.events += is_new
        start = self.events if is_new else 0
        frames = python_frames(3) if is_new else ()
        weakref.finalize(storage, self._release, len(self._made)).atexit = False
        self._made.append((start, storage.nbytes(), storage.data_ptr(), frames))

    def _release(self, index: int) -> None:
        if not self._closed:
            self.events += 1
            self._ended[index] = self.events
