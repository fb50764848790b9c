"""To which step, phase, module and operator each piece of work in a trace belongs.

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
process, when the work was launched; backward is over when `.backward()` returns. Work whose launch was not recorded
counts as unknown in the step that began last before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainstep.measure.profile.trace import Range, Thread, Trace, Work, parents_of

BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where work belongs; None for what is unknown."""

    step: str | None = None
    phase: str | None = None
    module: str | None = None
    piece: str | None = None
    """The piece of attention: scores, softmax or weighted sum."""
    operator: int | None = None
    """Index of the innermost operator's range."""
    node: int | None = None
    """Index of the innermost backward node's range."""


@dataclass(frozen=True, slots=True)
class AttributedWork:
    """Work and where it belongs."""

    work: Work
    place: Attribution


def attribute(trace: Trace) -> list[AttributedWork]:
    """Every piece of work of the trace, in the order it started, with its place."""
    places = _places(trace.ranges)
    innermost = _Innermost(trace.ranges)
    steps = _Steps(trace.ranges)
    placed = []
    for work in sorted(trace.work, key=lambda work: work.start):
        if work.launch is None:
            placed.append(AttributedWork(work, Attribution(step=steps.latest(work.start))))
            continue
        index = innermost.at(*work.launch)
        place = places[index] if index is not None else Attribution()
        placed.append(AttributedWork(work, replace(place, step=steps.at(work.launch[0][0], work.launch[1]))))
    return placed


def _places(ranges: Sequence[Range]) -> list[Attribution]:
    """The place of what each range starts itself. `ranges` are sorted by thread, start and falling end."""
    places: list[Attribution] = [Attribution()] * len(ranges)
    parents = parents_of(ranges)
    makers = _Makers()
    # Forward comes before its backward in time but not always in the order of threads, so go by time.
    latest_node: dict[Thread, int] = {}
    for index in sorted(range(len(ranges)), key=lambda index: (ranges[index].start, -ranges[index].end)):
        each, parent = ranges[index], parents[index]
        place = Attribution() if parent is None else places[parent]
        if each.kind == "phase":
            place = replace(place, phase=each.name, module=None, piece=None)
        elif each.kind == "module":
            place = replace(place, module=each.name, piece=None)
        elif each.kind == "attention":
            place = replace(place, piece=each.name)
        elif each.kind == "node":
            place = _node_place(ranges, places, index, place, makers, latest_node)
            latest_node[each.thread] = index
        elif each.kind == "operator":
            place = replace(place, operator=index)
            if each.sequence is not None:
                makers.note(each, place, index)
        places[index] = place
    return places


def _node_place(
    ranges: Sequence[Range],
    places: Sequence[Attribution],
    index: int,
    outer: Attribution,
    makers: _Makers,
    latest_node: dict[Thread, int],
) -> Attribution:
    each = ranges[index]
    inside = replace(outer, phase=BACKWARD, operator=None, node=index)
    if outer.node is not None and ranges[outer.node].name == each.name:
        return inside  # the engine announces a node, and the node itself again
    if each.is_accumulation:
        before = latest_node.get(each.thread)
        origin = places[before] if before is not None else None
    elif each.sequence is not None:
        made_by = makers.of(each, outer)
        origin = places[made_by] if made_by is not None else None
    else:
        origin = outer if outer.node is not None else None
    if origin is None:
        return replace(inside, module=None, piece=None)
    # What loss made has no module: it belongs to the loss.
    return replace(inside, module=origin.module or _owner(origin.phase), piece=origin.piece)


def _owner(phase: str | None) -> str | None:
    """Phases that own what no module does."""
    return f"({phase})" if phase in ("loss", "optimizer") else None


def owner_of(place: Attribution) -> str | None:
    """The module that work belongs to, or `(loss)` or `(optimizer)`, which have no modules; None where unknown."""
    return place.module or _owner(place.phase)


class _Makers:
    """Which operator made the node of a sequence number."""

    def __init__(self) -> None:
        self._forward: dict[int, int] = {}
        self._nested: dict[tuple[Thread, int], int] = {}

    def note(self, operator: Range, place: Attribution, index: int) -> None:
        """An operator that showed a number. Numbers are each thread's own, so what backward recomputes stands apart."""
        assert operator.sequence is not None, "an operator without a number makes no node"
        if place.node is None:
            self._forward[operator.sequence] = index
        else:
            self._nested[operator.thread, operator.sequence] = index

    def of(self, node: Range, outer: Attribution) -> int | None:
        """The operator that made a node; a node inside another's (reentrant checkpointing) was made there."""
        assert node.sequence is not None, "a node without a number has no maker"
        if outer.node is not None and (node.thread, node.sequence) in self._nested:
            return self._nested[node.thread, node.sequence]
        return self._forward.get(node.sequence)


class _Innermost:
    """Looks up the innermost range of a thread at a time."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._parents = parents_of(ranges)
        self._of_thread: dict[Thread, list[int]] = {}
        for index, each in enumerate(ranges):
            self._of_thread.setdefault(each.thread, []).append(index)
        self._starts = {thread: [ranges[index].start for index in own] for thread, own in self._of_thread.items()}

    def at(self, thread: Thread, time: float) -> int | None:
        """Index of the range, or None where the thread had none open."""
        position = bisect.bisect_right(self._starts.get(thread, []), time) - 1
        index: int | None = self._of_thread[thread][position] if position >= 0 else None
        while index is not None and self._ranges[index].end <= time:
            index = self._parents[index]
        return index


class _Steps:
    """Looks up the step that was under way in a process at a time."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._of_process: dict[int, list[Range]] = {}
        for each in sorted((each for each in ranges if each.kind == "step"), key=lambda each: each.start):
            self._of_process.setdefault(each.thread[0], []).append(each)
        self._starts = {process: [each.start for each in own] for process, own in self._of_process.items()}

    def at(self, process: int, time: float) -> str | None:
        """Name of the step, with that of the process where several take steps."""
        position = bisect.bisect_right(self._starts.get(process, []), time) - 1
        if position < 0 or time >= self._of_process[process][position].end:
            return None
        return self._name(process, position)

    def latest(self, time: float) -> str | None:
        """Name of the step that began last, in whichever process."""
        found = [(self._starts[process][position], process, position)
                 for process in self._starts
                 if (position := bisect.bisect_right(self._starts[process], time) - 1) >= 0]  # fmt: skip
        return self._name(*max(found)[1:]) if found else None

    def _name(self, process: int, position: int) -> str:
        name = self._of_process[process][position].name
        return name if len(self._of_process) == 1 else f"{process}: {name}"
