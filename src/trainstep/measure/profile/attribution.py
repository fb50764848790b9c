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
process, when the work was launched. Work whose launch was not recorded is unknown, in the step that began last.
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
    piece: str | None = None  # the piece of attention: scores, softmax or weighted sum
    operator: int | None = None  # index of the innermost operator's range
    node: int | None = None  # index of the innermost backward node's range


@dataclass(frozen=True, slots=True)
class AttributedWork:
    work: Work
    place: Attribution


def attribute(trace: Trace) -> list[AttributedWork]:
    """Every piece of work of the trace, in the order it started, with its place."""
    places = _Places(trace.ranges)
    steps = _Steps(trace.ranges)

    def place_of(work: Work) -> Attribution:
        if work.launch is None:
            return Attribution(step=steps.at(work.start, None))
        (process, _), time = work.launch
        return replace(places.at(*work.launch), step=steps.at(time, process))

    return [AttributedWork(work, place_of(work)) for work in sorted(trace.work, key=lambda work: work.start)]


def owner_of(place: Attribution) -> str | None:
    """The module that work belongs to, or `(loss)` or `(optimizer)`, which have no modules; None where unknown."""
    return place.module or (f"({place.phase})" if place.phase in ("loss", "optimizer") else None)


class _Places:
    """The place of what is started in a thread at a time. `ranges` are sorted by thread, start and falling end."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._parents = parents_of(ranges)
        self._of_thread: dict[Thread, list[int]] = {}
        for index, each in enumerate(ranges):
            self._of_thread.setdefault(each.thread, []).append(index)
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
        own = self._of_thread.get(thread, [])
        position = bisect.bisect_right(own, time, key=lambda index: self._ranges[index].start) - 1
        index: int | None = own[position] if position >= 0 else None
        while index is not None and self._ranges[index].end <= time:
            index = self._parents[index]
        return Attribution() if index is None else self._places[index]

    def _place(self, index: int, outer: Attribution) -> Attribution:
        """The place of what one range, inside `outer`, starts itself."""
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
            return replace(outer, operator=index)
        return outer

    def _node_place(self, index: int, outer: Attribution) -> Attribution:
        each = self._ranges[index]
        inside = replace(outer, phase=BACKWARD, operator=None, node=index)
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


class _Steps:
    def __init__(self, ranges: Sequence[Range]) -> None:
        steps = (each for each in ranges if each.kind == "step")
        self._steps = sorted(steps, key=lambda each: (each.start, each.thread[0]))
        self._processes = {each.thread[0] for each in self._steps}

    def at(self, time: float, process: int | None) -> str | None:
        """The step under way in a process, or that began last in any; with the process where several take steps."""
        began = self._steps[: bisect.bisect_right(self._steps, time, key=lambda each: each.start)]
        step = next((each for each in reversed(began) if process in (None, each.thread[0])), None)
        if step is None or (process is not None and time >= step.end):
            return None
        return step.name if len(self._processes) == 1 else f"{step.thread[0]}: {step.name}"
