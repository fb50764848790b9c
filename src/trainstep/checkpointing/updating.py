"""Updates while backward runs: the optimizer updates each block as soon as its gradients are there, and frees them.

So no more gradients are there at once than those of a block: of the 16 bytes that a float32 parameter takes under
AdamW, nearly four are not needed. torch's tutorial on the optimizer's step in backward gives every parameter an
optimizer of its own; here it stays one, whose parameter groups are narrowed to what is updated, so that learning rates,
state and checkpoints are as they were.

It computes the same where every parameter's update depends on its own gradient alone. What needs all of them at once
does not go with it: clipping by their norm, gradients that are added up over several passes or averaged over ranks, a
gradient scaler, hooks around the optimizer's step, counts that it keeps for all parameters. What can be seen of that is
refused; an optimizer that clips or counts inside its step is not seen, and updates otherwise. torch refuses a backward
that reads, by way of what it saved, a weight that was updated already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.policies import INSTEAD
from trainstep.step.blocks import find_blocks

Parameters = Sequence[nn.Parameter]


class UpdatesInBackward:
    """Updates by `optimizer` in backward, of each of `module`'s blocks as one, and of every other parameter by itself.

    Raises:
        UnsupportedError: the optimizer has hooks around its step, which would run for each block.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise UnsupportedError(
                f"{type(optimizer).__name__} has hooks around its step, which would run once for each block; {INSTEAD}"
            )
        self._module, self._optimizer = module, optimizer
        self._lock = threading.RLock()  # backward has a thread for each device

    @contextmanager
    def on(self, update: Callable[[Parameters], None] | None = None) -> Iterator[None]:
        """Around one backward: `update` is called with each part whose gradients are there; at the end, with the rest.

        Args:
            update: by default `update` of this object.

        Raises:
            UnsupportedError: a second backward, or see `update`.
        """
        act, parts = update or self.update, self._parts()
        waiting = [len(part) for part in parts]

        def came(index: int, parameter: Tensor) -> None:
            with self._lock:
                waiting[index] -= 1
                if waiting[index] < 0:
                    raise UnsupportedError(
                        "gradients came twice between two updates in backward, where the first were used and freed: "
                        f"several backward passes add them up; {INSTEAD}"
                    )
                if not waiting[index]:
                    act(parts[index])

        with ExitStack() as hooks:
            for index, part in enumerate(parts):
                for each in part:
                    hooks.callback(each.register_post_accumulate_grad_hook(partial(came, index)).remove)
            yield
        for index, count in enumerate(waiting):
            if count and (rest := [each for each in parts[index] if each.grad is not None]):
                act(rest)

    def update(self, parameters: Parameters) -> None:
        """Update these from their gradients, which are then freed.

        Raises:
            UnsupportedError: the optimizer counts in its parameter groups, for all parameters at once.
        """
        optimizer, own = self._optimizer, set(map(id, parameters))
        whole = optimizer.param_groups
        narrowed = [group | {"params": [each for each in group["params"] if id(each) in own]} for group in whole]
        before = [_settings(group) for group in narrowed]
        optimizer.param_groups = [group for group in narrowed if group["params"]]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = whole
        for group, settings in zip(narrowed, before, strict=True):
            now = _settings(group)
            if changed := [name for name in now if name not in settings or not _is_same(settings[name], now[name])]:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} counts {changed[0]!r} in its parameter groups, for all parameters at "
                    f"once, so it cannot update them one after another in backward; {INSTEAD}"
                )
        for each in parameters:
            each.grad = None

    def _parts(self) -> list[Parameters]:
        """Parameters that the optimizer trains now, grouped by what is updated together."""
        trained = (each for group in self._optimizer.param_groups for each in group["params"])
        left = {id(each): each for each in trained if each.requires_grad}
        parts: list[Parameters] = []
        for block in find_blocks(self._module):
            own = [left.pop(id(each)) for each in block.parameters() if id(each) in left]
            parts += [own] if own else []
        return parts + [[each] for each in left.values()]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as they are now; tensors among them may change in place."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _is_same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
