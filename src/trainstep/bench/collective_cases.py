"""Which collectives there are to measure. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainstep.bench.grid import expand
from trainstep.errors import UsageError
from trainstep.plan.communication import COLLECTIVES, CollectiveName

CollectiveDtype = Literal["fp32", "fp16", "bf16"]
ITEM_BYTES: Mapping[CollectiveDtype, int] = {"fp32": 4, "fp16": 2, "bf16": 2}

MB = 10**6

DEFAULTS: Mapping[str, Sequence[Any]] = {"collective": COLLECTIVES, "size_mb": (1.0, 10.0, 100.0, 1000.0)}
"""Axes whose defaults have several values."""


@dataclass(frozen=True)
class CollectiveCase:
    """One cell of the grid."""

    collective: CollectiveName = "all-reduce"
    """What the ranks do together."""
    world_size: int = 0
    """Ranks that take part, the others waiting; 0 for all that torchrun started."""
    dtype: CollectiveDtype = "fp32"
    """Type of the elements."""
    size_mb: float = 100.0
    """Megabytes (10^6 bytes) of the full tensor: what is reduced or sent, or comes out of a gather."""

    @property
    def elements(self) -> int:
        """Elements of the full tensor: the largest number within the size that every rank gets an equal part of."""
        return int(self.size_mb * MB) // ITEM_BYTES[self.dtype] // self.world_size * self.world_size

    @property
    def payload_bytes(self) -> int:
        """Of the full tensor."""
        return self.elements * ITEM_BYTES[self.dtype]


def collective_cases(axes: Mapping[str, Sequence[Any]], started: int) -> list[CollectiveCase]:
    """Every combination of the axes' values.

    Args:
        axes: values by field.
        started: ranks that torchrun started.

    Raises:
        UsageError: more ranks than were started, or a size too small to divide.
    """
    cases = []
    for values in expand(axes):
        case = CollectiveCase(**(values | {"world_size": values["world_size"] or started}))
        if not 1 <= case.world_size <= started:
            raise UsageError(
                f"world-size is {case.world_size}, and torchrun started {started} process"
                f"{'' if started == 1 else 'es'}; start as many as the largest (torchrun --nproc-per-node)"
            )
        if case.elements < 1:
            raise UsageError(
                f"size-mb is {case.size_mb:g}, less than one element for each of {case.world_size} ranks; "
                "give megabytes, such as 1,10,100"
            )
        cases.append(case)
    return cases
