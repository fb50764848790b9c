"""What ranks send each other without a collective of torch's, told to whoever watches torch's dispatcher.

These operators do nothing. A recorder of collectives (`measure.collectives`) or a profile finds in them what was sent,
and by how many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def is_profiled() -> bool:
    """Whether a profiler runs, on this thread or, as one of all threads, on any."""
    return torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
