"""The outermost calls of a script's models: the first training call before it runs, and each when it is over.

Before the first call a change to a model is made from outside, since the script has built it by then and has not used
it yet. `nn.Module.__call__` is replaced until a few updates are done, and put back while an outermost call is under
way. So what is compiled inside never sees this. Where calls are told of, a model that is put into evaluation mode has
it replaced again, until the next update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


class Outermost:
    """Calls each of `on_first` with a model that is about to be called in training for the first time, and
    `on_first_over` with it and its results after that call.

    Args:
        on_over: called with a module and its results when an outermost call is over.
    """

    def __init__(self, on_over: Callable[[nn.Module, Any], object] | None = None) -> None:
        self.on_first: list[Callable[[nn.Module], object]] = []
        self.on_first_over: Callable[[nn.Module, Any], object] = lambda module, results: None
        self._on_over = on_over
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """Makes the context that an outermost call runs in."""
        self.draws = False
        """True if a call in training drew random numbers of torch."""
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._original: Callable[..., Any] = nn.Module.__call__
        self._is_on = self._is_within = False

    def install(self) -> None:
        """Look from here on."""
        self._is_on, original = True, self._original

        def outermost(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_on or self._is_within:  # some class may have kept `looking` as its own
                return original(module, *args, **kwargs)
            self._is_within = True
            self._put(original)
            try:
                is_first = torch.is_grad_enabled() and module not in self._seen and _trains(module)
                if is_first:
                    self._seen.add(module)
                    for tell in self.on_first:
                        tell(module)
                states = [] if self.draws or not module.training else _states()
                with self.around():
                    results = original(module, *args, **kwargs)
                self.draws |= bool(states) and not all(map(torch.equal, states, _states()))
                if is_first:
                    self.on_first_over(module, results)
                if self._on_over is not None:
                    self._on_over(module, results)
                return results
            finally:
                self._is_within = False
                if self._is_on:
                    self._put(looking)

        def looking(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # dynamo then compiles as if this were not there
                return original(*args, **kwargs)
            return outermost(*args, **kwargs)

        self._put(looking)
        if self._on_over is not None:
            train = nn.Module.train

            def switched(module: Any, mode: bool = True) -> Any:
                if not mode:
                    self._is_on = True
                    self._put(looking)
                return train(module, mode)

            nn.Module.train = switched  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        """Look no longer."""
        if self._is_on:
            self._is_on = False
            self._put(self._original)

    @staticmethod
    def _put(call: Callable[..., Any]) -> None:
        nn.Module.__call__ = call  # type: ignore[method-assign]


def _states() -> list[torch.Tensor]:
    """States of the generators that torch draws from by itself."""
    return [each.get_state() for each in (torch.default_generator, *torch.cuda.default_generators)]


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
