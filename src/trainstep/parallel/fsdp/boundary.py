"""Where the call of a unit meets the schedule.

A unit's class is replaced by a subclass whose `__call__` goes through the boundary. So the boundary lies outside of
what `module.compile()` compiles and of the module's hooks, and it is there whenever the module is called.
Code that runs a unit's `forward` without calling it (activation checkpointing of several blocks together, or computing
one again) meets the same boundary there.

In backward two places matter. A hook on the call's outputs runs before backward enters the call; an identity node on
its inputs runs after backward has left it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.fsdp.schedule import Call, Schedule, in_backward


class Boundary:
    """Around the calls of one unit, which need `groups`."""

    def __init__(self, schedule: Schedule, groups: Sequence[GatherGroup]) -> None:
        self._schedule = schedule
        self._groups = groups
        self.is_open = False
        """Whether a call is running inside, so that its `forward` needs no boundary of its own."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)` with the groups gathered, in forward and when backward comes through it."""
        call, args, kwargs = self._enter(args, kwargs)
        was_open, self.is_open = self.is_open, True
        try:
            output = function(*args, **kwargs)
        except BaseException:
            self._schedule.abandon(call)
            raise
        finally:
            self.is_open = was_open
        self._leave(call, output)
        return output

    def run_again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, computed again in backward; the marks for backward are in the graph from the first time."""
        self._schedule.gather_again(self._groups)
        was_open, self.is_open = self.is_open, True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_open = was_open

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
        call = self._schedule.enter(self._groups)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(call, args, kwargs)
        return call, args, kwargs

    def _watch_inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        watched = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not watched:
            return args, kwargs
        for group in self._groups:
            group.awaiting.add(call)
        inputs = [leaves[index] for index in watched]
        passed = _AfterBackward.apply(self._schedule, call, *inputs)  # type: ignore[no-untyped-call]
        for index, tensor in zip(watched, passed, strict=True):
            leaves[index] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, structure)
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, call: Call, output: Any) -> None:
        needs_backward = False
        if torch.is_grad_enabled():
            for leaf in _pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(functools.partial(_before_backward, self._schedule, call))
                    needs_backward = True
        self._schedule.leave(call, needs_backward=needs_backward)


def _before_backward(schedule: Schedule, call: Call, gradient: Tensor) -> None:
    schedule.before_backward(call)


class _AfterBackward(torch.autograd.Function):
    """The identity on a call's inputs; its backward runs when backward has left the call."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.schedule, ctx.call = schedule, call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.schedule.after_backward(ctx.call)
        return None, None, *gradients


class _Unit(nn.Module):
    """What a unit's class is mixed with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.__dict__.get("forward"), "hands_on", False):  # see trainstep.checkpointing
            return super().__call__(*args, **kwargs)
        return self.__dict__["boundary"].run(super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self.__dict__["boundary"]
        if boundary.is_open:
            return super().forward(*args, **kwargs)
        run = boundary.run_again if in_backward() else boundary.run
        return run(super().forward, args, kwargs)


@functools.cache
def _unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_Unit, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def is_unit(module: nn.Module) -> bool:
    """Whether the module's calls go through a boundary."""
    return isinstance(module, _Unit)


def install(unit: nn.Module, boundary: Boundary) -> None:
    """Lead all calls of `unit` through `boundary`."""
    unit.__dict__["boundary"] = boundary
    unit.__class__ = _unit_class(type(unit))  # type: ignore[arg-type]
