"""Waits of a step for other ranks, and how long anything is under way to them; without a profiler.

A step waits where its thread or, on a GPU, the stream that computes stops until a call to other ranks is over. torch
and we stop it through a few functions (`_WAITS`). `Waits` marks both sides of each in the timed steps: with the host's
clock on a CPU, with the stream's own events on a GPU. torch's DistributedDataParallel waits in C++ when backward has
ended, so there the mark is a callback of autograd that runs right before its own.

The phase "communication" is a wait as a whole. So the parts of a step add up to it: what the other phases compute, what
they wait, and that phase.

`Transfers` marks when calls begin and end, in one more step: it has to look at every operator for them. The time in
which at least one is under way is their union. A call begins when its stream comes to it, and ends when all is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.base.config import PhaseContext, together
from trainstep.measure.collectives import Collective, recorded_collectives
from trainstep.measure.profile.overlap import length, union
from trainstep.parallel.gloo import Staged, when_over
from trainstep.parallel.transport.by_copies import Channel
from trainstep.step.batches import tensors_of
from trainstep.step.training_step import TrainingStep

Function = Callable[..., Any]
Step = Callable[[PhaseContext], object]
_WAITS: Sequence[tuple[type, str]] = ((dist.Work, "wait"), (torch.cuda.Stream, "wait_event"))


class Marks:
    """Points in time: of the host's clock on a CPU, of a stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._beside = None if self.stream is None else torch.cuda.Stream(device)

    def now(self, stream: torch.cuda.Stream | None = None) -> Any:
        """A mark; on a GPU in `stream`, by default the one that computes."""
        if self.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or self.stream)
        return event

    def current(self) -> Any:
        """A mark; on a GPU in the current stream."""
        return self.now(None if self.stream is None else torch.cuda.current_stream(self.device))

    def after(self, wait: Callable[[], object]) -> Any:
        """A mark on a GPU once that is over which the current stream would wait for with `wait`, and no other does."""
        with torch.cuda.stream(self._beside):
            wait()
        return self.now(self._beside)

    def ms(self, first: Any, last: Any) -> float:
        """Milliseconds from a mark to one that is not earlier, once the device has passed both."""
        return (last - first) * 1e3 if self.stream is None else float(first.elapsed_time(last))


@contextmanager
def replaced(owner: type, name: str, around: Callable[[Function], Function]) -> Iterator[None]:
    """Inside, the class's function is what `around` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, around(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


class Waits:
    """Marks on both sides of every wait of the steps that are taken inside `watching`."""

    def __init__(self, step: TrainingStep) -> None:
        self.marks = Marks(step.device)
        self.phase: str | None = None
        self._steps: list[list[tuple[str, Any, Any]]] = []  # of each, the phase and both marks of every wait
        self._thread = threading.get_ident()
        self._backward_ended: Any = None
        if isinstance(step.replica.module, nn.parallel.DistributedDataParallel):
            step.on_outputs = self._watch_backward

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in _WAITS:
                stack.enter_context(replaced(owner, name, self._marked))
            yield

    def ms(self, steps: int) -> list[dict[str, float]]:
        """Milliseconds that each of the last steps waited, by phase without "communication", once the device is
        done."""
        found: list[dict[str, float]] = []
        for waits in self._steps[-steps:]:
            found.append({})
            for phase, first, last in waits:
                found[-1][phase] = found[-1].get(phase, 0.0) + self.marks.ms(first, last)
        return found

    def around(self, step: Step) -> Step:
        """The step, which tells its phases here too."""

        def taken(phase: PhaseContext) -> object:
            self._steps.append([])
            self._backward_ended = None
            return step(together(phase, self._in_phase))

        return taken

    @contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        self.phase = name
        try:
            yield
            if name == "backward" and self._backward_ended is not None:
                self._steps[-1].append((name, self._backward_ended, self.marks.now()))
        finally:
            self.phase = None

    def _marked(self, wait: Function) -> Function:
        def marked(waiter: Any, *args: Any, **kwargs: Any) -> Any:
            phase = self.phase
            if phase in (None, "communication") or not self._computes(waiter):
                return wait(waiter, *args, **kwargs)
            first = self.marks.now()
            try:
                return wait(waiter, *args, **kwargs)
            finally:
                self._steps[-1].append((str(phase), first, self.marks.now()))

        return marked

    def _computes(self, waiter: object) -> bool:
        """True if what would wait is what computes: not a side stream, nor another thread."""
        if self.marks.stream is None:
            return threading.get_ident() == self._thread
        stream = waiter if isinstance(waiter, torch.cuda.Stream) else torch.cuda.current_stream(self.marks.device)
        return bool(stream == self.marks.stream)

    def _watch_backward(self, outputs: Any) -> None:
        """Backward begins at the outputs, before DistributedDataParallel asks to be called at its end."""
        asked = False

        def ask(_: Tensor) -> None:
            nonlocal asked
            if not asked:
                asked = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(ask)

    def _end_backward(self) -> None:
        self._backward_ended = self.marks.now()


class Transfers:
    """Transfers: when each call to other ranks began and ended, in what runs inside `watching`."""

    def __init__(self, device: torch.device) -> None:
        self._marks = Marks(device)
        self._began = self._marks.now()
        self._spans: list[list[Any]] = []
        self._open: dict[object, list[Any]] = {}  # by what ends it

    @contextmanager
    def watching(self) -> Iterator[list[Collective]]:
        """Yields the collectives that are started inside, as `recorded_collectives` does."""
        with (
            replaced(Staged, "__init__", self._staged),
            replaced(dist.Work, "wait", self._ends_waited),
            replaced(Channel, "begin", lambda begin: self._channel(begin, self._channel_begins)),
            replaced(Channel, "end", lambda end: self._channel(end, self._channel_ends)),
            recorded_collectives(self._call_begins) as calls,
        ):
            yield calls

    def ms(self) -> float:
        """Milliseconds in which at least one call was under way, once the device is done."""
        unknown = list(self._open.values())  # nobody has waited for them
        spans = [span for span in self._spans if not any(span is each for each in unknown)]
        while any(len(span) < 2 for span in spans):  # the thread of the last one may be a moment behind
            time.sleep(1e-4)
        ms = self._marks.ms
        return length(union((ms(self._began, first), ms(self._began, last)) for first, last in spans))

    def _begin(self, first: Any) -> list[Any]:
        self._spans.append([first])
        return self._spans[-1]

    def _call_begins(self, device: torch.device) -> Callable[[dist.Work | None], object] | None:
        """Function to be told the work of a call over tensors of this device."""
        if device.type != self._marks.device.type:
            return None  # of a few bytes, over Gloo beside NCCL
        first = self._marks.current()

        def started(work: dist.Work | None) -> None:
            span = self._begin(first)
            if work is None:
                span.append(self._marks.current())
                return
            if self._marks.stream is not None:
                span.append(self._marks.after(work.wait))
                return
            try:
                when_over(work, lambda: span.append(self._marks.now()))
            except RuntimeError:  # Gloo's reduce-scatter does not tell: it is over when it was waited for
                self._open[work] = span

        return started

    def _ends_waited(self, wait: Function) -> Function:
        def waited(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            try:
                return wait(work, *args, **kwargs)
            finally:
                if (span := self._open.pop(work, None)) is not None:
                    span.append(self._marks.now())

        return waited

    def _staged(self, begin: Function) -> Function:
        """Ours over Gloo, past torch's dispatcher."""

        def begun(call: Staged, *args: Any, **kwargs: Any) -> None:
            begin(call, *args, **kwargs)
            if self._marks.stream is None:
                span = self._begin(self._marks.now())
                call.when_over(lambda: span.append(self._marks.now()))

        return begun

    @staticmethod
    def _channel(original: Function, then: Callable[[Channel], object]) -> Function:
        def told(channel: Channel, *args: Any) -> None:
            original(channel, *args)
            then(channel)

        return told

    def _channel_begins(self, channel: Channel) -> None:
        self._open[channel] = self._begin(self._marks.current())

    def _channel_ends(self, channel: Channel) -> None:
        self._open.pop(channel).append(self._marks.current())
