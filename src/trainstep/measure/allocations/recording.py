"""Allocations of one step, recorded, and the owner of each, told from what the step announces while a log of them is
kept.

The log of a GPU is the caching allocator's own history, that of a CPU what `LiveStorages` follows. Positions in it are
counted, not timed. A `StepWatch` notes, at positions in the log, which phase, module and backward operation is running.
Module names come from forward hooks. A backward operation is a node of the autograd graph; nodes are numbered as they
are made, so the forward hooks also say which module, and a torch-function mode which line of code, made each of them.
That is exact: nothing is guessed from clocks. Compiled code has neither modules nor lines left; phases remain.

Owners are then decided by rules (`attribute`): a tensor that is known by its address (a parameter, a gradient, the
optimizer's state, the batch) owns its block; what forward, the loss, or a recomputed module made and left alive when it
ended is an activation; the rest of what the step made is temporary.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainstep.base.errors import UsageError
from trainstep.measure.allocations.snapshot import blocks_of, snapshot_of, with_owners
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, PhaseSpan, Timeline, is_alive, made_at
from trainstep.measure.memory import LiveStorages, StorageLife, graph_nodes, module_calls, operation_name, storages_of

LEAVING_ACTIVATIONS = ("forward", "loss")  # phases whose survivors are activations
DEEPEST = 40  # frames kept of a stack
Noted = TypeVar("Noted")


@dataclass(frozen=True)
class _Mark:
    position: int  # what follows is running from here on
    phase: str = ""
    module: str = ""
    operation: str = ""
    frames: tuple[Frame, ...] = ()
    span: int = -1  # index of the stretch of forward computation, -1 outside of any


@dataclass
class StepWatch:
    """Announcements of one step; hand `phase` and `loss_of` to the step, then call `attribute`."""

    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    sees_modules: bool = True  # False for compiled code
    hidden: tuple[str, ...] = ()  # folders whose frames are not shown, as their code is no user's
    position: Callable[[], int] = lambda: 0  # events in the allocator's log so far; set by the source that keeps it
    marks: list[_Mark] = field(default_factory=list)
    known: list[tuple[int, dict[int, tuple[str, str]]]] = field(default_factory=list)
    """Positions, and which tensors were known by address at each: address → (owner, name)."""
    phases: list[PhaseSpan] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)  # the position at which each stretch of forward computation ended
    _phase: str = ""
    _running: list[str] = field(default_factory=list)
    _node: _Mark = field(default_factory=lambda: _Mark(0))
    _entered: list[tuple[int, str]] = field(default_factory=list)
    _lines: _Lines = field(default_factory=lambda: _Lines())

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        """Watch one step on `batch`; `position` is set by now."""
        self._know(("batch", "", leaf) for leaf in tree_leaves(batch))
        resident = (*self.module.named_parameters(), *self.module.named_buffers())
        self._know(("parameters", name, each) for name, each in resident)
        self._know_gradients()  # of the step before, where another optimizer has still to take them
        self._know_optimizer_state()
        self._mark()
        with ExitStack() as stack:
            if self.sees_modules:
                stack.enter_context(module_calls(self.module.named_modules(), self._enter, self._leave))
                stack.enter_context(self._lines)
            yield
        self._know_optimizer_state()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step, as `config.PhaseContext`."""
        start = self.position()
        self._phase, self._node = name, _Mark(start, name)
        if name in LEAVING_ACTIVATIONS:
            self.spans.append(-1)
        if name == "optimizer":  # by now those that ranks share are averaged
            self._know_gradients()
        self._mark()
        yield
        if name in LEAVING_ACTIVATIONS:
            self.spans[-1] = self.position()
        if name == "backward":
            self._know_gradients()
        self.phases.append(PhaseSpan(name, start, self.position()))
        self._phase, self._node = "", _Mark(self.position())
        self._mark()

    def loss_of(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`loss`, with the graph behind its result watched during backward."""

        def watched(*args: Any) -> Tensor:
            value = loss(*args)
            if self.sees_modules:
                self.watch_graph(value)
            return value

        return watched

    def watch_graph(self, value: Any) -> None:
        """Have every node of the graph say when its backward runs. Keeps no node: that would keep its tensors."""
        places = sorted(self._entered, key=itemgetter(0))
        for node in graph_nodes(value):
            number = node._sequence_nr()
            if number < 2**63:  # AccumulateGrad is made with the parameter, and numbered apart
                module, frames = _latest(places, number, ""), _latest(self._lines.calls, number, ())
                node.register_prehook(partial(self._start_node, module, operation_name(node.name()), frames))

    def _start_node(self, module: str, operation: str, frames: tuple[Frame, ...], _: Any) -> None:
        self._node = _Mark(self.position(), self._phase, module, operation, frames)
        self.marks.append(self._node)

    def _enter(self, name: str) -> None:
        if not self._running and self._phase == "backward":
            self.spans.append(-1)
        self._running.append(name)
        self._entered.append((_sequence_number(), name))
        self._mark()

    def _leave(self) -> None:
        self._running.pop()
        self._entered.append((_sequence_number(), self._running[-1] if self._running else ""))
        if not self._running and self._phase == "backward":
            self.spans[-1] = self.position()
        self._mark()

    def _mark(self) -> None:
        span = len(self.spans) - 1 if self.spans and self.spans[-1] < 0 else -1
        if self._running or self._phase != "backward":
            operation = "computed again" if self._phase == "backward" else ""
            module = self._running[-1] if self._running else ""
            self.marks.append(_Mark(self.position(), self._phase, module, operation, span=span))
        else:  # back to the backward operation that asked for the recomputation
            node = self._node
            self.marks.append(_Mark(self.position(), node.phase, node.module, node.operation, node.frames))

    def _know(self, tensors: Iterable[tuple[str, str, Any]]) -> None:
        """Note the storages of (owner, name, value); values that are no tensors have none."""
        known = {storage.data_ptr(): (owner, name) for owner, name, value in tensors for storage in storages_of(value)}
        self.known.append((self.position(), known))

    def _know_gradients(self) -> None:
        with suppress(UsageError):  # of `trainstep.parallel`, until ranks have averaged them
            self._know(("gradients", name, weight.grad) for name, weight in self.module.named_parameters())

    def _know_optimizer_state(self) -> None:
        names = {id(weight): name for name, weight in self.module.named_parameters()}
        states = [
            (names.get(id(weight), ""), state) for each in self.optimizers for weight, state in each.state.items()
        ]
        self._know(("optimizer state", f"{name} {key}".strip(), state[key]) for name, state in states for key in state)

    def attribute(self, blocks: Sequence[Block], events: int) -> Timeline:
        """The blocks of the log with their owners."""
        positions = [mark.position for mark in self.marks]
        allocations = []
        for block in sorted(blocks, key=lambda block: block.start):
            mark = self.marks[bisect.bisect_left(positions, block.start) - 1] if block.start else _Mark(0)
            outlives = mark.span >= 0 and is_alive(block, self.spans[mark.span])
            made = ("activations" if outlives else "temporaries", mark.module) if block.start else ("unknown", "")
            known = (names[block.address] for at, names in self.known if block.address in names and is_alive(block, at))
            owner, name = next(known, made)
            hidden = (__file__, *self.hidden)
            frames = tuple(frame for frame in mark.frames or block.frames if not frame.file.startswith(hidden))
            allocations.append(Allocation(block, owner, name, mark.phase, mark.operation, frames, made_at(frames)))
        return Timeline(tuple(allocations), events, tuple(self.phases))


def _sequence_number() -> int:
    """The number that the next node of the autograd graph made on this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


class _Lines(TorchFunctionMode):
    """Lines of code that made the nodes of the graph: calls of torch functions, by the nodes' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, tuple[Frame, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _sequence_number()
        result = func(*args, **(kwargs or {}))
        if _sequence_number() > before:
            self.calls.append((before, python_frames(1)))
        return result


def _latest(noted: Sequence[tuple[int, Noted]], number: int, default: Noted) -> Noted:
    """Note that was taken last up to a number."""
    index = bisect.bisect_right(noted, number, key=itemgetter(0)) - 1
    return noted[index][1] if index >= 0 else default


def python_frames(skip: int) -> tuple[Frame, ...]:
    """The running Python stack, innermost first, without the `skip` innermost callers of this function."""
    stack = itertools.islice(traceback.walk_stack(sys._getframe(skip + 1)), DEEPEST)
    return tuple(Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in stack)


@dataclass(frozen=True)
class Recording:
    """Allocations of one step."""

    timeline: Timeline
    snapshot: Mapping[str, Any]  # as `torch.cuda.memory._snapshot` gives it, each allocation's owner as its category
    allocator_peak: int | None = None
    """The most bytes asked for at once, as the GPU's allocator counts: `timeline.peak` must equal it. None on a CPU."""
    is_uncompiled: bool = False  # whether code that is compiled otherwise ran eagerly, to be followed


def record_on_cpu(step: Callable[[], object], watch: StepWatch, batch: Any) -> Recording:
    """Run and record `step`, which takes one step on `batch` announcing itself to `watch`, in eager code."""
    with recording_on_cpu(watch, batch) as found:
        step()
    return found[0]


@contextmanager
def recording_on_cpu(watch: StepWatch, batch: Any = ()) -> Iterator[list[Recording]]:
    """Record the eager step taken inside, which announces itself to `watch`; the list has it once that is left."""
    seen: list[tuple[StorageLife, int, tuple[Frame, ...]]] = []

    def note(life: StorageLife, storage: torch.UntypedStorage) -> None:
        seen.append((life, storage.data_ptr(), python_frames(3) if life.start else ()))

    weights = [*watch.module.parameters(), *watch.module.buffers()]
    states = [list(each.state.values()) for each in watch.optimizers]
    live = LiveStorages(tree_leaves([weights, states, batch]), note)
    watch.position = lambda: live.events
    found: list[Recording] = []
    with watch.watching(batch), live:
        yield found
    blocks = [Block(life.start, life.end, life.bytes, address, frames) for life, address, frames in seen]
    timeline = watch.attribute(blocks, live.events)
    found.append(Recording(timeline, snapshot_of(timeline)))


def record_on_cuda(step: Callable[[], object], watch: StepWatch, batch: Any, device: torch.device) -> Recording:
    """Record as `record_on_cpu` does, for a step on `device`, eager or compiled."""
    with recording_on_cuda(watch, device, batch) as found:
        step()
    return found[0]


@contextmanager
def recording_on_cuda(watch: StepWatch, device: torch.device, batch: Any = ()) -> Iterator[list[Recording]]:
    """Record as `recording_on_cpu` does, for a step on `device`, eager or compiled."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch.cuda.synchronize(index)

    def count() -> int:
        counts = torch.cuda.memory_stats_as_nested_dict(index)["allocation"]["all"]
        return int(counts["allocated"] + counts["freed"])

    torch.cuda.reset_peak_memory_stats(index)
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", clear_history=True)
    before = count()
    watch.position = lambda: count() - before
    found: list[Recording] = []
    try:
        with watch.watching(batch):
            yield found
        torch.cuda.synchronize(index)
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    peak = torch.cuda.memory_stats(index)["requested_bytes.all.peak"]
    blocks, events = blocks_of(snapshot, index)
    timeline = watch.attribute(blocks, events)
    found.append(Recording(timeline, with_owners(snapshot, timeline, index), int(peak)))
