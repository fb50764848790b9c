"""Which part of every parameter a rank updates: a slice of each, or some of them whole.

A parameter is cut into equal slices of its memory, so that its gradient can be reduce-scattered, and the parameter
gathered again, in place and without padding. What cannot be cut evenly goes whole to the rank that has least so far;
those are small or rare. Optimizers that are not elementwise (they need a matrix as a matrix) get whole parameters only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from trainstep.errors import UsageError
from trainstep.parallel.collectives import slice_of

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
        *("Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"),
    )
)
"""Optimizers of torch that treat each element alone, so that updating slices is the same as updating the whole.

Subclasses are not among them: what they change is not known.
"""


@dataclass(frozen=True)
class Piece:
    """A parameter, and what this rank updates of it."""

    number: int
    """Position among all parameters of the optimizer, as in its state dict."""
    group: int
    """Parameter group."""
    parameter: nn.Parameter
    owner: int | None
    """The rank that updates all of it; None where every rank updates its slice."""
    mine: nn.Parameter | None
    """What this rank's optimizer updates: its slice, sharing the parameter's memory, or the parameter, or nothing."""

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return self.parameter.numel() * self.parameter.element_size()


def may_slice(optimizer_cls: type[torch.optim.Optimizer], shard: str) -> bool:
    """Whether an optimizer's parameters are cut into slices, by its class and the caller's choice.

    Raises:
        UsageError: not an optimizer, one that cannot be divided, or one that cannot be divided as asked.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise UsageError(f"optimizer_cls is {optimizer_cls!r}; expected a torch optimizer's class, such as AdamW")
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise UsageError("LBFGS couples all parameters, so its work cannot be divided; use it undivided")
    if shard not in ("auto", "slices", "parameters"):
        raise UsageError(f"shard is {shard!r}; expected auto, slices or parameters")
    if shard == "slices" and optimizer_cls not in ELEMENTWISE:
        names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
        raise UsageError(
            f"{optimizer_cls.__name__} is not known to treat each element alone (as {names} do), so it needs whole "
            "parameters; use shard='parameters'"
        )
    return optimizer_cls in ELEMENTWISE and shard != "parameters"


def cut(
    parameters: Iterable[tuple[int, int, nn.Parameter]], *, rank: int, loads: list[int], sliced: bool
) -> list[Piece]:
    """Divide parameters among the ranks, evenly by bytes.

    Args:
        parameters: (number, group, parameter), the same on every rank.
        rank: this one.
        loads: bytes that each rank has as whole parameters; added to.
        sliced: whether parameters may be cut.
    """
    parameters = list(parameters)
    world_size = len(loads)
    owners: dict[int, int | None] = {}
    whole = []
    for number, _, parameter in parameters:
        divisible = parameter.dim() > 0 and parameter.numel() % world_size == 0 and not parameter.is_complex()
        if sliced and world_size > 1 and divisible:
            owners[number] = None
        else:
            whole.append((parameter.numel() * parameter.element_size(), number))
    for size, number in sorted(whole, key=lambda item: (-item[0], item[1])):  # the largest first, to the least loaded
        owner = min(range(world_size), key=lambda each: (loads[each], each))
        loads[owner] += size
        owners[number] = owner
    return [
        Piece(number, group, parameter, owners[number], _mine(parameter, owners[number], rank, world_size))
        for number, group, parameter in parameters
    ]


def _mine(parameter: nn.Parameter, owner: int | None, rank: int, world_size: int) -> nn.Parameter | None:
    if owner is None:
        return nn.Parameter(slice_of(parameter.detach(), rank, world_size))
    return parameter if owner == rank else None
