"""What every update leaves to be read: loss, gradient norm and whether to stop, the same on all ranks.

The three travel in one small all-reduce behind the update's work and are copied to the host without waiting. They are
read when the next update has been given to the device, so the device never idles while the host reads.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.process import Process


@dataclass(frozen=True)
class Reading:
    """One update, as all ranks see it."""

    step: int
    loss: float
    """Mean over the global batch."""
    gradient_norm: float
    """Before clipping."""
    stop: bool
    """Whether some rank was told to stop by the end of this update."""
    seconds: float
    """From the end of the update before, or from `restart`, to this one's end."""

    @property
    def is_finite(self) -> bool:
        """Whether neither the loss nor the gradient is infinite or NaN."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class Readings:
    """At most one update that is not read yet."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._pending: tuple[int, Tensor, Moment] | None = None
        self._before = self._now()

    def post(self, step: int, loss: Tensor, gradient_norm: Tensor, stop: bool) -> Reading | None:
        """Send off an update's values; returns those of the update before, if they have not been read."""
        values = torch.stack([loss.double(), gradient_norm.double(), torch.full_like(loss, stop, dtype=torch.float64)])
        dist.all_reduce(values, group=self._process.group)
        if values.is_cuda:
            there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = there.copy_(values, non_blocking=True)
        end = self._now()
        before = self.take()
        self._pending = (step, values, end)
        return before

    def take(self) -> Reading | None:
        """Wait for the update that is not read yet, if there is one."""
        if self._pending is None:
            return None
        step, values, end = self._pending
        self._pending = None
        seconds = _seconds(self._before, end)
        self._before = end
        loss, norm, stops = values.tolist()
        world_size = self._process.world_size
        return Reading(step, loss / world_size, norm / world_size, stops > 0, seconds)

    def restart(self) -> None:
        """Begin the next update's time now: something else than training has just been done."""
        assert self._pending is None, "an update is not read yet"
        self._before = self._now()

    def _now(self) -> Moment:
        """This place in the device's work."""
        if self._process.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


Moment = float | torch.cuda.Event
"""On a CPU, which does work as it is given, the clock's; on a GPU, an event among its work."""


def _seconds(start: Moment, end: Moment) -> float:
    """Between two moments; waits for the second."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float), "a GPU's moment cannot be compared with a clock's"
        assert isinstance(end, float), "a GPU's moment cannot be compared with a clock's"
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3
