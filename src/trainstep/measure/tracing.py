"""A traced step: the operators that it calls, with shapes and dtypes, and whose the live bytes are at each moment.

A `StepTracer` follows storages as `LiveStorages` does and notes the operators as they pass. It works on fake tensors
(`torch._subclasses.FakeTensorMode`: shapes and dtypes without data) as on real ones, so a step needs neither the time
nor the memory that it is asked about. Eager code only.

Bytes of a call are the least that must move: every tensor argument read once, every new result and every argument that
is changed written once. Views move nothing and are left out. FLOPs are those of `measure.flops.operator_cost`, of
matrix products, convolutions and fused attention; what is done to single elements counts bytes alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainstep.measure.costs import Tensors, operator_cost
from trainstep.measure.memory import LiveStorages, StorageLife, storages_of
from trainstep.plan.traced import Moment, TracedOperator

WEIGHTS, GRADIENTS, STATE, OTHER = "weights", "gradients", "optimizer state", "activations"

_DTYPE_NAMES = {
    torch.float64: "double", torch.float32: "float", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half",
    torch.int64: "long int", torch.int32: "int", torch.int16: "short", torch.int8: "signed char",
    torch.uint8: "unsigned char", torch.bool: "bool",
}  # fmt: skip
"""dtype → what the profiler, and so `operator_cost`, calls it."""


class StepTracer(LiveStorages):
    """Notes operators and live bytes while entered; hand `phase` to the step.

    Args:
        owned: the tensors alive before, by owner: `WEIGHTS`, `STATE` and `OTHER`.
        trained: the parameters whose gradients are `GRADIENTS`.
    """

    def __init__(self, owned: Mapping[str, Iterable[Tensor]], trained: Iterable[Tensor]) -> None:
        self._owners: dict[int, str] = {}  # of a life, by its id
        self._noted: list[StorageLife] = []
        self._trained = list(trained)
        self._calls: Counter[TracedOperator] = Counter()
        self.spans: list[tuple[str, int, int]] = []  # phase, first and last state
        self._phase = ""
        super().__init__(on_new=lambda life, storage: self._noted.append(life))
        for owner, tensors in owned.items():
            for tensor in tensors:
                self._follow(tensor)
                for life in self.lives_of(tensor):
                    self._owners.setdefault(id(life), owner)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step, as `config.PhaseContext`."""
        start, self._phase = self.events, name
        yield
        if name == "backward":
            for parameter in self._trained:
                for life in self.lives_of(parameter.grad):
                    self._owners.setdefault(id(life), GRADIENTS)
        self.spans.append((name, start, self.events))
        self._phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._phase:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        changes = func._schema.is_mutable
        before = {storage for each in given for storage in storages_of(each)}
        new = [each for each in made if not before.issuperset(storages_of(each))]
        if not new and not changes:  # a view, or a question
            return
        self._calls[_call(self._phase, func, args, kwargs, given, new)] += 1

    def operators(self) -> tuple[TracedOperator, ...]:
        """Operators that were called, in the order of their first calls."""
        return tuple(replace(each, count=count) for each, count in self._calls.items())

    def owned_bytes(self, owner: str) -> int:
        """Bytes of what was there before, or, for gradients, at the end of backward."""
        return sum(life.bytes for life in self._noted if self._owners.get(id(life)) == owner)

    def moments(self) -> dict[str, list[Moment]]:
        """For each phase the moments of which no other of the phase has as much of everything, in their order."""
        changes: list[tuple[int, int, int]] = []
        for life in self._noted:
            owner = self._owners.get(id(life), OTHER)
            if owner in (WEIGHTS, STATE) or (life.is_found and life.end is not None):
                continue
            sizes = (life.bytes, 0) if owner == GRADIENTS else (0, life.bytes)
            changes.append((0 if life.is_found else life.start, *sizes))
            if life.end is not None:
                changes.append((life.end, -sizes[0], -sizes[1]))
        states: list[tuple[int, Moment]] = []
        gradients = other = 0
        for state, group in itertools.groupby(sorted(changes), key=lambda each: each[0]):
            for _, first, second in group:
                gradients, other = gradients + first, other + second
            states.append((state, Moment(gradients, other)))
        found = {}
        for name, start, end in self.spans:
            # What is alive when a phase starts is of the state before it, which may be of an earlier phase.
            inside = [each for state, each in states if start <= state <= end]
            earlier = [each for state, each in states if state <= start][-1:]
            found[name] = _largest([*earlier, *inside])
        return found


def _largest(moments: Iterable[Moment]) -> list[Moment]:
    kept: list[Moment] = []
    for each in sorted(set(moments), key=lambda one: (-one.other, -one.gradients)):
        if not kept or each.gradients > kept[-1].gradients:
            kept.append(each)
    return kept


def _call(phase: str, func: Any, args: Any, kwargs: Any, given: list[Tensor], new: list[Tensor]) -> TracedOperator:
    schema = func._schema
    filled = [*args, *(kwargs.get(each.name, each.default_value) for each in schema.arguments[len(args) :])]
    changed = [
        value
        for each, value in zip(schema.arguments, filled, strict=False)
        if each.alias_info and each.alias_info.is_write
    ]
    written = [*new, *(each for each in tree_leaves(changed) if isinstance(each, Tensor))]
    flops, product = _flops(schema.name, filled, given, new)
    moved = float(sum(map(_moved, given)) + sum(map(_moved, written)))
    return TracedOperator(phase, schema.name, 1, flops, moved, (written or given)[0].dtype.itemsize == 2, product)


def _moved(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, or, where it repeats them (`expand`), of what they lie in."""
    repeated = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0)
    return tensor.numel() // max(1, repeated) * tensor.element_size()


def _flops(
    name: str, filled: list[Any], given: list[Tensor], new: list[Tensor]
) -> tuple[float, tuple[int, int, int, int] | None]:
    shapes = [tuple(each.shape) for each in given]
    if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") and len(shapes) >= 2:
        (*batch, m, k), n = shapes[-2], shapes[-1][-1]
        product = (math.prod(batch), m, n, k)
        return 2.0 * math.prod(product), product
    if name == "aten::convolution" and new:
        is_transposed = bool(filled[6])
        return 2.0 * (given[0] if is_transposed else new[0]).numel() * math.prod(shapes[1][1:]), None
    if "attention" not in name and "convolution" not in name:
        return 0.0, None
    counts, scalars = [], []
    for value in filled:
        tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        counts += [len(tensors)] if tensors else []
        scalars.append("" if tensors or value is None else str(value))
    dtypes = tuple(_DTYPE_NAMES.get(each.dtype, "") for each in given)
    cost = operator_cost(name, Tensors(tuple(shapes), dtypes, tuple(counts), 0, tuple(scalars)))
    return (0.0 if cost is None or cost.flops is None else cost.flops), None
