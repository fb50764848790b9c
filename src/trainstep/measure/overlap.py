"""How much of a step's communication computation hides, by the intervals of its kernels.

Communication is NCCL's kernels and copies from GPU to GPU; on a CPU, Gloo's threads while a collective runs, and the
c10d operators that start one. It includes waiting for ranks that are late. Computation is all else that the device
does, copies within it included; on a CPU not the engine's own time, in which hooks wait for collectives. So, from the
first kernel's start to the last one's end,

    span = computation + exposed communication + idle,    communication = hidden + exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainstep.measure.chrome_trace import ENGINE
from trainstep.measure.intervals import Interval, difference, intersection, length, union
from trainstep.measure.kernels import Kernel


@dataclass(frozen=True)
class Overlap:
    """Unions of intervals in microseconds, sorted."""

    computation: Sequence[Interval]
    communication: Sequence[Interval]

    @property
    def hidden(self) -> list[Interval]:
        """Communication while something is computed."""
        return intersection(self.communication, self.computation)

    @property
    def exposed(self) -> list[Interval]:
        """Communication while nothing is computed."""
        return difference(self.communication, self.computation)

    @property
    def idle_us(self) -> float:
        """Time between the first kernel's start and the last one's end in which neither runs."""
        return self.span_us - length(union([*self.computation, *self.communication]))

    @property
    def span_us(self) -> float:
        """From the first kernel's start to the last one's end."""
        both = [*self.computation, *self.communication]
        return max((end for _, end in both), default=0.0) - min((start for start, _ in both), default=0.0)


def overlap_of(kernels: Iterable[Kernel]) -> Overlap:
    """The computation and the communication of one step on one device."""
    found: dict[bool, list[Interval]] = {True: [], False: []}
    for each in kernels:
        if each.name == ENGINE:
            continue
        found[each.lane == "communication"].append((each.start_us, each.end_us))
    return Overlap(union(found[False]), union(found[True]))
