"""Boundaries at which a module's calls tell the schedule that they begin and end, in forward and in backward.

A unit's calls go through a `CallBoundary` (see `parallel.units`). In backward, a hook on the call's outputs, and on
what it left in attributes, runs before backward enters the call; an identity node on its inputs runs after backward has
left it. Tensors go in and out in containers of any kind. Modules also leave them in attributes, such as the auxiliary
loss of a mixture of experts, and backward may enter the call through those. So attributes that modules of one's own set
are searched after each call, a few per module, and lists among them at their end.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from trainstep.base.errors import UsageError
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.fsdp.schedule import Call, Schedule
from trainstep.parallel.units import BOUNDARY, Boundary


class Written:
    """Between what a caller gave and what the call is given in its place.

    Args:
        given, made: the same arguments, tensors aside, in containers of the same form.
    """

    def __init__(self, given: Sequence[Any], made: Sequence[Any]) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._begun: list[tuple[list[Any], list[Any]]] = []  # of each container, keys and values as the call was given
        for one, other in zip(given, made, strict=True):
            if not isinstance(one, Tensor):
                self._note(one, other)

    def _note(self, given: Any, made: Any) -> None:
        """Note the pairs of lists, deques and dicts, also those in others, and of tensors."""
        if isinstance(given, Tensor):
            self._tensors.append((given, made))
        elif given is not made and isinstance(given, (list, deque, dict, tuple)):
            if not isinstance(given, tuple):
                self._containers.append((given, made))
                self._begun.append((list(made), list(_values(made))))
            for one, other in zip(_values(given), _values(made), strict=True):
                self._note(one, other)

    def back(self) -> None:
        """Write into the caller's containers what the call has written into its own; what it only added is added."""
        given = {id(made): given for given, made in (*self._containers, *self._tensors)}
        for (before, after), (keys, values) in zip(self._containers, self._begun, strict=True):
            now, entries = list(after), list(_values(after))
            kept = _are_same(now[: len(keys)], keys) and _are_same(entries[: len(values)], values)
            if kept and len(now) == len(keys):
                continue
            start = len(keys) if kept else 0
            written = [given.get(id(value), value) for value in entries[start:]]
            if not kept:
                before.clear()
            if isinstance(before, dict):
                before.update(zip(now[start:], written, strict=True))
            else:
                before.extend(written)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, FunctionType, torch.dtype, torch.device])
_NOT_LOOKED_INTO = (Tensor, nn.Module, type, *_PLAIN)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"} | {BOUNDARY}
_DEPTH = 3  # of containers in containers
_LAST = 32  # entries of a container that are looked at


def all_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: in lists, tuples, mappings, dataclasses and plain objects."""
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from hidden_tensors(leaf)


def hidden_tensors(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in what `torch.utils._pytree` takes for a leaf: dataclasses, plain objects, sets, other mappings."""
    if isinstance(value, _NOT_LOOKED_INTO) or depth == 0:
        return
    for each in _entries(value):
        if isinstance(each, Tensor):
            yield each
        else:
            yield from hidden_tensors(each, depth - 1)


class Leavings:
    """Tensors that the modules of a unit hold in attributes after a call."""

    def __init__(self, unit: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in unit.modules()]  # one of them leads here
        self._own: list[tuple[int, list[str]]] = [(0, [])] * len(self._modules)  # how many there were; names

    def tensors(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[Tensor]:
        """Tensors in attributes, in containers there, and in what a call was given (args, kwargs) to write into."""
        for number, reference in enumerate(self._modules):
            if (module := reference()) is None:
                continue
            attributes = vars(module)
            count, names = self._own[number]
            if count != len(attributes):
                names = [name for name in attributes if name not in _OF_EVERY_MODULE]
                self._own[number] = len(attributes), names
            for name in names:
                value = attributes.get(name)
                kind = type(value)
                if kind in _PLAIN or (kind is dict and not value):  # most are, and the checks below take far longer
                    continue
                if isinstance(value, Tensor):
                    yield value
                elif isinstance(value, _CONTAINERS) or dataclasses.is_dataclass(value):
                    yield from hidden_tensors(value)
        args, kwargs = inputs
        for value in (*args, *kwargs.values()):
            yield from hidden_tensors(value)


_CONTAINERS = (list, tuple, dict, deque)


def _entries(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())[-_LAST:]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)[-_LAST:]
    if hasattr(value, "__dict__"):
        return list(vars(value).values())[:_LAST]
    slots = chain.from_iterable(getattr(cls, "__slots__", ()) for cls in type(value).__mro__)
    return [getattr(value, name, None) for name in slots][:_LAST]


class CallBoundary(Boundary):
    """Around the calls of one unit, of this name, which need `groups`."""

    def __init__(self, schedule: Schedule, groups: Sequence[GatherGroup], unit: nn.Module, name: str) -> None:
        self._schedule, self._groups, self._name = schedule, groups, name
        self._leavings = Leavings(unit)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)` with the groups gathered, in forward and when backward comes through it."""
        call, first_node, args, kwargs, written = self._enter(args, kwargs)
        try:
            output = super().run(function, args, kwargs)
        except BaseException as error:
            self._schedule.abandon(call)
            if "_AfterBackward is a view and is being modified inplace" in str(error):
                what = f"{self._name} changes its input in place, which a sharded module cannot"
                raise UsageError(f"{what}; let it work on a clone") from error
            raise
        finally:
            if written is not None:
                written.back()
        self._leave(call, first_node, output, (args, kwargs))
        return output

    def run_again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, computed again in backward; the marks for backward are in the graph from the first time."""
        for group in self._groups:
            self._schedule.gather([group])
        return super().run(function, args, kwargs)

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
        inputs = [leaves[index] for index in watched]
        passed = _AfterBackward.apply(self._schedule, call, *inputs)  # type: ignore[no-untyped-call]
        if not any(tensor.requires_grad for leaf in leaves for tensor in hidden_tensors(leaf)):
            call.node = weakref.ref(passed[0].grad_fn)
            for group in self._groups:
                group.awaiting.add(call)
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
