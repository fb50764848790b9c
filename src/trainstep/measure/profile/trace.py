"""Contents of a profiler's trace, whoever recorded it: ranges on host threads, the work that was started inside them,
and to which step, phase, module and operator each piece of work belongs.

torch.profiler's JSON (`chrome`) and Nsight Systems' SQLite exports (`nsys`) are both read into a `Trace`. On a CPU,
every operator's own time (without that of the operators it calls) is work.

Work belongs where its launch stands: to the ranges that were open on the launching thread at that moment. A node of
backward runs in a thread that opened no module's range; but autograd gave it the sequence number of the forward
operator that made it, and it belongs to that operator's module, in phase "backward". (Operators peek at the next number
when they start and nodes take it when they are made, so of all forward operators that show a number, the one that
started last made the node.) Three cases more:

- Adding a gradient to a leaf has no forward operator. The engine runs it right after the node that computed the
  gradient, so it belongs where that node does.
- Activations recomputed in backward call modules again: they belong to the module whose range is open, in backward.
- A compiled region has one forward operator and one node, and belongs to the module that was compiled.

No clock decides, with one exception that is exact: the step is the one whose range was open, on whichever thread of the
process, when the work was launched. Work whose launch was not recorded is unknown, in the step that began last. But a
device still works off its queue when recording begins. A stream runs in order, so unlaunched work before the stream's
first launched work was queued before, and belongs to no step.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from trainstep.measure.costs import Tensors
from trainstep.measure.profile.ranges import RangeKind

COMPILED = "compiled code"  # the name of a CPU's compiled loops: they make no operator calls of their own
ENGINE = "autograd engine"  # the name of the engine's own time on a CPU

Thread = tuple[int, int]  # (process, thread)
Launch = tuple[Thread, float]  # where and when the host started some work
WorkKind = Literal["kernel", "copy", "operator", "engine", "compiled", "collective"]
"""A GPU's kernels, and what its copy engines do (copies and fills); on a CPU, the own time of operators, of autograd's
engine, of compiled code, and Gloo's collectives."""


class Stream(NamedTuple):
    """A stream or thread, which runs one piece of work after the other."""

    owner: int | str  # a GPU's number, or a device's name where that does not tell it; on a CPU, the process
    number: int | str  # the stream's; on a CPU, the thread's


@dataclass(slots=True)  # not frozen, which takes twice the time to make; so are the others
class Range:
    """Something a host thread was doing from `start` to `end`, in microseconds of the trace."""

    thread: Thread
    start: float
    end: float
    kind: RangeKind
    name: str  # without the prefix of our own ranges and without NVTX's sequence number
    sequence: int | None = None  # Autograd's sequence number: shared by a forward operator and the node of its backward
    tensors: Tensors | None = None


@dataclass(slots=True)
class Work:
    """A kernel, copy or fill on a device; on a CPU, one stretch of an operator's own time. In microseconds."""

    name: str
    kind: WorkKind
    start: float
    duration: float
    stream: Stream
    launch: Launch | None  # None where the trace does not tell
    is_continued: bool = False  # whether it is a further stretch of work that was counted already
    bytes: float | None = None  # that a copy moves


@dataclass(frozen=True)
class Trace:
    ranges: list[Range] = field(default_factory=list)  # sorted by thread, start and falling end
    work: list[Work] = field(default_factory=list)
    device: str = ""  # name of the device that the work ran on, if the trace tells
    is_cpu: bool = False  # whether operators stand for kernels
    notes: tuple[str, ...] = ()  # what the reader left out or could not tell, as sentences


def parents_of(ranges: Sequence[Range]) -> list[int | None]:
    """For each range the index of the one directly around it. `ranges` are sorted by thread, start and falling end."""
    parents: list[int | None] = []
    stack: list[int] = []
    for index, each in enumerate(ranges):
        while stack and (ranges[stack[-1]].thread != each.thread or ranges[stack[-1]].end <= each.start):
            stack.pop()
        parents.append(stack[-1] if stack else None)
        stack.append(index)
    return parents


_OWN_NAMES: dict[RangeKind, tuple[WorkKind, str]] = {"operator": ("operator", ""), "collective": ("collective", "")}
_OWN_NAMES |= {"node": ("engine", ENGINE), "compiled": ("compiled", COMPILED)}
"""Ranges whose own time is work on a CPU → what work, and its name where that is not the range's."""


def own_time(ranges: Iterable[Range]) -> list[Work]:
    """The stretches in which each operator (or node, or compiled code) ran itself, as work of the thread's "stream".

    The first stretch counts as the call; a collective of Gloo is one. `ranges` are sorted as in a `Trace`.
    """
    found: list[Work] = []
    stack: list[tuple[Range, list[float]]] = []  # a range, until when its time is accounted for, and its stretches

    def stretch(owner: Range, accounted: list[float], until: float) -> None:
        if owner.kind in _OWN_NAMES and until > accounted[0]:
            kind, name = _OWN_NAMES[owner.kind]
            where = (Stream(*owner.thread), (owner.thread, accounted[0]))
            found.append(Work(name or owner.name, kind, accounted[0], until - accounted[0], *where, bool(accounted[1])))
            accounted[1] = 1
        accounted[0] = max(accounted[0], until)

    def close(until: float, thread: Thread | None) -> None:
        while stack and (stack[-1][0].thread != thread or stack[-1][0].end <= until):
            each, accounted = stack.pop()
            stretch(each, accounted, each.end)
            if stack:
                stack[-1][1][0] = max(stack[-1][1][0], each.end)

    for each in ranges:
        close(each.start, each.thread)
        if stack and stack[-1][0].kind == "collective":
            continue  # copies and sums inside a collective are part of it
        if stack:
            stretch(*stack[-1], each.start)
        stack.append((each, [each.start, 0]))
    close(float("inf"), None)
    return found


@dataclass(slots=True)
class Attribution:
    """Step, phase, module and operator of a piece of work; None for what is unknown."""

    step: str | None = None
    phase: str | None = None
    module: str | None = None
    piece: str | None = None  # the piece of attention: scores, softmax or weighted sum
    operator: int | None = None  # index of the innermost operator's range
    node: int | None = None  # index of the innermost backward node's range


Placed = tuple[Work, Attribution]


def attribute(trace: Trace) -> list[Placed]:
    """Every piece of work of the trace, in the order it started, with its place."""
    places, steps = _Places(trace.ranges), _Steps(trace.ranges)
    ordered = sorted(trace.work, key=lambda work: work.start)
    begun: dict[Stream | int | str, float] = {}  # stream, and device → start of its first launched work
    for each in ordered:
        if each.launch is not None:
            begun.setdefault(each.stream, each.start)
            begun.setdefault(each.stream.owner, each.start)

    def place_of(work: Work) -> Attribution:
        if work.launch is None:
            # A stream that launches nothing goes by its device. Where a device has no launches, only the clock is left.
            queued_before = work.start < begun.get(work.stream, begun.get(work.stream.owner, work.start))
            return Attribution(step=None if queued_before else steps.begun_before(work.start))
        thread, time = work.launch
        place, step = places.at(thread, time), steps.at(thread[0], time)
        return Attribution(step, place.phase, place.module, place.piece, place.operator, place.node)

    return [(work, place_of(work)) for work in ordered]


class _Steps:
    """The steps of each process, by whoever announced them: we, else torch's profiler, else anybody.

    A range inside a step is a part of it, however it is named. Steps of one name are numbered.
    """

    def __init__(self, ranges: Iterable[Range]) -> None:
        found: dict[RangeKind, list[Range]] = {"step": [], "profiler step": [], "named step": []}
        for each in ranges:
            if each.kind in found:
                found[each.kind].append(each)
        announced = sorted(next(filter(None, found.values()), []), key=lambda each: (each.start, -each.end))
        self._steps: dict[int, list[Range]] = {}
        for each in announced:
            own = self._steps.setdefault(each.thread[0], [])
            if not own or each.start >= own[-1].end:
                own.append(each)
        self._starts = {process: [each.start for each in own] for process, own in self._steps.items()}
        self._names = {process: list(self._named(process)) for process in self._steps}

    def _named(self, process: int) -> Iterator[str]:
        seen = Counter[str]()
        for each in self._steps[process]:
            seen[each.name] += 1
            name = each.name if seen[each.name] == 1 else f"{each.name} ({seen[each.name]})"
            yield name if len(self._steps) == 1 else f"{process}: {name}"

    def at(self, process: int, time: float) -> str | None:
        """The step under way in a process."""
        index = bisect.bisect_right(self._starts.get(process, []), time) - 1
        return self._names[process][index] if index >= 0 and time < self._steps[process][index].end else None

    def begun_before(self, time: float) -> str | None:
        """The step that began last, for work whose launch is unknown; None where several processes take steps."""
        if len(self._steps) != 1:
            return None
        ((process, starts),) = self._starts.items()
        index = bisect.bisect_right(starts, time) - 1
        return self._names[process][index] if index >= 0 else None


def owner_of(place: Attribution) -> str | None:
    """The module that work belongs to, or `(loss)` or `(optimizer)`, which have no modules; None where unknown."""
    return place.module or (f"({place.phase})" if place.phase in ("loss", "optimizer") else None)


class _Places:
    """The place of what is started in a thread at a time. `ranges` are sorted by thread, start and falling end."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._parents = parents_of(ranges)
        self._starts = [(each.thread, each.start) for each in ranges]
        self._places = [Attribution()] * len(ranges)
        # The operator that made the node of a sequence number. Numbers are each thread's own, so what a thread makes
        # inside nodes, as backward recomputes, stands apart.
        self._makers: dict[tuple[Thread | None, int | None], int] = {}
        self._latest_node: dict[Thread, int] = {}
        # Forward comes before its backward in time but not always in the order of threads, so go by time.
        for index in sorted(range(len(ranges)), key=lambda index: (ranges[index].start, -ranges[index].end)):
            parent = self._parents[index]
            self._places[index] = self._place(index, Attribution() if parent is None else self._places[parent])

    def at(self, thread: Thread, time: float) -> Attribution:
        """The place of the innermost range; nothing is known where the thread had none open."""
        position = bisect.bisect_right(self._starts, (thread, time)) - 1
        index = position if position >= 0 and self._ranges[position].thread == thread else None
        while index is not None and self._ranges[index].end <= time:
            index = self._parents[index]
        return Attribution() if index is None else self._places[index]

    def _place(self, index: int, outer: Attribution) -> Attribution:
        each = self._ranges[index]
        if each.kind == "phase":
            return replace(outer, phase=each.name, module=None, piece=None)
        if each.kind == "module":
            return replace(outer, module=each.name, piece=None)
        if each.kind == "attention":
            return replace(outer, piece=each.name)
        if each.kind == "node":
            place = self._node_place(index, outer)
            self._latest_node[each.thread] = index
            return place
        if each.kind == "operator":
            self._makers[None if outer.node is None else each.thread, each.sequence] = index
            return Attribution(outer.step, outer.phase, outer.module, outer.piece, index, outer.node)  # of most ranges
        return outer

    def _node_place(self, index: int, outer: Attribution) -> Attribution:
        each = self._ranges[index]
        inside = replace(outer, phase="backward", operator=None, node=index)
        if outer.node is not None and self._ranges[outer.node].name == each.name:
            return inside  # the engine announces a node, and the node itself again
        maker = None
        if each.name.endswith("AccumulateGrad"):  # a node that no forward operator made
            maker = self._latest_node.get(each.thread)
        elif each.sequence is not None:
            maker = self._makers.get((None, each.sequence))
            if outer.node is not None:  # a node inside another's (reentrant checkpointing) was made there
                maker = self._makers.get((each.thread, each.sequence), maker)
        elif outer.node is not None:
            return replace(inside, module=owner_of(outer))
        origin = Attribution() if maker is None else self._places[maker]
        return replace(inside, module=owner_of(origin), piece=origin.piece)  # what loss made belongs to the loss
