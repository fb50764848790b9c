"""The models of a script, found among the objects that there are, and their outermost calls.

A root is a module with parameters that is no part of another one: the model itself, or the wrapper around it
(DistributedDataParallel, torch.compile's, a LightningModule). Its calls are seen by an `Entry` in its class, which for
all other modules of the class costs one look-up. A class of torch's from which models are built gets none, since it is
a part of other models too. Only a deep session observes these as well.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainstep.observe.habits import GRAPHS
from trainstep.observe.steps import EVALUATION, FORWARD, KEPT

if TYPE_CHECKING:
    from trainstep.observe.border import Begun
    from trainstep.observe.hooks import Hooks

LAST = 32
"""Last step of the search: of the steps without a model's call, the first, second, fourth, and so on to this one are
searched after, each among the parts of what was found before and was never called."""
SEARCHED = "searched"
"""Tag of steps that paid for that."""
WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule", "FullyShardedDataParallel", "FSDPModule")
"""Classes of torch's that stand around a model and are no part of one."""


class Roots:
    """The roots, whose outermost calls the hooks are told of."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._called: set[int] = set()
        self._trained: set[int] = set()  # called in training mode
        self._observed: set[type] = set()
        self._missed = 0

    def search(self) -> None:
        """Look for roots among all objects that Python's garbage collector knows."""
        modules = [each for each in gc.get_objects() if is_module(each) and not _is_compiled_graph(each)]
        parts = {id(part) for each in modules for part in _own(each)["_modules"].values()}
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
        known = list(self._alive())
        uncalled = [each for each in known if id(each) not in self._called and self._observes(type(each))]
        if known and not uncalled:
            return False  # of the others no call is seen
        for root in uncalled:
            for part in _own(root)["_modules"].values():
                if is_module(part) and _has_parameters(part):
                    self._add(part)
        self.search()  # those that were made since
        return True

    def called(self) -> list[nn.Module]:
        """The roots that were called, in the order in which they were found."""
        return [each for each in self._alive() if id(each) in self._called]

    def _alive(self) -> Iterator[nn.Module]:
        for number in list(self._roots):
            if (module := self._roots[number]()) is not None:
                yield module
            else:
                del self._roots[number]
                self._called.discard(number)
                self._trained.discard(number)

    def _add(self, module: nn.Module) -> None:
        self._roots[id(module)] = weakref.ref(module)
        kind = type(module)
        if kind not in self._observed and self._observes(kind):
            self._observed.add(kind)
            self._hooks.border.method(kind, "__call__", self._begins)

    def _observes(self, kind: type) -> bool:
        is_torchs = str(kind.__module__).partition(".")[0] == "torch"
        return self._hooks.is_deep or not is_torchs or any(each.__name__ in WRAPPERS for each in kind.__mro__)

    def _begins(self, module: Any, frame: FrameType) -> Begun:
        root = self._roots.get(id(module))
        if root is None or root() is not module:
            return None
        if _own(module).get("training"):
            self._trained.add(id(module))
            begun = self._hooks.begins(FORWARD)
        elif not torch.is_grad_enabled():
            begun = self._hooks.begins(EVALUATION)
        elif id(module) in self._trained:
            begun = self._hooks.begins(KEPT, self._hooks.lines.number(GRAPHS, frame))
        else:  # one that never was in training mode may be trained all the same, or compute another one's loss
            begun = self._hooks.begins(FORWARD)
        if begun is not None:
            self._called.add(id(module))
            if _own(module).get("require_backward_grad_sync") and torch.is_grad_enabled():
                self._hooks.finder.sends()
        return begun


def is_module(thing: object) -> bool:
    """True if an object is a module whose parts can be looked at without a call of its own code: one whose `__init__`
    never ran has none, and those of a scripted or traced module are C++."""
    kind = type(thing)
    if not issubclass(kind, nn.Module) or issubclass(kind, torch.jit.ScriptModule):
        return False
    own = _own(thing)
    return isinstance(own.get("_modules"), dict) and isinstance(own.get("_parameters"), dict)


def _own(thing: object) -> dict[str, Any]:
    """Attributes of an object alone, without a call of its class's code."""
    found: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    return found


def is_compiled(module: Any) -> bool:
    """True if a call of it, if it is a module, is compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _is_compiled_graph(module: Any) -> bool:
    """True if dynamo made it, of code that may be anything, such as an optimizer's update; or the wrapper around it."""
    graph = _own(module)["_modules"].get("_orig_mod", module)
    return "compile_subgraph_reason" in getattr(graph, "__dict__", ())


def _has_parameters(module: Any) -> bool:
    """True if it has any, or a part of it has."""
    seen, ahead = {id(module)}, [module]
    while ahead:
        own = _own(ahead.pop())
        if any(each is not None for each in own["_parameters"].values()):
            return True
        for part in own["_modules"].values():
            if id(part) not in seen and is_module(part):
                seen.add(id(part))
                ahead.append(part)
    return False
