"""Hooks tell a `StepFinder` what a script does, whose lines stay as they are: the entries of the `border`.

- Optimizers: torch's global hooks before and after every `step`.
- Backward: where there are several ranks, a callback that the engine runs when all nodes are done, before those of data
  parallel wrappers, tells computing from waiting.
- Loaders: taking a batch from the iterator of a `DataLoader`.
- Models: see `modules`. Waits: methods of tensors and of torch.cuda that wait for the device.

A deep session sees more (`beyond`), for which frames of ours are around calls.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainstep.observe.border import READS, Begins, Begun, Border, Function, Site, leave_uncompiled, left_uncompiled
from trainstep.observe.habits import SENDS
from trainstep.observe.lines import Lines, owner_of, place_of_call
from trainstep.observe.loaders import Loaders
from trainstep.observe.modules import Roots
from trainstep.observe.steps import BACKWARD, DATA, StepFinder

_GRAD = torch.autograd.grad.__code__


TIMED = 64
"""Reads of a line of the user's that are timed on a CPU, where they wait for nothing; later ones are counted."""
CLOSURES = (FunctionType, MethodType, functools.partial)
"""Types of an optimizer's closure: another callable object may be a model, or have methods of its own."""


class Hooks:
    """Hooks in torch while a script runs; `remove` takes all of them back.

    Args:
        finder: who is told.
        lines: numbers the lines of code that wait.
        is_deep: whether to see copies, collectives and gradient scalers too, and any model's class.
        on_failure: called with the exception that ended the observation.
    """

    def __init__(
        self,
        finder: StepFinder,
        lines: Lines,
        *,
        is_deep: bool = False,
        on_failure: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        self.finder, self.lines, self.is_deep = finder, lines, is_deep
        self.border = Border(on_failure, is_immediate=is_deep)
        self.roots, self.loaders = Roots(self), Loaders(lambda: self.on_loader())
        self.on_gpu = False  # whether the models are on a GPU, where the host need not wait for what it gave it to do
        self.on_loss: Callable[[Any], object] | None = None  # called with what backward begins at
        self.on_backward: Callable[[], object] = lambda: None
        self.on_loader: Callable[[], object] = lambda: None  # called when batches come from a loader for the first time
        self.before_optimizer: Callable[[Optimizer], object] = lambda optimizer: None
        self.before_update: Callable[[Optimizer], object] | None = None  # with its gradients
        self.coming_mark: Callable[[], tuple[Iterable[Iterator[Any]], Any]] = lambda: ((), None)
        """Called where a call begins: what is to be recorded when it ends, and the event that this will be."""
        self._names: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._counts: dict[str, int] = {}
        self._searched = self._is_aside = False
        self._read: object | None = None  # the read under way
        self._sites: dict[tuple[int, int], Site] = {}  # address of code and place in it → its reads
        self._began_at: Any = None  # the place where a loader is begun
        self._told_s = 0.0  # of `border.spent_s`
        self._undo = ExitStack()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that have stepped, in the order of their first step."""
        return list(self._names)

    @property
    def is_reading(self) -> bool:
        """True if a read of a tensor is under way, which is timed, or one of our own."""
        return self._is_aside or self._read is not None

    def install(self) -> None:
        """Change torch."""
        leave_uncompiled()
        border = self.border
        self._install_optimizers()
        border.function((torch.autograd.graph, torch.autograd), "_engine_run_backward", self._backward_begins)
        border.method(_BaseDataLoaderIter, "__next__", self.within(DATA), self._took)
        border.method(_BaseDataLoaderIter, "_next_index", lambda iterator, frame: None, self.loaders.drew)
        border.method(DataLoader, "__iter__", self._iterating, self._iterates)
        for name in READS:
            border.method(torch.Tensor, name, self._reads(name))
        if torch.version.cuda is not None or torch.version.hip is not None:
            waits = self._waits("torch.cuda.synchronize")
            border.function((torch._C,), "_cuda_synchronize", waits)
            for kind in (torch.cuda.Event, torch.cuda.Stream):
                border.method(kind, "synchronize", self._waits(f"{kind.__name__}.synchronize"))

    def remove(self) -> None:
        """Put everything back as it was."""
        with contextlib.suppress(Exception):  # as told to the border's `on_failure`, where it matters
            self.border.drain()
        self._undo.close()
        self.border.remove()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Mark as our doing what is waited for or moved while entered: no line of the script's is told of it."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    def search_models(self) -> None:
        """Look for the models, once."""
        if not self._searched:
            self._searched = True
            self.roots.search()

    def begins(self, phase: str, line: int | None = None) -> Begun:
        """A phase begins with a call, which ends it; None where it is part of another one."""
        self._read = None  # one that another call comes into was only looked up
        return self._until_left() if self.finder.enter(phase, line) else None

    def within(self, phase: str) -> Begins:
        """The same, of all calls of a method."""
        return lambda of, frame: self.begins(phase)

    def _until_left(self, then: Callable[[], object] = lambda: None) -> Begun:
        recorded, event = self.coming_mark()

        def ended(at_s: float) -> None:
            then()
            self.finder.leave((at_s, event))

        return ended, recorded

    def _install_optimizers(self) -> None:
        border = self.border

        def begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return border.guard(self._optimizer_begins, optimizer, args, kwargs)

        def ended(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            border.guard(self._optimizer_ended, optimizer)

        self._undo.callback(register_optimizer_step_pre_hook(left_uncompiled(begins)).remove)
        self._undo.callback(register_optimizer_step_post_hook(left_uncompiled(ended)).remove)

    def _optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._read = None
        self.before_optimizer(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not isinstance(closure, CLOSURES) and self.before_update is not None:
            self.before_update(optimizer)
        if not self.finder.is_mine() and self.finder.is_under_way:
            return None
        self.search_models()
        self.name_of(optimizer)
        self.finder.optimizer_begins(id(optimizer))
        self.finder.calls_back = callable(closure) and not isinstance(closure, CLOSURES)
        return self._with_closure(closure, args, kwargs) if isinstance(closure, CLOSURES) else None

    def _optimizer_ended(self, optimizer: Optimizer) -> None:
        if self.finder.is_mine():
            for site in list(self.border.counted.values()):
                self.finder.waited(site.line, site.calls * site.ms / site.timed, site.calls)
                self.border.spent_s += site.calls * self.border.count_s
                site.calls = 0
            spent_s = self.border.spent_s
            self.finder.measuring_took((spent_s - self._told_s) * 1e3)
            self._told_s = spent_s
            self.finder.optimizer_ended(id(optimizer), self.name_of(optimizer))

    def name_of(self, optimizer: Optimizer) -> str:
        """`AdamW`; `AdamW 2` for the second of that class."""
        if optimizer not in self._names:
            kind = type(optimizer).__name__
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[optimizer] = kind if number == 1 else f"{kind} {number}"
        return self._names[optimizer]

    def _with_closure(self, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of an optimizer's step, in which a closure's forward and backward passes are no update."""

        def begins(_: Any, frame: FrameType) -> Begun:
            self.finder.claim_nothing()
            return self._until_left()

        outside: Callable[[], Any] = Function(self.border, closure, begins)
        if self.before_update is not None:
            outside = self._then_updates(outside, args[0])
        if "closure" in kwargs:
            return args, {**kwargs, "closure": outside}
        return (args[0], outside, *args[2:]), kwargs

    def _then_updates(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """A ladder's trial looks at the gradients after the first call."""
        is_first = True

        def call() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first and self.before_update is not None:
                is_first = False
                self.border.guard(self.before_update, optimizer)
            return loss

        return call

    def _backward_begins(self, _: Any, frame: FrameType) -> Begun:
        self.search_models()
        if frame.f_code is _GRAD:
            self._read = None
            return self._until_left() if self.finder.differentiate() else None
        if (begun := self.begins(BACKWARD)) is None:
            return None
        tensors = frame.f_locals.get("tensors", ())
        if self.on_loss is not None:
            self.on_loss(tensors)
        if self.finder.sends_again:
            self.finder.noted[self.lines.number(SENDS, frame)] += 1
        self.on_backward()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            handle = self._mark_end_of_computation(tensors)
            if handle is not None:
                return self._until_left(handle.remove)
        return begun

    def _mark_end_of_computation(self, tensors: Any) -> Any:
        """Autograd runs final callbacks in the order in which they were queued, and this one is the first."""
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def first(_: Any) -> None:
            queue(functools.partial(self.border.guard, self.finder.backward_computed))

        roots = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        with torch._C.DisableTorchFunction():
            nodes = [getattr(each, "grad_fn", None) for each in roots]
        return next((node.register_prehook(first) for node in nodes if node is not None), None)

    def _iterating(self, loader: Any, frame: FrameType) -> Begun:
        self._began_at = place_of_call(frame)
        return self.begins(DATA)

    def _iterates(self, loader: Any, iterator: Any) -> None:
        if self.finder.is_mine():
            self.loaders.begins(loader, iterator, self._began_at)

    def _took(self, iterator: Any, batch: Any) -> None:
        self.finder.took(self.loaders.took(iterator))
        if not torch.is_grad_enabled() and not self.roots.called():
            self.finder.evaluated()  # by a model whose calls are not seen

    def _reads(self, name: str) -> Begins:
        finder, call = self.finder, "print" if name == "__repr__" else name.strip("_")

        def begins(tensor: Any, frame: FrameType) -> Begun:
            if self.is_reading or not finder.is_mine() or not finder.is_under_way:
                return None
            if self.on_gpu:
                with torch._C.DisableTorchFunction():
                    if not tensor.is_cuda:
                        return None
            elif finder.current == DATA or call == "index":  # datasets, and places in them, would lie on the host
                return None
            elif (owner := owner_of(file := frame.f_code.co_filename)) == "torch" and not file.endswith("_tensor.py"):
                return None  # no read on a GPU, such as Adam's
            elif owner == "user":
                return self._wait(call, frame, self._sites)
            return self._wait(call, frame)

        return begins

    def _waits(self, call: str) -> Begins:
        finder = self.finder

        def begins(_: Any, frame: FrameType) -> Begun:
            is_told = not self.is_reading and finder.is_mine() and finder.is_under_way
            return self._wait(call, frame) if is_told else None

        return begins

    def _wait(self, call: str, frame: FrameType, sites: dict[tuple[int, int], Site] | None = None) -> Begun:
        """A read begins; one whose line is among sites is counted alone once enough of them were timed."""
        number, read, start = self.lines.number(call, frame), object(), time.perf_counter()
        self._read, code, place = read, frame.f_code, (id(frame.f_code), frame.f_lasti)

        def ended(at_s: float) -> None:
            if self._read is read:
                self._read, ms = None, (at_s - start) * 1e3
                self.finder.waited(number, ms)
                if sites is not None:
                    site = sites.setdefault(place, Site(number, code))
                    site.timed, site.ms = site.timed + 1, site.ms + ms
                    if site.timed == TIMED:
                        self.border.counted[place] = site

        return ended, ()


def parameters_of(optimizers: list[Optimizer]) -> Iterator[torch.Tensor]:
    """All parameters that optimizers update."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
