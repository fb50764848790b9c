"""Updates while backward runs: the optimizer updates each block as soon as its gradients are there, and frees them.

So no more gradients are there at once than those of a block: of the 16 bytes that a float32 parameter takes under
AdamW, nearly four are not needed. torch's tutorial on the optimizer's step in backward gives every parameter an
optimizer of its own; here it stays one, whose parameter groups are narrowed to what is updated, so that learning rates,
state and checkpoints are as they were.

It computes the same where every parameter's update depends on its own gradient alone. What needs all of them at once
does not go with it: clipping by their norm, gradients that are added up over several passes or averaged over ranks, a
gradient scaler. torch refuses a backward that reads, by way of what it saved, a weight that was updated already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.blocks import find_blocks
from trainstep.errors import UnsupportedError

Parameters = Sequence[nn.Parameter]


class UpdatesInBackward:
    """Which parameters of `module` are updated together by `optimizer`: those of a block, and each of the others."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        trained = (each for group in optimizer.param_groups for each in group["params"])
        left = {id(each): each for each in trained if each.requires_grad}
        self._parts: list[Parameters] = []
        for block in find_blocks(module):
            own = [left.pop(id(each)) for each in block.parameters() if id(each) in left]
            self._parts += [own] if own else []
        self._parts += [[each] for each in left.values()]

    @contextmanager
    def on(self, update: Callable[[Parameters], None] | None = None) -> Iterator[None]:
        """Around backward: `update` is called with each part whose gradients are there; at the end, with what is left.

        Args:
            update: by default `update` of this object.

        Raises:
            UnsupportedError: see there.
        """
        act = update or self.update
        waiting = {index: len(part) for index, part in enumerate(self._parts)}

        def came(index: int, parameter: Tensor) -> None:
            waiting[index] -= 1
            if not waiting[index]:
                act(self._parts[index])

        hooks = [
            parameter.register_post_accumulate_grad_hook(_bound(came, index))
            for index, part in enumerate(self._parts)
            for parameter in part
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for index, count in waiting.items():
            if count and (rest := [each for each in self._parts[index] if each.grad is not None]):
                act(rest)

    def update(self, parameters: Parameters) -> None:
        """Update these from their gradients, which are then freed.

        Raises:
            UnsupportedError: the optimizer counts in its parameter groups, for all parameters at once.
        """
        optimizer, own = self._optimizer, set(map(id, parameters))
        whole = optimizer.param_groups
        narrowed = [group | {"params": [each for each in group["params"] if id(each) in own]} for group in whole]
        settings = [_settings(group) for group in narrowed]
        optimizer.param_groups = [group for group in narrowed if group["params"]]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = whole
        for group, before in zip(narrowed, settings, strict=True):
            if changed := [name for name, value in _settings(group).items() if before.get(name, self) is not value]:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} counts {changed[0]!r} in its parameter groups, for all parameters at "
                    "once, so it cannot update them one after another in backward; update after backward"
                )
        for each in parameters:
            each.grad = None


def _bound(came: Callable[[int, Tensor], None], index: int) -> Callable[[Tensor], None]:
    return lambda parameter: came(index, parameter)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
