"""Logits that are not computed: the tensor that a head gives in place of its product, until somebody looks.

Behind each stands a node of autograd, so that code which never asks torch's functions (an autograd.Function, hooks of
modules, DistributedDataParallel's search of the graph) gets the right values and gradients too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_iter, tree_map_only

from trainstep.base.errors import UnsupportedError
from trainstep.ladder.places.uncomputed import KNOWN, Call, Uncomputed, after, as_written, known, state_of
from trainstep.observe.lines import line_of_call

COMPUTED_TOO = "its logits are computed all the same"


class Finder(Protocol):
    """Finder of the logits' products."""

    linear: Callable[..., Tensor]  # torch's own
    note: Callable[[str, str], object]
    updates: int  # steps of optimizers until now

    def further(self, own: Logits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Result of another call, or None where that computes them."""


class Head:
    """A weight whose products may be logits, of hidden states with as many dimensions at least."""

    def __init__(self, weight: Tensor, least_dims: int) -> None:
        self.weight, self.least_dims = weakref.ref(weight), least_dims
        self.is_left = False  # its products were looked at before they reached a loss


class Product:
    """A call of a head, which is computed when its values are asked for."""

    def __init__(self, finder: Finder, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.finder, self.head = finder, head
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.state = state_of(hidden.device)
        self.value: Tensor | None = None
        self.is_joined = False
        self._versions, self._version = self._versions_now(), 0
        self._updates = finder.updates

    def inputs(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)

    def check(self) -> None:
        """Raise `UnsupportedError` where something was changed since, so that it is too late to compute it.

        Fused optimizers, and those that write to `weight.data`, leave a weight's version as it is: so updates are
        counted beside versions, those of other weights too, as an optimizer may hold copies of these.
        """
        is_changed = self._versions_now() != self._versions or self.finder.updates != self._updates
        if is_changed or not self.weight.untyped_storage().nbytes():
            raise UnsupportedError(
                "the script looks at logits that were not computed, or at gradients of them, after it has changed what "
                "they come of (by an update, or in place): let it use them before, or as `logits.detach()` from the "
                "beginning"
            )

    def after(self, calls: tuple[Call, ...]) -> Tensor:
        """Values after further calls, by the script's own."""
        with self.state.entered():
            if self.value is None:
                self.check()
                self.value = self.finder.linear(*self.inputs())
                self._version = self.value._version
                if self.is_joined:
                    self.finder.note(line_of_call(), COMPUTED_TOO)
                else:
                    self.head.is_left = True
            if calls:
                self._check_value()
            return cast(Tensor, after(self.value, calls))

    def gradients(self, calls: tuple[Call, ...], gradient: Tensor) -> list[Tensor | None]:
        """Gradients of its inputs, from that of what further calls make of it; computed anew, as the script may use it
        too."""
        self.check()
        self._check_value()
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in self.inputs()]
        with self.state.entered():
            value = after(self.finder.linear(*inputs), calls)
        found = iter(torch.autograd.grad(value, [each for each in inputs if each.requires_grad], gradient))
        return [next(found) if each.requires_grad else None for each in inputs]

    def _check_value(self) -> None:
        if self.value is not None and self.value._version != self._version:
            raise UnsupportedError("the script changes logits in place between two uses of what was made of them")

    def _versions_now(self) -> list[int]:
        return [each._version for each in self.inputs()]


class _Node(torch.autograd.Function):
    """Behind logits that are not computed: the gradients of their inputs, for whoever goes past torch's functions."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], product: Product, calls: tuple[Call, ...], *_: Tensor) -> Tensor:
        ctx.product, ctx.calls = product, calls
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError("logits that are not computed have no gradients of their gradients (create_graph)")
        return None, None, None, *ctx.product.gradients(ctx.calls, grads[0])


class Logits(Uncomputed):
    """Logits that are computed when something else than a loss is done with them."""

    product: Product
    calls: tuple[Call, ...]  # what the script did with the product
    states: Tensor  # the hidden states with the same done to them: (…, D)
    is_second: bool  # whether classes are the second of three dimensions: (B, V, T), and states are (B, T, D)
    computed: Tensor | None

    @staticmethod
    def made(
        product: Product, calls: tuple[Call, ...], states: Tensor, dtype: torch.dtype, *, is_second: bool = False
    ) -> Logits:
        """(…, V), or (B, V, T)."""
        shape = [*states.shape[:-1], len(product.weight)]
        if is_second:
            shape[1], shape[2] = shape[2], shape[1]

        def make() -> Tensor:
            return Tensor._make_wrapper_subclass(Logits, torch.Size(shape), dtype=dtype, device=states.device)

        own = cast(Logits, _Node.apply(make, product, calls, *product.inputs()))  # type: ignore[no-untyped-call]
        own.product, own.calls, own.states, own.is_second, own.computed = product, calls, states, is_second, None
        return own

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # code that is compiled may be given logits
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            return known(func, args, kwargs)
        own = args[0] if args and isinstance(args[0], Logits) else None
        if own is not None and own.product.value is None and torch.is_grad_enabled():
            further = own.product.finder.further(own, func, args, kwargs)
            if further is not None:
                return further
        if func in _OF_GRADIENTS:
            _refuse_joined(args, kwargs)
        return func(*as_written(args), **as_written(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Below autograd, where `_Node` has the gradients."""
        if func._schema.is_mutable:
            raise UnsupportedError(f"{func} is to change logits in place that are not computed, past torch's functions")
        with enable_reentrant_dispatch():  # or the values would be without their graph for whoever uses them next
            args, kwargs = tree_map_only(Logits, lambda each: each.as_written().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def as_written(self) -> Tensor:
        """Their values, by the script's own calls."""
        if self.computed is None:
            self.computed = self.product.after(self.calls)
        return self.computed


_KNOWN = KNOWN | {Tensor.requires_grad.__get__}  # type: ignore[attr-defined]
_OF_GRADIENTS = {Tensor.retain_grad, Tensor.register_hook, torch.autograd.grad}


def _refuse_joined(args: Any, kwargs: Any) -> None:
    """Gradients of logits go nowhere once their loss is joined."""
    if any(isinstance(each, Logits) and each.product.is_joined for each in tree_iter((args, kwargs))):
        raise UnsupportedError(
            "the script asks for gradients of logits after their loss was computed, which keeps none of them: let it "
            "ask (retain_grad, register_hook) before the loss"
        )
