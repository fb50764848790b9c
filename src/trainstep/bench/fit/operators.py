"""The operators of a block's forward, one by one: how long each takes, and what it makes."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep.checkpointing.keeping import can_be_kept, operator_name
from trainstep.measure.memory import storages_of
from trainstep.measure.timing import DeviceClock
from trainstep.plan.fit import Result


class Operators(TorchDispatchMode):
    """Inside, times every operator, and notes what it makes; `note_saved` is the hook of what autograd saves."""

    def __init__(self, clock: DeviceClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._counts: dict[str, int] = defaultdict(int)
        self._seen: list[tuple[Result, Any, Any, float]] = []
        self._maker: dict[int, int] = {}  # address of a storage → place in `_seen` of what made it last
        self._last_saved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin, start = self._clock.record(), time.perf_counter()
        result = func(*args, **kwargs)
        taken = time.perf_counter() - start
        end = self._clock.record()
        given = {storage.data_ptr() for each in tree_leaves((args, kwargs)) for storage in storages_of(each)}
        made = [storage for each in tree_leaves(result) for storage in storages_of(each)]
        is_view = any(storage.data_ptr() in given for storage in made)
        size = 0 if is_view or not can_be_kept(func, args, kwargs) else sum(storage.nbytes() for storage in made)
        if is_view and func._schema.is_mutable:  # what is changed in place cannot be kept as it was made
            for place in {self._maker[address] for storage in made if (address := storage.data_ptr()) in self._maker}:
                changed, *times = self._seen[place]
                self._seen[place] = dataclasses.replace(changed, bytes=0), times[0], times[1], times[2]
        elif not is_view:
            self._maker.update((storage.data_ptr(), len(self._seen)) for storage in made)
        operator = operator_name(func)
        name = f"{operator}#{self._counts[operator]}"
        self._counts[operator] += 1
        self._seen.append((Result(name, size, 0.0), begin, end, taken))
        return result

    def note_saved(self, tensor: Tensor) -> Tensor:
        self._last_saved = len(self._seen)
        return tensor.detach()

    def found(self) -> list[Result]:
        """Results of operators that ran before the last tensor was saved: with its saving, computing again ends."""
        self._clock.synchronize()
        return [
            dataclasses.replace(each, seconds=taken if begin is None else self._clock.elapsed_ms(begin, end) / 1e3)
            for each, begin, end, taken in self._seen[: self._last_saved]
        ]
