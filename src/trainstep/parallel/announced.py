"""What ranks send each other without a collective of torch's, told to those who would otherwise not know.

Operators that do nothing tell torch's dispatcher: a recorder of collectives (`measure.collectives`) or a profile finds
in them what was sent, and by how many ranks. Records tell who asks what is under way (`started`), as torch's flight
recorder does of collectives.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Announced = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

_library = torch.library.Library("trainstep_exchanges", "DEF")
for _name in get_args(Announced):
    _library.define(f"{_name}(Tensor[] payload, int ranks) -> ()")
    _library.impl(_name, lambda payload, ranks: None, "CompositeExplicitAutograd")


def announce(name: Announced, payload: Sequence[Tensor], ranks: int) -> None:
    """Say that `payload`, the full tensors that are gathered, exchanged or reduced, is about to be sent."""
    if torch._C._len_torch_dispatch_stack() or is_profiled():  # else nobody watches
        getattr(torch.ops.trainstep_exchanges, name)(list(payload), ranks)


@dataclass(eq=False)
class Record:
    """Of an exchange, or the last one of a kind; it holds no memory of the exchange's."""

    group: str  # as torch's flight recorder names it, with another word in place of the backend
    number: int  # of the group's exchanges, from 1
    name: Announced
    since: float  # time.time(), of the oldest that has not ended, or up to a tenth of a second before
    is_over: bool = False
    end: torch.cuda.Event | None = None  # in place of `is_over`: where a stream is behind it
    timeout_s: float | None = None  # after which the GPU itself gives up, with an error that says nothing

    @property
    def has_ended(self) -> bool:
        if self.end is None:
            return self.is_over
        try:
            return self.end.query()
        except RuntimeError:  # the GPU has given up
            return False


_each: deque[Record] = deque(maxlen=2000)  # as many as torch's flight recorder keeps
_last_of_a_kind: weakref.WeakSet[Record] = weakref.WeakSet()


_change = threading.Lock()


def note(record: Record, *, as_last: bool = False) -> None:
    """Keep a record; `as_last`: as long as whoever made it does, who changes it for every exchange of the kind."""
    with _change:
        if as_last:
            _last_of_a_kind.add(record)
        else:
            _each.append(record)


def noted() -> list[Record]:
    """The last ones of this process, the oldest first."""
    with _change:
        return [*_each, *(each for each in _last_of_a_kind if each.number)]


def is_profiled() -> bool:
    """Whether a profiler runs, on this thread or, as one of all threads, on any."""
    return torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
