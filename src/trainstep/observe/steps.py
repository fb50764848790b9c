"""The step, found in what a training script does: calls of the model, backward, the optimizer, the loader.

A step is from the end of one optimizer step to the end of the next. Its time is told apart into phases that follow one
another without a gap: at every moment one is under way, so that they add up to the step. Time that no call claims is
the loss (from a forward pass to its backward pass) or anything else.

- Several backward passes in a step are gradient accumulation.
- An optimizer that steps right after another, with no backward pass between them, belongs to the same step. With
  one between them (a GAN's two optimizers) each has steps of its own.
- A step that a gradient scaler leaves out ends where the optimizer would have stepped, and is marked.
- A model in evaluation mode that is called without gradients is an evaluation. So is one that was trained before and
  keeps its graphs, unless a backward pass follows. That pass takes the calls since the last batch, but for those before
  a call in training mode.
- Where no call of a model is seen before a backward pass, forward and loss are one phase, "forward".

Nothing here knows torch: times are marks that somebody else makes and reads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

DATA, COPIES, FORWARD, LOSS, BACKWARD = "data", "copies", "forward", "loss", "backward"
COMMUNICATION, OPTIMIZER, OTHER, EVALUATION = "communication", "optimizer", "other", "evaluation"
GRADIENTS = "gradients"  # a call of `torch.autograd.grad`; its phase is backward
KEPT = "evaluation with gradients"  # is forward or evaluation once it is known whether a backward pass follows
CALLS = (FORWARD, EVALUATION, KEPT)
"""Calls of a model, in which further ones are a part of it."""


WAITS_FOR_OTHERS = frozenset({DATA, COPIES, COMMUNICATION})
"""Phases in which a device without work does not wait for launches."""


def count() -> Any:
    """A field that counts what happens in a step: an update that belongs to the same step adds its own."""
    return field(default=0, metadata={"is_count": True})


@dataclass(slots=True)
class Step:
    """A step: counted while it runs, written to the log, and read from there.

    A new field is written and read as it is. Where several updates make one step, `count()` fields add up, and a row of
    the script has the median of those that are columns of it.
    """

    number: int = 0  # from 1 on
    updated: list[str] = field(default_factory=list)  # the optimizers that stepped
    phases: list[str] = field(default_factory=list)  # that followed one another
    marks: list[Any] = field(default_factory=list, metadata={"is_logged": False})  # their beginnings, then the end
    host: list[float] = field(default_factory=list)  # milliseconds of each phase
    device: list[float] = field(default_factory=list)  # the same by the device's clock; empty without a GPU
    forwards: int = count()
    backwards: int = count()
    evaluations: int = count()
    hooks_ms: float = count()  # that measuring it took
    samples: int = count()  # in the batches that loaders gave
    batches: int = count()  # that loaders gave
    sent: int = count()  # forward passes whose backward pass sends gradients to other ranks
    stock: tuple[int, int] = (0, 0)  # batches at its end: that lay ready in loaders, and with those that were asked for
    memory: list[float] = field(default_factory=list)  # MiB at its end: the process's own, and torch's on a GPU
    is_skipped: bool = False  # whether a scaler left the update out
    tags: set[str] = field(default_factory=set)  # what an instrument did meanwhile
    waits: dict[int, list[float]] = field(default_factory=dict)  # line → [calls, milliseconds]
    seen: dict[int, int] = field(default_factory=dict)  # line and its phase → samples in which it was under way
    ahead_ms: float = field(default=0.0, metadata={"is_logged": False})  # of the host, at the end
    starved_ms: float = field(default=0.0, metadata={"is_logged": False})  # in which the device had no work, at most

    def add(self, other: Step) -> None:
        """Take in another update that belongs to this step, and what came before it."""
        self.phases += other.phases
        self.marks += other.marks[1:]  # it began where this one ended
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.updated += [name for name in other.updated if name not in self.updated]
        self.stock, self.memory = other.stock, other.memory
        self.tags |= other.tags
        for line, (calls, ms) in other.waits.items():
            self.waited(line, calls, ms)

    def waited(self, line: int, calls: float, ms: float) -> None:
        """Add calls and milliseconds to those of a line."""
        known = self.waits.setdefault(line, [0, 0.0])
        known[0] += calls
        known[1] += ms

    @property
    def host_ms(self) -> dict[str, float]:
        """Phase → milliseconds of the host; they add up to the step."""
        return self._by_phase(self.host)

    @property
    def ms(self) -> dict[str, float]:
        """The same, as the device had it where there is one."""
        return self._by_phase(self.device or self.host)

    def _by_phase(self, times: Sequence[float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for phase, ms in zip(self.phases, times, strict=True):
            found[phase] = found.get(phase, 0.0) + ms
        return found

    def logged(self) -> dict[str, Any]:
        """Fields of the step for the log, without those that are empty."""
        found = {name: value for name in _LOGGED if (value := getattr(self, name))}
        if not any(found.get("stock", ())):
            found.pop("stock", None)
        for clock in ("host", "device"):
            if clock in found:
                found[clock] = [round(ms, 4) for ms in found[clock]]
        if self.hooks_ms:
            found["hooks_ms"] = round(self.hooks_ms, 4)
        if self.tags:
            found["tags"] = sorted(self.tags)
        return found

    @classmethod
    def read(cls, entry: Mapping[str, Any], before: Step | None) -> Step:
        """The step of a log's entry.

        Args:
            entry: as `logged` makes it, after JSON, whose lists and keys are no sets, tuples and numbers.
            before: the step before it, which leaves the host ahead of the device.
        """
        step = cls(**entry)
        step.stock, step.tags = (step.stock[0], step.stock[1]), set(step.tags)
        step.waits = {int(line): each for line, each in step.waits.items()}
        step.seen = {int(line): count for line, count in step.seen.items()}
        if step.device:
            step._see_lag(before.ahead_ms if before is not None else 0.0)
        return step

    def _see_lag(self, ahead_ms: float) -> None:
        """Find by how much the host is ahead at the end, and how long the device can have waited for launches.

        A device that is `ahead_ms` behind when the host begins something has work for that long. So it is without any
        for at most the time that the host needs beyond that, however long a launch itself took: a full queue lets none
        pass.
        """
        for phase, on_host, on_device in zip(self.phases, self.host, self.device, strict=True):
            if phase not in WAITS_FOR_OTHERS:
                self.starved_ms += min(on_device, max(0.0, on_host - ahead_ms))
            ahead_ms = max(0.0, ahead_ms + on_device - on_host)
        self.ahead_ms = ahead_ms


COUNTS = tuple(each.name for each in fields(Step) if each.metadata.get("is_count"))
_LOGGED = tuple(each.name for each in fields(Step) if each.metadata.get("is_logged", True))


def phase_shares(steps: Sequence[Step]) -> dict[str, float]:
    """Phase → its share of a run's steps, as the device had it where there is one; "launches" → the share in which the
    device may have waited for them. The first step, in which loaders start, is left out."""
    found = sum((Counter(step.ms) for step in steps[1:]), Counter())
    ms = dict(found) | {"launches": sum(step.starved_ms for step in steps[1:])}
    return {phase: each / found.total() for phase, each in ms.items()} if found else {}


class StepFinder:
    """Told what begins and ends, hands out the steps.

    Args:
        mark: makes a mark of the present moment.
        on_step: called with each step once it is sure that it has ended, at the beginning of something that belongs to
            the next one.
    """

    def __init__(self, mark: Callable[[], Any], on_step: Callable[[Step], object]) -> None:
        self.mark, self.on_step = mark, on_step
        self.listeners: list[Callable[[str], object]] = []  # called with each phase that begins
        self.on_end: Callable[[], object] = lambda: None  # called when an optimizer step has ended
        self.in_stock: Callable[[], tuple[int, int]] = lambda: (0, 0)  # as a step's `stock`, now
        self.in_memory: Callable[[], list[float]] = list  # as a step's `memory`, now
        self.ended = 0  # steps that have ended so far
        self.steps_taken = 0  # times that an optimizer stepped
        self._thread = threading.get_ident()
        self._is_off = self._has_backward = self._has_gradients = False
        self._stack: list[str | None] = []  # what is under way, the innermost last; None: what no call claims
        self._between = OTHER  # what no call claims, here
        self._current = ""
        self._optimizers: list[int] = []  # stepping now
        self.calls_back = False  # whether the one that stepped last may call backward itself, unseen
        self._kept: list[tuple[int, int | None]] = []  # the step's calls with gradients: place of the phase, and line
        self.noted: Counter[int] = Counter()  # line, numbered for a habit of the script's → times seen
        self._last: Step | None = None  # ended, but another optimizer's update may still belong to it
        self._open: Step | None = None

    @property
    def is_under_way(self) -> bool:
        """True if a step has begun, so that what happens belongs to one."""
        return self._open is not None

    @property
    def backwards(self) -> int:
        """Backward passes of the step under way."""
        return self._open.backwards if self._open is not None else 0

    @property
    def current(self) -> str:
        """The phase that is under way."""
        return self._current

    def is_mine(self) -> bool:
        """True if this thread is the one that trains."""
        return threading.get_ident() == self._thread

    def switch_off(self) -> None:
        """From here on nothing is noted, as in a process that was forked."""
        self._is_off, self._thread = True, -1

    def enter(self, phase: str, line: int | None = None) -> bool:
        """A phase begins, in a line where that matters. False where it is part of another one: then it is not to be
        left."""
        if not self._is_off and (self._open is None or (phase == BACKWARD and not self._has_backward)):
            self._take_thread()
        if phase == BACKWARD and self._stack[-1:] == [OPTIMIZER] and self.is_mine() and not self.calls_back:
            self._forget_updates()
        if not self.is_mine() or BACKWARD in self._stack:
            return False
        if phase in CALLS and set(CALLS) & set(self._stack):
            return False
        if self._last is not None and phase in (DATA, FORWARD, BACKWARD):
            self.settle()
        if self._open is None:
            if phase in (EVALUATION, KEPT, COPIES, COMMUNICATION):
                return False  # before training
            self._open = Step(phases=[phase], marks=[self.mark()])
            self._current = phase
        if phase in CALLS:
            self._open.forwards += phase == FORWARD
            self._open.evaluations += phase == EVALUATION
        elif phase == BACKWARD:
            self._take_kept(self._open)
            self._open.backwards += 1
            self._has_backward = True
            if not self._open.forwards and self._open.phases[-1] == OTHER:
                self._open.phases[-1] = FORWARD
        self._stack.append(phase)
        self._switch(phase)
        if phase == KEPT:
            self._kept.append((len(self._open.phases) - 1, line))
        return True

    def _take_kept(self, step: Step) -> None:
        """A backward pass begins, and some calls with gradients are its forward."""
        if self._kept:
            phases = step.phases
            first = 1 + max((place for place, each in enumerate(phases) if each in (DATA, BACKWARD)), default=-1)
            first = first + phases[first:].index(FORWARD) if FORWARD in phases[first:] else first
            taken = [place for place, _ in self._kept if place >= first]
            for place in range(taken[0], len(phases)) if taken else ():
                phases[place] = {KEPT: FORWARD, OTHER: LOSS}.get(phases[place], phases[place])
            step.forwards += len(taken)
            self._kept = [each for each in self._kept if each[0] < first]

    def tell_kept(self) -> None:
        """No backward pass follows any more: calls with gradients were an evaluation."""
        for place, line in self._kept:
            if self._open is not None:
                self._open.phases[place] = EVALUATION
                self._open.evaluations += 1
                self.noted.update([line] if line is not None else [])
        self._kept.clear()

    def differentiate(self) -> bool:
        """`torch.autograd.grad` begins, which is a backward pass of its own only where the step has no other. False
        where it is not to be left, as `enter` has it."""
        if self._open is not None and self._stack[-1:] == [KEPT]:
            self._kept[-1] = self._kept[-1][0], None  # it needs its graph
        if self._open is None or not self.is_mine() or {*CALLS, BACKWARD} & set(self._stack):
            return False
        self._take_kept(self._open)
        self.settle()
        self._has_gradients = True
        self._stack.append(GRADIENTS)
        self._switch(BACKWARD)
        return True

    def _take_thread(self) -> None:
        """Whoever begins the first step trains, unless another thread begins the first backward pass: then the one
        before only loaded data."""
        if not self.is_mine():
            self._thread = threading.get_ident()
            self._open = None
            self._stack.clear()

    def leave(self, at: Any = None) -> None:
        """The phase that began last ends: now, or at a mark that was made."""
        if not self._stack:
            return
        left = self._stack.pop()
        if left in (FORWARD, BACKWARD):
            self._between = LOSS if left == FORWARD else OTHER
        self._return(at)

    def claim_nothing(self) -> None:
        """Until `leave`, what runs is no part of the phase around it: a closure that an optimizer calls."""
        self._stack.append(None)
        self._return()

    def backward_computed(self) -> None:
        """Mark that the rest of the backward pass is waiting for other ranks; called in any of autograd's threads."""
        if self._stack and self._stack[-1] == BACKWARD:
            self._switch(COMMUNICATION)

    def _forget_updates(self) -> None:
        """Forget updates under way: an exception left an optimizer's step."""
        self._optimizers.clear()
        self._stack.clear()

    def optimizer_begins(self, optimizer: int) -> None:
        """An optimizer, told by its number, is about to step."""
        if optimizer in self._optimizers:
            self._forget_updates()
        if self.enter(OPTIMIZER):
            self._optimizers.append(optimizer)

    def optimizer_ended(self, optimizer: int, name: str, *, is_skipped: bool = False) -> None:
        """Mark that the optimizer has stepped, or was left out by a scaler. Inside another optimizer's step it is a
        part of that."""
        if optimizer in self._optimizers:
            self._optimizers.remove(optimizer)
            self._stack.pop()
            self.steps_taken += 1
        elif not is_skipped:
            return
        if self._optimizers or self._open is None:
            return
        self._between = OTHER
        self.tell_kept()
        self._open.backwards = self._open.backwards or int(self._has_gradients)
        self._has_gradients = False
        end, open_, last = self.mark(), self._open, self._last
        open_.marks.append(end)
        open_.updated, open_.stock, open_.memory = [name], self.in_stock(), self.in_memory()
        if open_.backwards == 0 and last is not None:
            last.add(open_)
        else:
            self.settle()
            self.ended += 1
            open_.number, open_.is_skipped = self.ended, is_skipped
            self._last = open_
        self._current = next((each or self._between for each in reversed(self._stack)), self._between)
        self._open = Step(phases=[self._current], marks=[end])
        self.on_end()

    def waited(self, line: int, ms: float, calls: int = 1) -> None:
        """The host waited in a line of code, told by its number."""
        if self._open is not None and calls:
            self._open.waited(line, calls, ms)

    def sends(self) -> None:
        """The backward pass of the forward pass that begins sends gradients to other ranks."""
        if self._open is not None:
            self._open.sent += 1

    @property
    def sends_again(self) -> bool:
        """True if the step under way has had several backward passes, and each sent gradients."""
        return self._open is not None and 1 < self._open.backwards <= self._open.sent

    def took(self, samples: int) -> None:
        """A batch of so many samples came from a loader."""
        if self._open is not None:
            self._open.samples += samples
            self._open.batches += 1

    def evaluated(self) -> None:
        """A part of an evaluation is in the step under way."""
        if self._open is not None:
            self._open.evaluations += 1

    def measuring_took(self, ms: float) -> None:
        """Add to what measuring the step under way took."""
        if self._open is not None:
            self._open.hooks_ms += ms

    def tag(self, what: str) -> None:
        """Note that an instrument does something in the step under way."""
        if self._open is not None:
            self._open.tags.add(what)

    def settle(self) -> None:
        """Hand out the step that ended last."""
        if self._last is not None:
            step, self._last = self._last, None
            self.on_step(step)

    def _return(self, at: Any = None) -> None:
        """Back to what is around."""
        top = self._stack[-1] if self._stack else None
        if self._open is not None:
            self._switch(self._between if top is None else BACKWARD if top == GRADIENTS else top, at)

    def _switch(self, phase: str, at: Any = None) -> None:
        if phase != self._current and self._open is not None:
            self._open.phases.append(phase)
            self._open.marks.append(self.mark() if at is None else at)
            self._current = phase
            if self.is_mine():  # not one of autograd's threads
                for listener in self.listeners:
                    listener(phase)
