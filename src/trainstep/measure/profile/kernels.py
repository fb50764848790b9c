"""Which GPU kernels (on a CPU: operators) ran, in which phase and module, for how long, and what they achieved.

And how much of a step's communication computation hides, by the times of its kernels. Communication is NCCL's kernels
and copies from GPU to GPU; on a CPU, Gloo's threads while a collective runs, and the c10d operators that start one. It
includes waiting for ranks that are late. Computation is all else that the device does, copies within it included; on a
CPU not the engine's own time, in which hooks wait for collectives. So, from the first kernel's start to the last one's
end,

    span = computation + exposed communication + idle,    communication = hidden + exposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainstep.measure.flops import UNKNOWN_LISTS, Cost, Lists, operator_cost
from trainstep.measure.profile.attribution import AttributedWork, attribute, owner_of
from trainstep.measure.profile.families import Family, kernel_family, operator_family
from trainstep.measure.profile.trace import Range, Stream, Trace, WorkKind, parents_of

Lane = Literal["compute", "communication", "copies"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of one kernel, copy or fill; on a CPU, one stretch of an operator's own time."""

    name: str
    family: Family
    start_us: float
    duration_us: float
    stream: Stream
    lane: Lane
    is_call: bool
    """False for further stretches of a call that was counted already."""
    step: str | None
    phase: str | None
    module: str | None
    """Also `(loss)` and `(optimizer)`, what no module owns; None where unknown."""
    piece: str | None
    operator: str | None
    call: int | None = None
    """The operator call it belongs to, where that call's cost is counted."""
    flops: float | None = None
    """Of the whole call; at one of its kernels only, the longest."""
    bytes: float | None = None
    kind: WorkKind = "kernel"

    @property
    def end_us(self) -> float:
        """When it was done."""
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class KernelProfile:
    """The kernels of some whole steps."""

    kernels: tuple[Kernel, ...]
    """In the order they started."""
    steps: int
    """How many steps they are of; 1 where the trace has no steps."""
    has_steps: bool
    """Whether steps were announced; otherwise all figures are of the whole trace."""
    is_cpu: bool
    outside_us: float
    """Time of kernels outside of all steps, which are left out: the preparation of batches."""

    def per_step_ms(self, kernels: Iterable[Kernel] | None = None) -> float:
        """Milliseconds per step that kernels took, added up."""
        return sum(each.duration_us for each in (self.kernels if kernels is None else kernels)) / self.steps / 1e3

    def share(self, known: Callable[[Kernel], bool]) -> float:
        """Share of all kernel time for which something holds."""
        total = sum(each.duration_us for each in self.kernels)
        return sum(each.duration_us for each in self.kernels if known(each)) / total if total else 0.0

    def of_step(self, step: str | None) -> list[Kernel]:
        """The kernels of one step."""
        return [each for each in self.kernels if each.step == step]

    @property
    def step_names(self) -> list[str | None]:
        """The steps, in order."""
        return list(dict.fromkeys(each.step for each in self.kernels))


def profile_of(trace: Trace, lists: Lists = UNKNOWN_LISTS) -> KernelProfile:
    """Attribute, classify and count the work of a trace; `lists` tells of the optimizer's lists of tensors."""
    placed = attribute(trace)
    has_steps = any(each.kind == "step" for each in trace.ranges)
    inside = [each for each in placed if each.place.step is not None or not has_steps]
    calls, costs = _costs(trace.ranges, inside, lists, is_cpu=trace.is_cpu)
    kernels = [_kernel(each, trace.ranges, calls.get(index), costs.get(index)) for index, each in enumerate(inside)]
    steps = len({each.step for each in kernels}) if has_steps else 1
    total, kept = (sum(each.work.duration for each in group) for group in (placed, inside))
    return KernelProfile(tuple(kernels), max(1, steps), has_steps, trace.is_cpu, total - kept)


def _kernel(attributed: AttributedWork, ranges: Sequence[Range], call: int | None, cost: Cost | None) -> Kernel:
    work, place = attributed.work, attributed.place
    operator = ranges[place.operator].name if place.operator is not None else None
    family: Family
    if work.kind in ("kernel", "copy"):  # what a copy engine does is told by its own name, not by the operator
        family = kernel_family(work.name, operator or "" if work.kind == "kernel" else "")
    else:
        family = "other" if work.kind in ("compiled", "engine") else operator_family(work.name)
    lane: Lane = "communication" if family == "communication" else "copies" if work.kind == "copy" else "compute"
    return Kernel(
        name=work.name,
        family=family,
        start_us=work.start,
        duration_us=work.duration,
        stream=work.stream,
        lane=lane,
        is_call=not work.is_continued,
        step=place.step,
        phase=place.phase,
        module=owner_of(place),
        piece=place.piece,
        operator=operator,
        call=call,
        flops=cost.flops if cost else None,
        bytes=cost.bytes if cost else None,
        kind=work.kind,
    )


def _costs(
    ranges: Sequence[Range], attributed: Sequence[AttributedWork], lists: Lists, *, is_cpu: bool
) -> tuple[dict[int, int], dict[int, Cost]]:
    """Index of a piece of work → the counted operator call it belongs to; and → that call's cost.

    That is the innermost call whose cost is known. A call that launches several kernels has its cost at one of them,
    the longest, so that sums count it once. On a CPU work is operators' own time, which belongs to that operator alone;
    one that leaves all it does to others is not counted, since they are.
    """
    parents = {
        index: parent if parent is not None and ranges[parent].kind == "operator" else None
        for index, parent in enumerate(parents_of(ranges))
        if ranges[index].kind == "operator"
    }
    cost_of: dict[int | None, Cost | None] = {None: None}  # call → its cost

    def counted_call(call: int | None) -> int | None:
        if call not in cost_of:
            assert call is not None, "no call costs nothing"
            cost_of[call] = operator_cost(ranges[call].name, ranges[call].tensors, lists)
        if call is None or cost_of[call] is not None:
            return call
        return None if is_cpu else counted_call(parents[call])

    calls: dict[int, int] = {}
    longest: dict[int, int] = {}  # call → index of its longest work
    for index, each in enumerate(attributed):
        call = counted_call(each.place.operator)
        if call is not None:
            calls[index] = call
            if call not in longest or each.work.duration > attributed[longest[call]].work.duration:
                longest[call] = index
    costs = {call: cost for call in longest if (cost := cost_of[call]) is not None}
    left = _left_to_others(costs, parents) if is_cpu else set()
    calls = {index: call for index, call in calls.items() if call not in left}
    return calls, {longest[call]: cost for call, cost in costs.items() if call not in left}


def _left_to_others(cost_of: Mapping[int, Cost], parents: Mapping[int, int | None]) -> set[int]:
    """The calls whose FLOPs and bytes are all found again in calls that they make."""
    flops: dict[int, float] = defaultdict(float)
    size: dict[int, float] = defaultdict(float)
    for call, cost in cost_of.items():
        outer = parents.get(call)
        while outer is not None:
            flops[outer] += cost.flops or 0
            size[outer] += cost.bytes or 0
            outer = parents.get(outer)
    return {
        call
        for call, cost in cost_of.items()
        if size[call] and flops[call] >= (cost.flops or 0) and size[call] >= (cost.bytes or 0)
    }


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one of the kernels ran, streams laid over one another."""
    return length(union((each.start_us, each.end_us) for each in kernels))


@dataclass(frozen=True)
class Gap:
    """A stretch in which the device had nothing to do."""

    start_us: float
    duration_us: float
    before: Kernel
    """The kernel that ended it."""


def gaps(kernels: Sequence[Kernel]) -> list[Gap]:
    """All stretches between the first and the last kernel in which none ran, the longest first."""
    found: list[Gap] = []
    end: float | None = None
    for each in sorted(kernels, key=lambda each: each.start_us):
        if end is not None and each.start_us > end:
            found.append(Gap(end, each.start_us - end, each))
        end = each.end_us if end is None else max(end, each.end_us)
    return sorted(found, key=lambda gap: -gap.duration_us)


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
        both = [*self.computation, *self.communication]
        return max((end for _, end in both), default=0.0) - min((start for start, _ in both), default=0.0)


def overlap_of(kernels: Iterable[Kernel]) -> Overlap:
    """The computation and the communication of one step on one device."""
    found: dict[bool, list[Span]] = {True: [], False: []}
    for each in kernels:
        if each.kind == "engine":
            continue
        found[each.lane == "communication"].append((each.start_us, each.end_us))
    return Overlap(union(found[False]), union(found[True]))


Span = tuple[float, float]
"""(start, end). A sorted sequence of spans that neither overlap nor touch is a union."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points as a union; empty spans are gone."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The points that both have. Both are unions."""
    shared: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def difference(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The points that the first has and the second has not. Both are unions."""
    left: list[Span] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at = j
        while at < len(second) and second[at][0] < end:
            if second[at][0] > start:
                left.append((start, second[at][0]))
            start = second[at][1]
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Sequence[Span]) -> float:
    """How long the spans of a union are together."""
    return sum(end - start for start, end in spans)
