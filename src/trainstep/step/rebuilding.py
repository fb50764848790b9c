"""A factory called again without drawing its weights anew: they are the same ones, so they are copied instead.

A ladder builds a workload some dozens of times. Most of what that takes is drawing random weights, which a CPU does at
a few nanoseconds each. From the third call on, what fills a weight with random numbers does nothing, the generator is
put where it would have been, and the weights of the second call are copied in.

That is exact, or it is not done. During the second call every operator is watched: a fill may be left out only if what
it filled is a parameter or buffer of the finished module, and nothing else was computed from it: not a tensor outside
of the module, not a number. Where a later call fills anything else, or in another order, it is begun once more as the
first. What reads memory behind torch's back, as a numpy view of a weight does, is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from trainstep.step.randomness import seed_everything
from trainstep.step.weights import copied_to_host, load, tensors_of

LEAST = 10**6
"""Numbers that are drawn for weights: fewer take less time than it takes to look."""

_aten = torch.ops.aten
_FILLS = {
    *(_aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.random_),
    *(_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_),
}


class Factory:
    """Calls a user's factory from a seed, as often as is wanted; every call has the same result, bit for bit.

    Args:
        factory: returns something whose `module` is an `nn.Module`.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._calls: dict[int, int] = {}
        self._known: dict[int, _Known | None] = {}

    def __call__(self, seed: int) -> Any:
        """Call the factory after seeding torch, numpy and `random`."""
        seed_everything(seed)
        if _get_current_dispatch_mode() is not None:
            return self._factory()  # others watch it already, or have it build tensors without data
        number = self._calls[seed] = self._calls.get(seed, 0) + 1
        if number == 1:
            return self._factory()
        if seed not in self._known:
            with _Watch() as watch:
                built = self._factory()
            self._known[seed] = watch.known(getattr(built, "module", None))
            return built
        if (known := self._known[seed]) is not None:
            try:
                return self._without_drawing(known)
            except _OtherwiseError:
                self._known[seed] = None
                seed_everything(seed)
        return self._factory()

    def _without_drawing(self, known: _Known) -> Any:
        with _Leave(known.fills) as leave:
            built = self._factory()
        module = getattr(built, "module", None)
        if leave.number != len(known.fills) or not isinstance(module, nn.Module):
            raise _OtherwiseError
        if _forms(tensors_of(module)) != _forms(known.state):
            raise _OtherwiseError
        load(module, known.state)
        return built


class _OtherwiseError(Exception):
    """The factory did something else than when it was watched."""


@dataclass(frozen=True)
class _Fill:
    """A tensor filled with random numbers."""

    form: tuple[Any, ...]
    after: Tensor
    """State of the generator after the draw."""
    is_left_out: bool


@dataclass(frozen=True)
class _Known:
    fills: list[_Fill]
    state: Mapping[str, Tensor]


class _Fills(TorchDispatchMode):
    """Sees everything that fills a CPU's tensor from its global generator; a GPU fills its own at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def fill(self, form: tuple[Any, ...], tensor: Tensor, run: Callable[[], Any]) -> Any:
        """Fill the tensor by running what fills it, or not, and return what that returns."""
        raise NotImplementedError

    def other(self, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Everything else."""
        return run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = partial(func, *args, **kwargs)
        if func.overloadpacket in _FILLS and _is_fillable(args[0], kwargs.get("generator")):
            return self.fill((func, *_form(args[0])), args[0], run)
        return self.other(run, args, kwargs)

    def __enter__(self) -> Any:
        self._draw = init._no_grad_trunc_normal_

        def trunc_normal(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            """Draw as a single call: it draws until all values are within bounds, so what it draws depends on what it
            drew."""

            def run() -> Tensor:
                with _disable_current_modes():
                    return self._draw(tensor, mean, std, a, b, generator)

            is_one = _is_fillable(tensor, generator)
            return self.fill(("trunc_normal_", *_form(tensor)), tensor, run) if is_one else run()

        init._no_grad_trunc_normal_ = trunc_normal
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *args: Any) -> None:
        init._no_grad_trunc_normal_ = self._draw
        super().__exit__(*args)  # type: ignore[no-untyped-call]


class _Watch(_Fills):
    """Notes what is filled, and what is computed from that."""

    def __init__(self) -> None:
        super().__init__()
        self._fills: list[tuple[tuple[Any, ...], int, Tensor, int | None]] = []
        self._held: dict[int, torch.UntypedStorage] = {}
        """Storages that are filled, or computed from those; held, so that no other gets the same address."""
        self._computed: list[tuple[set[int], set[int | None]]] = []
        """From which of them an operator computed which; None is something that is no tensor."""

    def fill(self, form: tuple[Any, ...], tensor: Tensor, run: Callable[[], Any]) -> Any:
        result = run()
        self._fills.append((form, tensor.numel(), torch.get_rng_state(), self._hold(tensor)))
        return result

    def other(self, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        result = run()
        if self._held:
            every = tree_leaves((args, kwargs))
            given = {each.untyped_storage()._cdata for each in every if _is_dense(each)} & self._held.keys()
            if given:
                self._computed.append((given, {self._hold(each) for each in tree_leaves(result) if each is not None}))
        return result

    def _hold(self, value: object) -> int | None:
        if not _is_dense(value):
            return None
        storage = value.untyped_storage()
        self._held[storage._cdata] = storage
        return storage._cdata

    def known(self, module: object) -> _Known | None:
        """Draws that may be left out, and the weights then; None where that is nothing, or too little to be worth
        it."""
        if not isinstance(module, nn.Module) or any(is_lazy(each) for each in module.parameters()):
            return None
        state = tensors_of(module)
        if not all(_is_dense(each) for each in state.values()) or not _has_room(state):
            return None
        own = {each.untyped_storage()._cdata for each in state.values()}
        drawn = sum(count for _, count, _, storage in self._fills if storage in own)
        if drawn < LEAST or any(given & own and results - own for given, results in self._computed):
            return None
        fills = [_Fill(form, after, storage in own) for form, _, after, storage in self._fills]
        return _Known(fills, copied_to_host(state))


class _Leave(_Fills):
    """Leaves out what need not be filled, and moves the generator on."""

    def __init__(self, fills: list[_Fill]) -> None:
        super().__init__()
        self._fills, self.number = fills, 0

    def fill(self, form: tuple[Any, ...], tensor: Tensor, run: Callable[[], Any]) -> Any:
        if self.number in (-1, len(self._fills)) or self._fills[self.number].form != form:
            self.number = -1  # even where the factory catches what is raised
            raise _OtherwiseError
        fill = self._fills[self.number]
        self.number += 1
        if not fill.is_left_out:
            return run()
        torch.set_rng_state(fill.after)
        return tensor


def _is_fillable(tensor: object, generator: torch.Generator | None) -> bool:
    return _is_dense(tensor) and tensor.device.type == "cpu" and generator is None


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (each.shape, each.dtype) for name, each in tensors.items()}


def _has_room(tensors: Mapping[str, Tensor]) -> bool:
    """True if a copy takes at most a quarter of the free memory."""
    return 4 * sum(each.nbytes for each in tensors.values()) <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
