"""Gradients that are averaged in one call, or by copies, and, where a rank gets its slice alone, that call's two parts.

Between replicas (a mesh of two dimensions, see `ranks`) slices follow in a second call: what was reduce-scattered among
the ranks of a replica is then averaged with the other replicas' slices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trainstep.parallel.collectives import all_reduce_mean, reduce_scatter_mean
from trainstep.parallel.gloo import Waitable, host_waits
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.side_stream import Pending, SideStream
from trainstep.parallel.slices import slices_of


class GradientBucket:
    """Parameters, by number, whose gradients are averaged in one call; `scattered`: a rank gets its slice alone."""

    def __init__(
        self,
        numbers: tuple[int, ...],
        scattered: bool,
        ranks: Ranks,
        between: SideStream,
        copies: Callable[[list[Tensor]], Pending] | None = None,
    ) -> None:
        self.numbers, self.scattered = numbers, scattered
        self._ranks, self._between, self._copies = ranks, between, copies
        self.reset()

    def reset(self) -> None:
        self.waiting = set(self.numbers)  # those whose gradient has not come yet
        self._gradients: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._slices: list[Tensor] = []  # this rank's, of what is sent, where it is scattered
        self.versions: list[int] = []  # of the gradients when they were sent
        self._work: Waitable | None = None
        self._replicated: Pending | None = None  # what goes between replicas

    @property
    def is_started(self) -> bool:
        return self._work is not None

    def start(self, gradients: list[Tensor], dtype: torch.dtype | None) -> None:
        """Send gradients, which are overwritten, in `dtype` (None: in their own)."""
        self._gradients = self._sent = gradients
        if dtype not in (None, gradients[0].dtype) and not gradients[0].is_complex():
            self._sent = [torch.empty_like(gradient, dtype=dtype) for gradient in gradients]
            torch._foreach_copy_(self._sent, gradients)
        if self.scattered:
            self._slices = slices_of(self._sent, self._ranks.shard)
        if self._copies is not None:
            self._work = self._copies(self._sent)
        elif self.scattered:
            self._work = reduce_scatter_mean(self._sent, self._ranks.shard, self._slices)
        else:
            self._work = all_reduce_mean(self._sent, self._ranks.everyone)
        if not host_waits(self._ranks.shard, self._sent[0].device):  # the second call follows by itself
            self.go_on()

    def go_on(self) -> None:
        """Start what goes between replicas, if anything does and it has not been started."""
        if self.scattered and self._replicated is None and (group := self._ranks.replicate) is not None:
            assert self._work is not None, "not started"
            start = partial(all_reduce_mean, self._slices, group)
            self._replicated = self._between.run(start, before=self._work.wait)

    def wait(self) -> list[Tensor]:
        """Make the current stream wait; returns the means: of the gradients, or of this rank's slices of them."""
        assert self._work is not None, "not started"
        self.go_on()
        (self._replicated or self._work).wait()  # `_replicated` has waited for `_work`, over Gloo for its results too
        sent = self._slices if self.scattered else self._sent
        if self._sent is self._gradients:
            return sent
        means = slices_of(self._gradients, self._ranks.shard) if self.scattered else self._gradients
        torch._foreach_copy_(means, sent)
        return means
