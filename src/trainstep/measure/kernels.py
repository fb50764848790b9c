"""Which GPU kernels (on a CPU: operators) ran, in which phase and module, for how long, and what they achieved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainstep.measure.attribution import Placed, attribute, owner_of
from trainstep.measure.chrome_trace import COMPILED, ENGINE
from trainstep.measure.intervals import length, union
from trainstep.measure.kernel_families import Family, kernel_family, operator_family
from trainstep.measure.operator_cost import UNKNOWN_LISTS, Cost, Lists, operator_cost
from trainstep.measure.trace import Range, Trace, parents_of

Lane = Literal["compute", "communication", "copies"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of one kernel, copy or fill; on a CPU, one stretch of an operator's own time."""

    name: str
    family: Family
    start_us: float
    duration_us: float
    stream: str
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

    @property
    def end_us(self) -> float:
        """When it was done."""
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Profile:
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


def profile_of(trace: Trace, lists: Lists = UNKNOWN_LISTS) -> Profile:
    """Attribute, classify and count the work of a trace.

    Args:
        trace: as recorded.
        lists: what is known of the lists of tensors that the optimizer works on.
    """
    is_cpu = trace.device == "CPU"
    placed = attribute(trace)
    has_steps = any(each.kind == "step" for each in trace.ranges)
    inside = [each for each in placed if each.place.step is not None or not has_steps]
    calls, costs = _costs(trace.ranges, inside, lists, is_cpu=is_cpu)
    kernels = [
        _kernel(each, trace.ranges, calls.get(index), costs.get(index), is_cpu) for index, each in enumerate(inside)
    ]
    steps = len({each.step for each in kernels}) if has_steps else 1
    total, kept = (sum(each.work.duration for each in group) for group in (placed, inside))
    return Profile(tuple(kernels), max(1, steps), has_steps, is_cpu, total - kept)


def _kernel(placed: Placed, ranges: Sequence[Range], call: int | None, cost: Cost | None, is_cpu: bool) -> Kernel:
    work, place = placed.work, placed.place
    operator = ranges[place.operator].name if place.operator is not None else None
    if is_cpu:
        family = "other" if work.name in (COMPILED, ENGINE) else operator_family(work.name)
    else:  # what a copy engine does is told by its own name, not by the operator
        family = kernel_family(work.name, operator or "" if work.is_kernel else "")
    lane: Lane = "communication" if family == "communication" else "compute" if work.is_kernel else "copies"
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
    )


def _costs(
    ranges: Sequence[Range], placed: Sequence[Placed], lists: Lists, *, is_cpu: bool
) -> tuple[dict[int, int], dict[int, Cost]]:
    """Index of a piece of work → the counted operator call it belongs to; and → that call's cost.

    That is the innermost call whose cost is known. A call that launches several kernels has its cost at one of them,
    the longest, so that sums count it once. On a CPU work is operators' own time, which belongs to that operator alone;
    one that leaves all it does to others is not counted, since they are.
    """
    parents = _operator_parents(ranges)
    counted: dict[int | None, tuple[int, Cost] | None] = {None: None}
    calls: dict[int, int] = {}
    longest: dict[int, int] = {}  # call → index of its longest work
    cost_of: dict[int, Cost] = {}
    for index, each in enumerate(placed):
        start = each.place.operator
        if start not in counted:
            counted[start] = _counted_call(ranges, {} if is_cpu else parents, start, lists)
        found = counted[start]
        if found is None:
            continue
        call, cost_of[found[0]] = found
        calls[index] = call
        if call not in longest or each.work.duration > placed[longest[call]].work.duration:
            longest[call] = index
    left_to_others = _left_to_others(cost_of, parents) if is_cpu else set()
    calls = {index: call for index, call in calls.items() if call not in left_to_others}
    return calls, {index: cost_of[call] for call, index in longest.items() if call not in left_to_others}


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


def _counted_call(
    ranges: Sequence[Range], parents: Mapping[int, int | None], index: int | None, lists: Lists
) -> tuple[int, Cost] | None:
    """The innermost operator call around a launch whose cost is known."""
    while index is not None:
        cost = operator_cost(ranges[index].name, ranges[index].tensors, lists)
        if cost is not None:
            return index, cost
        index = parents.get(index)
    return None


def _operator_parents(ranges: Sequence[Range]) -> dict[int, int | None]:
    """Operator → the operator that called it directly."""
    return {
        index: parent if parent is not None and ranges[parent].kind == "operator" else None
        for index, parent in enumerate(parents_of(ranges))
        if ranges[index].kind == "operator"
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
