"""The models of a script, found among the objects that there are, and their outermost calls.

A root is a module with parameters that is no part of another one: the model itself, or the wrapper around it
(DistributedDataParallel, torch.compile's, a LightningModule). Its calls are seen by wrapping the `__call__` of its
class, which for all other modules of the class costs one look-up. Hooks on every module would cost each of its hundreds
of calls, would be traced into compiled code, and would be saved with a model that is pickled.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainstep.observe.steps import EVALUATION, FORWARD, StepFinder
from trainstep.observe.untraced import when_eager

LAST = 32
"""Last step of the search: of the steps without a model's call, the first, second, fourth, and so on to this one are
searched after, each among the parts of what was found before and was never called."""
SEARCHED = "searched"
"""Tag of steps that paid for that."""


class Roots:
    """The roots, whose outermost calls the finder is told of."""

    def __init__(self, finder: StepFinder) -> None:
        self._finder = finder
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._called: set[int] = set()
        self._wrapped: dict[type, Any] = {}  # class → its own `__call__` before, None where it had none
        self._missed = 0

    def search(self) -> None:
        """Look for roots among all objects that Python's garbage collector knows."""
        found = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
        modules = [each for each in found if not _is_compiled_graph(each)]
        parts = {id(part) for each in modules for part in each.__dict__.get("_modules", {}).values()}
        for each in modules:
            if id(each) not in parts and _has_parameters(each):
                self._add(each)

    @property
    def is_searching(self) -> bool:
        """True if steps without a model's call would have more searched."""
        return self._missed < LAST

    def search_deeper(self) -> bool:
        """After a step without a model's call: take the parts of roots that were never called for roots too.

        Returns:
            Whether it searched, which takes a while: all objects are looked at.
        """
        self._missed += 1
        if self._missed.bit_count() > 1 or self._missed > LAST:
            return False
        for root in [each for each in self._alive() if id(each) not in self._called]:
            for part in root.children():
                if _has_parameters(part):
                    self._add(part)
        self.search()  # those that were made since
        return True

    def called(self) -> list[nn.Module]:
        """The roots that were called, in the order in which they were found."""
        return [each for each in self._alive() if id(each) in self._called]

    def remove(self) -> None:
        """Give the classes their own `__call__` back."""
        for kind, original in self._wrapped.items():
            if original is None:
                del kind.__call__
            else:
                kind.__call__ = original  # type: ignore[method-assign]
        self._wrapped.clear()
        self._roots.clear()

    def _alive(self) -> Iterator[nn.Module]:
        for reference in list(self._roots.values()):
            if (module := reference()) is not None:
                yield module

    def _add(self, module: nn.Module) -> None:
        number = id(module)
        if number not in self._roots:
            self._roots[number] = weakref.ref(module, lambda _: self._forget(number))
            if not any(kind in self._wrapped for kind in type(module).__mro__):
                self._wrap(type(module))

    def _forget(self, number: int) -> None:
        self._roots.pop(number, None)
        self._called.discard(number)

    def _wrap(self, kind: type) -> None:
        original: Callable[..., Any] = kind.__call__
        finder, roots, called = self._finder, self._roots, self._called

        def outermost(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in roots:
                return original(self, *args, **kwargs)
            if not finder.enter(FORWARD if torch.is_grad_enabled() or self.training else EVALUATION):
                return original(self, *args, **kwargs)
            called.add(id(self))
            try:
                return original(self, *args, **kwargs)
            finally:
                finder.leave()

        self._wrapped[kind] = vars(kind).get("__call__")
        kind.__call__ = when_eager(original, outermost)  # type: ignore[method-assign]


def is_compiled(module: Any) -> bool:
    """True if a call of it, if it is a module, is compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _is_compiled_graph(module: nn.Module) -> bool:
    """True if dynamo made it, of code that may be anything, such as an optimizer's update; or the wrapper around it."""
    graph = module.__dict__.get("_modules", {}).get("_orig_mod", module)
    return "compile_subgraph_reason" in graph.__dict__


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
