"""Parameters that are gathered beside the next forward, and waited for where it needs them.

A step updates this rank's slices and starts the gathers, in one order: first the buckets that have parameters outside
of blocks (embeddings, the head), which the module's own forward may use at any place, then the blocks' in the order of
definition. The module's call waits for the former, and each block's call for its own; most of the gathers are then
through before anyone waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trainstep.blocks import find_blocks
from trainstep.errors import UsageError
from trainstep.parallel.staged import Waitable
from trainstep.parallel.units import Unit, install


class Arrivals:
    """Of the parameters of `module`, whose calls, and those of its blocks, wait from now on.

    Raises:
        UsageError: calls of the module, or of one in it, wait for parameters already.
    """

    def __init__(self, module: nn.Module) -> None:
        if any(isinstance(inner, Unit) for inner in module.modules()):
            raise UsageError(
                "overlap_gather=True, and calls of this module wait for its parameters already; give one optimizer all "
                "parameters"
            )
        self._under_way: dict[int, list[Waitable]] = {}  # id of a parameter → the gathers of its bucket
        inside: list[int] = []
        needed: list[int] = []
        for block in find_blocks(module):
            if not getattr(vars(block).get("forward"), "hands_on", False):  # else the block before computes it, too
                needed = []
                install(block, _Gate(self, needed))
            needed += [id(parameter) for parameter in block.parameters()]
            inside += needed
        known = frozenset(inside)
        outside = [id(parameter) for parameter in module.parameters() if id(parameter) not in known]
        install(module, _Gate(self, outside))
        self.outside = frozenset(outside)
        module.register_state_dict_pre_hook(lambda *_: self.wait())

    def start(self, parameters: Iterable[nn.Parameter], calls: Sequence[Waitable]) -> None:
        """These parameters come with `calls`."""
        together = list(calls)
        for parameter in parameters:
            self._under_way[id(parameter)] = together

    def any_under_way(self, needed: Iterable[int]) -> bool:
        """Whether any of these parameters may not have arrived."""
        return any(number in self._under_way for number in needed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self, needed: Iterable[int] | None = None) -> None:
        """Let the current stream (on a CPU: the caller) wait for these parameters, by default for all."""
        for number in list(self._under_way) if needed is None else needed:
            together = self._under_way.pop(number, [])
            while together:
                together.pop(0).wait()


class _Gate:
    """What a unit's calls go through: they wait for its parameters."""

    def __init__(self, arrivals: Arrivals | None, needed: Sequence[int] = ()) -> None:
        self._arrivals, self._needed = arrivals, needed
        self.is_open = False

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._arrivals is not None:
            self._arrivals.wait(self._needed)
        was_open, self.is_open = self.is_open, True
        try:
            return function(*args, **kwargs)
        finally:
            self.is_open = was_open

    run_again = run

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        """Of a copy of the module, whose parameters nothing changes."""
        if self._arrivals is not None and self._arrivals.any_under_way(self._needed):
            raise UsageError(
                "a module was copied while its parameters are being gathered (overlap_gather=True); call "
                "wait_for_parameters() of the optimizer before"
            )
        return _Gate(None)
