"""Overlap of kernels: busy time and gaps, communication that computation hides, transfers beside kernels.

Points in time are told by unions of spans in microseconds. Communication is NCCL's kernels and copies from GPU to GPU;
on a CPU, Gloo's threads while a collective runs, and the operators that start or announce one. It
includes waiting for late ranks. Transfers between host and device are neither communication nor computation.
Computation is all else that the device does, copies within it included; on a CPU not the engine's own time, in which
hooks wait for collectives. So, of one device, from the first kernel's start to the last one's end,

    span = computation + exposed communication + idle,    communication = hidden + exposed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainstep.measure.profile.kernels import TRANSFER, Kernel, KernelProfile


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one of the kernels ran, streams laid over one another."""
    return length(union_of(kernels))


@dataclass(frozen=True)
class Gap:
    start_us: float
    duration_us: float
    before: Kernel  # the one that ended it


def gaps(kernels: Sequence[Kernel]) -> list[Gap]:
    """All stretches between the first and the last kernel in which none ran, the longest first."""
    ordered = sorted(kernels, key=lambda each: each.start_us)
    ends = itertools.accumulate((each.end_us for each in ordered), max)
    found = (Gap(end, each.start_us - end, each) for end, each in zip(ends, ordered[1:], strict=False))
    return sorted((gap for gap in found if gap.duration_us > 0), key=lambda gap: -gap.duration_us)


@dataclass(frozen=True)
class Overlap:
    """Unions of spans in microseconds."""

    computation: Sequence[Span]
    communication: Sequence[Span]

    @property
    def hidden(self) -> list[Span]:
        """Communication while something is computed."""
        return intersection(self.communication, self.computation)

    @property
    def exposed(self) -> list[Span]:
        """Communication while nothing is computed."""
        return difference(self.communication, self.computation)

    @property
    def idle_us(self) -> float:
        """Time between the first kernel's start and the last one's end in which neither runs."""
        return self.span_us - length(union([*self.computation, *self.communication]))

    @property
    def span_us(self) -> float:
        """From the first kernel's start to the last one's end."""
        both = union([*self.computation, *self.communication])
        return both[-1][1] - both[0][0] if both else 0.0


def overlap_of(kernels: Iterable[Kernel]) -> Overlap:
    """The computation and the communication of one step on one device."""
    found: dict[bool, list[Span]] = {True: [], False: []}
    for each in kernels:
        if each.kind != "engine" and each.family != TRANSFER:
            found[each.lane == "communication"].append((each.start_us, each.end_us))
    return Overlap(union(found[False]), union(found[True]))


def hidden_ms(profile: KernelProfile) -> float:
    """Milliseconds per step of communication while something is computed."""
    hidden = (overlap_of(own).hidden for own in profile.by_step.values())
    return sum(map(length, hidden)) / profile.steps / 1e3


def beside_us(kernels: Iterable[Kernel], others: Iterable[Kernel]) -> float:
    """Time that kernels ran while at least one of the others did."""
    shared = intersection(union_of(kernels), union_of(others))
    return length(shared)


def union_of(kernels: Iterable[Kernel]) -> list[Span]:
    """Spans in which at least one of the kernels ran, streams laid over one another."""
    return union([(start := each.start_us, start + each.duration_us) for each in kernels])


Span = tuple[float, float]  # (start, end). A sorted sequence of spans that neither overlap nor touch is a union


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points as a union; empty spans are gone."""
    merged: list[Span] = []
    begun = last = -math.inf
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if start > last:
            merged.append((begun, last))
            begun, last = start, end
        elif end > last:
            last = end
    return [*merged, (begun, last)][1:]


def intersection(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The points that both have. Both are unions."""
    shared: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        ends_first = first[i][1] <= second[j][1]
        i, j = i + ends_first, j + (not ends_first)
    return shared


def difference(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The points that the first has and the second has not. Both are unions."""
    bounds = [-math.inf, *itertools.chain(*second), math.inf]
    return intersection(first, list(zip(bounds[::2], bounds[1::2], strict=True)))


def length(spans: Sequence[Span]) -> float:
    """Length of the spans of a union together."""
    return sum(end - start for start, end in spans)
