"""Hooks on torch itself, which tell a `StepFinder` what a script does without a line of it changed.

- Optimizers: torch's global hooks before and after every `step`; `zero_grad`, clipping and gradient scalers are part of
  the update.
- Backward: `torch.autograd.backward`, which `Tensor.backward` calls. Where there are several ranks, a callback that the
  engine runs when all nodes are done, before those of data parallel wrappers, tells computing from waiting.
- Loaders: taking a batch from the iterator of a `DataLoader`.
- Models: see `modules`. Copies and waits: methods of tensors that move data between host and device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainstep.observe.compiling import leave_untraced, untraced
from trainstep.observe.lines import Lines, owner_of, place_of_call
from trainstep.observe.loaders import Loaders
from trainstep.observe.modules import Roots
from trainstep.observe.steps import BACKWARD, COMMUNICATION, COPIES, DATA, OPTIMIZER, StepFinder
from trainstep.observe.untraced import when_eager

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__repr__")
"""Methods of tensors that wait until the device has computed what the host reads."""
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_object"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier"),
)


class Hooks:
    """Hooks in torch while a script runs; `remove` takes all of them back.

    Args:
        finder: who is told.
        lines: numbers the lines of code that wait.
        is_deep: whether to see copies, collectives, clipping and gradient scalers too.
    """

    def __init__(self, finder: StepFinder, lines: Lines, *, is_deep: bool = False) -> None:
        self.finder, self.lines, self.is_deep = finder, lines, is_deep
        self.roots, self.loaders = Roots(finder), Loaders(lambda: self.on_loader())
        self.on_gpu = False  # whether the models are on a GPU, where the host need not wait for what it gave it to do
        self.on_loss: Callable[[Any], object] = lambda tensors: None  # called with what backward begins at
        self.on_loader: Callable[[], object] = lambda: None  # called when batches come from a loader for the first time
        self.before_optimizer: Callable[[Optimizer], object] = lambda optimizer: None
        self.before_update: Callable[[Optimizer], object] = lambda optimizer: None  # with its gradients
        self._names: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._counts: dict[str, int] = {}
        self._searched = False
        self.is_reading = False  # whether a read of a tensor is under way, which is timed, or one of our own
        self._functions: list[Callable[..., Any]] = []
        self._undo = ExitStack()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that have stepped, in the order of their first step."""
        return list(self._names)

    def install(self) -> None:
        """Change torch."""
        self._install_optimizers()
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(_BaseDataLoaderIter, "__next__", self._taking)
        self._wrap(_BaseDataLoaderIter, "_next_index", self._drawing)
        self._wrap(DataLoader, "__iter__", self._iterating)
        for name in READS:
            self._wrap(torch.Tensor, name, functools.partial(self._reading, name))
        if torch.version.cuda is not None:
            if self.is_deep:
                for name in ("to", "cuda", "copy_"):
                    self._wrap(torch.Tensor, name, functools.partial(self._moving, name))
            self._wrap(torch.cuda, "synchronize", functools.partial(self._waiting, "torch.cuda.synchronize"))
            for kind in (torch.cuda.Event, torch.cuda.Stream):
                name = f"{kind.__name__}.synchronize"
                self._wrap(kind, "synchronize", functools.partial(self._waiting, name))
        if dist.is_available() and self.is_deep:
            for name in COLLECTIVES:
                hooked = self._within(COMMUNICATION, getattr(dist.distributed_c10d, name))
                for module in (dist, dist.distributed_c10d):
                    self._set(module, name, hooked)
            self._wrap(dist.Work, "wait", functools.partial(self._within, COMMUNICATION))
        self._undo.callback(self.roots.remove)
        self._undo.callback(leave_untraced(self._functions))

    def remove(self) -> None:
        """Put everything back as it was."""
        self._undo.close()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Mark as our doing what is waited for or moved while entered: no line of the script's is told of it."""
        before, self.is_reading = self.is_reading, True
        try:
            yield
        finally:
            self.is_reading = before

    def search_models(self) -> None:
        """Look for the models, once; where they are on a GPU, say so."""
        if not self._searched:
            self._searched = True
            with contextlib.suppress(Exception):  # some module of somebody's has none of what modules have
                self.roots.search()

    def _install_optimizers(self) -> None:
        finder = self.finder

        def begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.before_optimizer(optimizer)
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                self.before_update(optimizer)
            if not finder.is_mine() and finder.is_under_way:
                return None
            self.search_models()
            self.name_of(optimizer)
            finder.optimizer_begins(id(optimizer))
            return self._with_closure(closure, args, kwargs) if callable(closure) else None

        def ended(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if finder.is_mine():
                finder.optimizer_ended(id(optimizer), self.name_of(optimizer))

        self._undo.callback(register_optimizer_step_pre_hook(untraced(begins)).remove)
        self._undo.callback(register_optimizer_step_post_hook(untraced(ended)).remove)
        if not self.is_deep:
            return
        self._wrap(Optimizer, "zero_grad", functools.partial(self._within, OPTIMIZER))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            original = getattr(torch.nn.utils.clip_grad, name)
            for module in (torch.nn.utils.clip_grad, torch.nn.utils):
                self._set(module, name, self._within(OPTIMIZER, original))
        self._wrap(torch.amp.GradScaler, "step", self._scaled_step)
        for name in ("unscale_", "update"):
            self._wrap(torch.amp.GradScaler, name, functools.partial(self._within, OPTIMIZER))

    def name_of(self, optimizer: Optimizer) -> str:
        """`AdamW`; `AdamW 2` for the second of that class."""
        if optimizer not in self._names:
            kind = type(optimizer).__name__
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[optimizer] = kind if number == 1 else f"{kind} {number}"
        return self._names[optimizer]

    def _with_closure(self, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of an optimizer's step, in which a closure's forward and backward passes are no update."""
        is_first = True

        def outside() -> Any:
            nonlocal is_first
            self.finder.claim_nothing()
            try:
                loss = closure()
            finally:
                self.finder.leave()
            if is_first:
                is_first = False
                self.before_update(args[0])
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": outside}
        return (args[0], outside, *args[2:]), kwargs

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            finder = self.finder
            if not finder.enter(OPTIMIZER):
                return original(scaler, optimizer, *args, **kwargs)
            before = finder.steps_taken
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                finder.leave()
            if finder.steps_taken == before and scaler.is_enabled():
                finder.optimizer_ended(id(optimizer), self.name_of(optimizer), is_skipped=True)
            return result

        return step

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        finder = self.finder

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self.search_models()
            if not finder.enter(BACKWARD):
                return original(tensors, *args, **kwargs)
            handle = None
            try:
                self.on_loss(tensors)
                if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                    handle = self._mark_end_of_computation(tensors)
                return original(tensors, *args, **kwargs)
            finally:
                if handle is not None:
                    handle.remove()
                finder.leave()

        return backward

    def _mark_end_of_computation(self, tensors: Any) -> Any:
        """Autograd runs final callbacks in the order in which they were queued, and this one is the first."""
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def first(_: Any) -> None:
            queue(self.finder.backward_computed)

        roots = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        nodes = (getattr(each, "grad_fn", None) for each in roots)
        return next((node.register_prehook(first) for node in nodes if node is not None), None)

    def _iterating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        within = self._within(DATA, original)

        @functools.wraps(original)
        def iterating(loader: Any) -> Any:
            iterator = within(loader)
            if self.finder.is_mine():
                self.loaders.begins(loader, iterator, place_of_call(sys._getframe(1)))
            return iterator

        return iterating

    def _taking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        within, took = self._within(DATA, original), self.loaders.took

        @functools.wraps(original)
        def taking(iterator: Any) -> Any:
            batch = within(iterator)
            self.finder.took(took(iterator))
            return batch

        return taking

    def _drawing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        drew = self.loaders.drew

        @functools.wraps(original)
        def drawing(iterator: Any) -> Any:
            index = original(iterator)
            drew(iterator, index)
            return index

        return drawing

    def _within(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        finder = self.finder

        def within(*args: Any, **kwargs: Any) -> Any:
            if not finder.enter(phase):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                finder.leave()

        return self._when_eager(original, within)

    def _reading(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        finder, call = self.finder, "print" if name == "__repr__" else name.strip("_")

        def reading(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_reading or not finder.is_mine() or not finder.is_under_way:
                return original(tensor, *args, **kwargs)
            if self.on_gpu:
                if not tensor.is_cuda:
                    return original(tensor, *args, **kwargs)
            elif finder.current == DATA or call == "index":  # datasets, and places in them, would lie on the host
                return original(tensor, *args, **kwargs)
            else:
                file = sys._getframe(1).f_code.co_filename
                if owner_of(file) == "torch" and not file.endswith("_tensor.py"):  # no read on a GPU, such as Adam's
                    return original(tensor, *args, **kwargs)
            return self._timed(call, original, tensor, *args, **kwargs)

        return functools.wraps(original)(reading)

    def _waiting(self, call: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if self.is_reading or not self.finder.is_mine() or not self.finder.is_under_way:
                return original(*args, **kwargs)
            return self._timed(call, original, *args, **kwargs)

        return self._when_eager(original, waiting)

    def _moving(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        finder = self.finder

        def moving(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on_gpu or self.is_reading or not finder.is_mine():
                return original(tensor, *args, **kwargs)
            source = args[0] if name == "copy_" and args else tensor
            if getattr(source, "is_cuda", False):
                if name == "copy_" and tensor.is_cuda:
                    return original(tensor, *args, **kwargs)
                start = time.perf_counter()
                moved = original(tensor, *args, **kwargs)
                if not moved.is_cuda and not kwargs.get("non_blocking"):
                    finder.waited(self.lines.number(name), (time.perf_counter() - start) * 1e3)
                return moved
            if not finder.enter(COPIES):
                return original(tensor, *args, **kwargs)
            try:
                return original(tensor, *args, **kwargs)
            finally:
                finder.leave()

        return functools.wraps(original)(moving)

    def _timed(self, call: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            with self.aside():
                return original(*args, **kwargs)
        finally:
            ms = (time.perf_counter() - start) * 1e3
            self.finder.waited(self.lines.number(call, 3), ms)

    def _when_eager(self, original: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
        self._functions.append(when_eager(original, hooked))
        return self._functions[-1]

    def _wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._set(owner, name, make(getattr(owner, name)))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, and back in the end: to what the owner itself had, or to nothing where it inherited it."""
        own = vars(owner).get(name, _NOTHING)

        def undo() -> None:
            if own is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.callback(undo)
        setattr(owner, name, value)


_NOTHING = object()


def parameters_of(optimizers: list[Optimizer]) -> Iterator[torch.Tensor]:
    """All parameters that optimizers update."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
