"""Parameters that are gathered beside the next forward, and waited for where it needs them.

A step updates this rank's slices and starts the gathers, in the order in which a forward needs them: first what is
outside of blocks (embeddings, the head), which the module's own forward may use at any place, then block by block. The
module's call waits for the former, and each block's call for its own; most of the gathers are then through before
anyone waits.

What reads or writes parameters in another way reads what they were, or is written over. Where that can be seen it waits
(`state_dict` and `load_state_dict`), or is an error: a gradient of a parameter that nobody waited for, a copy of the
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainstep.base.errors import UsageError
from trainstep.parallel.gloo import Waitable
from trainstep.parallel.units import BOUNDARY, Boundary, Unit, install
from trainstep.step.blocks import find_blocks


class Arrivals:
    """Arrivals of the parameters of `module`; nothing waits until `install` was called."""

    def __init__(self, module: nn.Module) -> None:
        self._under_way: dict[int, list[Waitable]] = {}  # id of a parameter → the gathers of its bucket
        self._is_replaced = False
        self._hooks: list[RemovableHandle] = []
        blocks = list(dict.fromkeys(find_blocks(module)))
        inside = {id(inner) for block in blocks for inner in block.modules()}
        own = [
            id(parameter)
            for inner in module.modules()
            if id(inner) not in inside
            for parameter in inner._parameters.values()
            if parameter is not None
        ]
        self._needed: list[tuple[nn.Module, list[int]]] = [(module, own)]
        for block in blocks:
            self._needed.append((block, [id(parameter) for parameter in block.parameters()]))
        self._first_use: dict[int, int] = {}
        for place, (_, needed) in enumerate(self._needed):
            for number in needed:
                self._first_use.setdefault(number, place)

    def first_use(self, parameter: nn.Parameter) -> int:
        """Time at which forward needs it: 0 at once, then by block."""
        return self._first_use.get(id(parameter), 0)

    def install(self) -> None:
        """From now on calls of the module and of its blocks wait, in place of an earlier optimizer's if there is one.

        Raises:
            UsageError: something else handles calls of the module, or of one in it.
        """
        module = self._needed[0][0]
        gates = [vars(inner)[BOUNDARY] for inner in module.modules() if isinstance(inner, Unit)]
        if not all(isinstance(gate, _Gate) for gate in gates):
            raise UsageError(
                "overlap_gather=True, and the module, or one in it, is sharded already; give it plain ones"
            )
        for gate in gates:
            gate.close()
        for unit, needed in self._needed:
            if isinstance(unit, Unit):
                vars(unit)[BOUNDARY] = _Gate(self, needed)
            else:
                install(unit, _Gate(self, needed))
        for inner in module.modules():  # any may be asked for its own
            self._hooks.append(inner.register_state_dict_pre_hook(lambda *_: self.wait()))
            self._hooks.append(inner.register_load_state_dict_pre_hook(lambda *_: self.wait()))
        self._needed = []

    def start(self, parameters: Iterable[nn.Parameter], calls: Sequence[Waitable]) -> None:
        """These parameters come with `calls`."""
        together = list(calls)
        for parameter in parameters:
            self._under_way[id(parameter)] = together
        if self._is_replaced:
            self.wait()

    def may_be_old(self, parameter: nn.Parameter) -> bool:
        """True if nobody has waited for it."""
        return self.any_under_way([id(parameter)])

    def any_under_way(self, numbers: Iterable[int]) -> bool:
        """The same of any of these, by id."""
        return any(self._under_way.get(number) for number in numbers)

    def replace(self) -> None:
        """Another optimizer's take the place of these: from now on a step waits for its gathers itself."""
        self.wait()
        self._is_replaced = True
        while self._hooks:
            self._hooks.pop().remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self, needed: Iterable[int] | None = None) -> None:
        """Let the current stream (on a CPU: the caller) wait for these parameters, by default for all."""
        for number in list(self._under_way) if needed is None else needed:
            together = self._under_way.pop(number, [])
            while together:
                together.pop(0).wait()


class _Gate(Boundary):
    """Functions that a unit's calls go through: they wait for its parameters."""

    def __init__(self, arrivals: Arrivals | None, needed: Sequence[int] = ()) -> None:
        self._arrivals, self._needed = arrivals, needed

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._arrivals is not None:
            self._arrivals.wait(self._needed)
        return super().run(function, args, kwargs)

    def close(self) -> None:
        if self._arrivals is not None:
            self._arrivals.replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        """Copy the gate with its module: nothing changes the copy's parameters."""
        if self._arrivals is not None and self._arrivals.any_under_way(self._needed):
            raise UsageError(
                "a module was copied while its parameters are being gathered (overlap_gather=True); call "
                "wait_for_parameters() of the optimizer before"
            )
        return _Gate(None)
