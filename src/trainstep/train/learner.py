"""The model of a run on one rank: what an update and a validation are, and how an update's values are read.

An update leaves its loss, its gradient norm and whether to stop. The three travel in one small all-reduce behind the
update's work and are copied to the host without waiting. They are read when the next update has been given to the
device, so the device never idles while the host reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.process import Process
from trainstep.replicas import build, uncounted_bytes
from trainstep.train.config import RunConfig
from trainstep.train.data import TokenData
from trainstep.training_step import Replica, TrainingStep
from trainstep.workload import builtin_workload, make_optimizer


class Learner:
    """Built from the seed, the same for every scheme; every rank has one and calls it alike.

    Args:
        config: the run.
        tokens: its data.
        process: this rank.
    """

    def __init__(self, config: RunConfig, tokens: TokenData, process: Process) -> None:
        self._config, self._tokens, self._process = config, tokens, process
        step = dataclasses.replace(config.step, device=str(process.device))
        workload = builtin_workload(config.model, step, batches=())
        workload.optimizer = functools.partial(
            make_optimizer, step.optimizer, step.learning_rate, weight_decay=config.train.weight_decay
        )
        parallelize = functools.partial(build, config.scheme(process.world_size), process, step)
        self.step = TrainingStep(workload, step, parallelize)
        self._part = process.rank, process.world_size, step.batch
        """Which part of a global batch is this rank's, in passes of how many sequences."""

    @property
    def replica(self) -> Replica:
        """The module and its optimizer, under the run's scheme."""
        return self.step.replica

    def update(self, number: int) -> tuple[Tensor, Tensor]:
        """Update number `number` of the weights, from 1 on.

        Returns:
            This rank's loss, and the norm of the gradient over all ranks before it was clipped; both on the device,
            where they may not be computed yet.
        """
        parts = self._tokens.training_parts(number, *self._part)
        for group in self.step.optimizer.param_groups:
            group["lr"] = self._config.learning_rate(number)
        return self.step.clipped([self.step.place(part) for part in parts], self._config.train.clip_norm)

    def validate(self) -> float:
        """The mean loss over the validation sequences of all ranks."""
        parts = self._tokens.validation_parts(*self._part)
        loss = self.step.evaluate([self.step.place(part) for part in parts]).double()
        dist.all_reduce(loss, group=self._process.group)
        return float(loss) / self._process.world_size

    def peak_bytes(self) -> int | None:
        """The most GPU memory that any rank has held since it started; None on a CPU."""
        device = self._process.device
        on_gpu = device.type == "cuda"
        mine = torch.cuda.max_memory_allocated(device) + uncounted_bytes(self.replica) if on_gpu else 0
        peaks: list[int] = [0] * self._process.world_size
        dist.all_gather_object(peaks, mine, group=self._process.group)
        return max(peaks) or None


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
        self._pending: tuple[int, Tensor, Any] | None = None
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
        start, self._before, self._pending = self._before, end, None
        if isinstance(end, float):
            seconds = end - start
        else:
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        loss, norm, stops = values.tolist()
        world_size = self._process.world_size
        return Reading(step, loss / world_size, norm / world_size, stops > 0, seconds)

    def restart(self) -> None:
        """Begin the next update's time now: something else than training has just been done."""
        assert self._pending is None, "an update is not read yet"
        self._before = self._now()

    def _now(self) -> Any:
        """This place in the device's work: on a GPU an event, on a CPU, which works as it is asked, the host's time."""
        if self._process.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
