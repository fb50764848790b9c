"""Boundaries at which a module's calls tell the schedule that they begin and end, in forward and in backward.

A unit's calls go through a `Boundary` (see `parallel.units`). In backward, a hook on the call's outputs, and on what it
left in attributes, runs before backward enters the call; an identity node on its inputs runs after backward has left
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from trainstep.base.errors import UsageError
from trainstep.parallel.fsdp.calls import Call
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.fsdp.leavings import Leavings, all_tensors, hidden_tensors
from trainstep.parallel.fsdp.schedule import Schedule
from trainstep.parallel.fsdp.written import Written


class Boundary:
    """Around the calls of one unit, of this name, which need `groups`."""

    def __init__(self, schedule: Schedule, groups: Sequence[GatherGroup], unit: nn.Module, name: str) -> None:
        self._schedule, self._groups, self._name = schedule, groups, name
        self._leavings = Leavings(unit)
        self.is_open = False  # whether a call is running inside, so that its `forward` needs no boundary of its own

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)` with the groups gathered, in forward and when backward comes through it."""
        call, first_node, args, kwargs, written = self._enter(args, kwargs)
        was_open, self.is_open = self.is_open, True
        try:
            output = function(*args, **kwargs)
        except BaseException as error:
            self._schedule.abandon(call)
            if "_AfterBackward is a view and is being modified inplace" in str(error):
                what = f"{self._name} changes its input in place, which a sharded module cannot"
                raise UsageError(f"{what}; let it work on a clone") from error
            raise
        finally:
            self.is_open = was_open
            if written is not None:
                written.back()
        self._leave(call, first_node, output, (args, kwargs))
        return output

    def run_again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, computed again in backward; the marks for backward are in the graph from the first time."""
        for group in self._groups:
            self._schedule.gather([group])
        was_open, self.is_open = self.is_open, True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_open = was_open

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, int, Any, Any, Written | None]:
        call, first_node = self._schedule.enter(self._groups), torch._C._autograd._get_sequence_nr()
        if not torch.is_grad_enabled():
            return call, first_node, args, kwargs, None
        leaves, structure = [*args, *kwargs.values()], None
        if not all(map(_pytree.tree_is_leaf, leaves)):  # most calls are given no containers, which take long to flatten
            leaves, structure = _pytree.tree_flatten((args, kwargs))
        watched = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not watched:
            return call, first_node, args, kwargs, None
        if not any(tensor.requires_grad for leaf in leaves for tensor in hidden_tensors(leaf)):
            call.is_watched = True
            for group in self._groups:
                group.awaiting.add(call)
        inputs = [leaves[index] for index in watched]
        passed = _AfterBackward.apply(self._schedule, call, *inputs)  # type: ignore[no-untyped-call]
        for index, tensor in zip(watched, passed, strict=True):
            leaves[index] = tensor
        if structure is None:
            args, kwargs = tuple(leaves[: len(args)]), dict(zip(kwargs, leaves[len(args) :], strict=True))
            return call, first_node, args, kwargs, None
        made_args, made_kwargs = _pytree.tree_unflatten(leaves, structure)
        written = Written((*args, *kwargs.values()), (*made_args, *made_kwargs.values()))
        return call, first_node, made_args, made_kwargs, written

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, call: Call, first_node: int, output: Any, inputs: Any) -> None:
        returned = [output] if isinstance(output, Tensor) else list(all_tensors(output))
        enters = [tensor for tensor in returned if tensor.grad_fn is not None]  # where backward may enter the call
        left = list(self._leavings.tensors(inputs))
        for group in call.groups:
            if any(group.is_part_of(tensor) for tensor in (*returned, *left)):
                self._schedule.hold(group)  # a parameter, or a view of one, goes outside
        if not torch.is_grad_enabled():
            enters = []
        elif left:
            enters += [each for each in left if each.grad_fn is not None and each.grad_fn._sequence_nr() >= first_node]
        for tensor in enters:
            tensor.register_hook(lambda _: self._schedule.before_backward(call))
            base = tensor._base  # a change in place gives a view another node, and loses its hooks
            if base is not None and base.grad_fn is not None and base.grad_fn._sequence_nr() >= first_node:
                base.register_hook(lambda _: self._schedule.before_backward(call))
        self._schedule.leave(call, needs_backward=bool(enters))


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
