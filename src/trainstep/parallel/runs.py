"""A run of parameters that are updated, each rank its part, and then given to all ranks in as few calls as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.collectives import Waitable, all_gather_slices, flat, slice_of
from trainstep.parallel.pieces import Piece


@dataclass
class Run:
    """Parameters of one dtype and device, all of them sliced or none."""

    pieces: list[Piece]
    optimizer: torch.optim.Optimizer | None
    """Updates this rank's part; None where it has none."""
    groups: list[int]
    """For each parameter group of `optimizer`, which one of the whole it belongs to."""

    def take_settings(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Give the run's optimizer the hyper-parameters as they are now in the groups of the whole."""
        for group, index in self._groups():
            group.update(hyper_parameters(param_groups[index]))

    def give_settings(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """The other way round, after a step: some optimizers count there."""
        for group, index in self._groups():
            param_groups[index].update(hyper_parameters(group))

    def _groups(self) -> list[tuple[dict[str, Any], int]]:
        return [] if self.optimizer is None else list(zip(self.optimizer.param_groups, self.groups, strict=True))

    def update(self, process_group: dist.ProcessGroup) -> None:
        """Update this rank's part."""
        if self.optimizer is None:
            return
        sliced = [(piece.parameter, piece.mine) for piece in self.pieces if piece.owner is None]
        for parameter, mine in sliced:
            assert mine is not None, "every rank has its slice"
            if parameter.grad is not None:  # else it was reduce-scattered straight into the slice's
                mine.grad = slice_of(parameter.grad, process_group.rank(), process_group.size())
        self.optimizer.step()
        for _, mine in sliced:
            assert mine is not None
            mine.grad = None  # a view of the whole gradient, which would live on with it

    def exchange(self, process_group: dist.ProcessGroup) -> list[Callable[[], None]]:
        """Start giving every rank the new parameters; returns what waits for each call."""
        if process_group.size() == 1:
            return []
        parameters = [piece.parameter.detach() for piece in self.pieces]
        if self.pieces[0].owner is None:
            work = all_gather_slices(parameters, process_group)
            return [lambda: _wait(work)]
        calls = []
        for owner in range(process_group.size()):
            owned = [flat(each) for each, piece in zip(parameters, self.pieces, strict=True) if piece.owner == owner]
            if owned:
                calls.append(_broadcast(owned, owner, process_group))
        return calls


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _broadcast(tensors: list[Tensor], owner: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Send one rank's tensors to the others in one call; returns what waits for it and puts them in place."""
    together = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    work = dist.broadcast(together, group=group, group_src=owner, async_op=True)

    def finish() -> None:
        assert work is not None, "an asynchronous call by a member of the group returns its work"
        _wait(work)
        if len(tensors) > 1 and group.rank() != owner:
            torch._foreach_copy_(tensors, list(together.split([tensor.numel() for tensor in tensors])))

    return finish


def _wait(work: Waitable) -> None:
    work.wait()
