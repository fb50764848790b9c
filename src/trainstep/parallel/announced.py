"""Transfers that torch's own tools do not see as the caller means them: copies between GPUs, and all over Gloo.

Operators that do nothing tell torch's dispatcher: a recorder of collectives (`measure.collectives`) or a profile finds
the tensors and the number of ranks in them. Records of copies answer who asks for the calls under way (`started`), as
torch's flight recorder does for collectives.
"""

from __future__ import annotations

import threading
import weakref
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
    profiled = torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
    if torch._C._len_torch_dispatch_stack() or profiled:  # else nobody watches
        getattr(torch.ops.trainstep_exchanges, name)(list(payload), ranks)


@dataclass(eq=False)
class Record:
    """The last copies of a kind; it holds none of their memory, and its owner changes it for every exchange."""

    group: str  # as torch's flight recorder names it, with another word in place of the backend
    number: int  # of the group's exchanges, from 1
    name: Announced
    since: float  # time.time(), of the oldest that has not ended, or up to a tenth of a second before
    end: torch.cuda.Event | None = None  # behind the last
    timeout_s: float | None = None  # after which the GPU itself gives up, with an error that says nothing

    @property
    def has_ended(self) -> bool:
        try:
            return self.end is not None and self.end.query()
        except RuntimeError:  # the GPU has given up
            return False


_noted: weakref.WeakSet[Record] = weakref.WeakSet()
_change = threading.Lock()


def note(record: Record) -> None:
    """Let others find a record, as long as its owner keeps it."""
    with _change:
        _noted.add(record)


def noted() -> list[Record]:
    """The records of this process of which copies have begun."""
    with _change:
        return [each for each in _noted if each.number]
