"""Modules whose calls go through something: what gathers their parameters, or waits until they have arrived.

A unit's class is replaced by a subclass whose `__call__` goes through a boundary: outside of what `module.compile()`
compiles and of the module's hooks, and there whenever the module is called. Code that runs a unit's `forward` without
calling it (activation checkpointing of several blocks together, or computing one again) meets the same boundary there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Boundary:
    """Functions that the calls of one unit go through.

    Attributes:
        is_open: True if a call is running inside, so that its `forward` needs no boundary of its own.
    """

    is_open = False

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`."""
        was_open, self.is_open = self.is_open, True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_open = was_open

    def run_again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, computed again in backward."""
        return self.run(function, args, kwargs)


BOUNDARY = "_trainstep_boundary"
"""Attribute of a unit that has its boundary."""


class Unit(nn.Module):
    """Mixin of a unit's class: its calls go through a boundary."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[BOUNDARY].run(super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self.__dict__[BOUNDARY]
        if boundary.is_open:
            return super().forward(*args, **kwargs)
        run = boundary.run_again if in_backward() else boundary.run
        return run(super().forward, args, kwargs)


@functools.cache
def _unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward, updated=())  # with its signature, which callers may choose arguments by
    def forward(self: Unit, *args: Any, **kwargs: Any) -> Any:
        return Unit.forward(self, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
    return type(cls.__name__, (Unit, cls), names)


def install(unit: nn.Module, boundary: Boundary) -> None:
    """From now on its calls go through `boundary`."""
    unit.__dict__[BOUNDARY] = boundary
    unit.__class__ = _unit_class(type(unit))  # type: ignore[arg-type]


def in_backward() -> bool:
    """True if autograd is running on this thread."""
    return torch._C._current_graph_task_id() != -1
