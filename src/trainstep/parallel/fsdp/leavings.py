"""The tensors that go in and out of a call of a module: in containers of any kind, and beside its output.

Modules leave tensors in attributes, such as the auxiliary loss of a mixture of experts. Backward may enter the call
through them, so they are looked for after each call. Only attributes that modules of one's own set are looked at,
a few per module, and lists among them at their end.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from trainstep.parallel.units import BOUNDARY

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
