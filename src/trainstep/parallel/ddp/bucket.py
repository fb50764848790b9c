"""Gradients that are averaged in one call, or by copies; reduce-scattered where a rank gets its slice alone."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.collectives import all_reduce_mean, reduce_scatter_mean
from trainstep.parallel.gloo import Waitable
from trainstep.parallel.slices import slices_of


class GradientBucket:
    """Parameters, by number, whose gradients are averaged in one call; `scattered`: a rank gets its slice alone."""

    def __init__(
        self,
        numbers: tuple[int, ...],
        scattered: bool,
        group: dist.ProcessGroup,
        copies: Callable[[list[Tensor]], Waitable] | None = None,
    ) -> None:
        self.numbers, self.scattered = numbers, scattered
        self._group, self._copies = group, copies
        self.reset()

    def reset(self) -> None:
        self.waiting = set(self.numbers)  # those whose gradient has not come yet
        self._means: list[Tensor] = []
        self.versions: list[int] = []  # of the gradients when they were sent
        self._work: Waitable | None = None

    @property
    def is_started(self) -> bool:
        return self._work is not None

    def start(self, gradients: list[Tensor]) -> None:
        """Send gradients, which are overwritten."""
        self._means = slices_of(gradients, self._group) if self.scattered else gradients
        if self._copies is not None:
            self._work = self._copies(gradients)
        elif self.scattered:
            self._work = reduce_scatter_mean(gradients, self._group, self._means)
        else:
            self._work = all_reduce_mean(gradients, self._group)

    def wait(self) -> list[Tensor]:
        """Make the current stream wait; returns the means: of the gradients, or of this rank's slices of them."""
        assert self._work is not None, "not started"
        self._work.wait()
        return self._means
