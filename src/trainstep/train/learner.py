"""The model of a run on one rank: updates, validations, and how an update's values are read.

An update leaves its loss, its gradient norm, what it counted and whether to stop. These travel in one small all-reduce
behind the update's work and are copied to the host without waiting. They are read when the next update has been given
to the device, so the device never idles while the host reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.measure.flops import counted_flops
from trainstep.parallel.collectives import broadcast_from_first
from trainstep.parallel.process import Process
from trainstep.parallel.replicas import build, uncounted_bytes
from trainstep.step.batches import count_tokens, tensors_of
from trainstep.step.training_step import MakeOptimizer, Replica, TrainingStep, uncompiled
from trainstep.train.config import RunConfig
from trainstep.train.data import Data


@dataclass(frozen=True)
class Update:
    """An update on this rank. Tensors are on the device, where they may not be computed yet."""

    loss: Tensor
    norm: Tensor  # of the gradient over all ranks, before it was clipped
    tokens: float  # in this rank's batches; NaN where they do not tell
    flops: float  # of the model for these; NaN where they were not counted
    data_s: float  # until its batches were drawn and on their way to the device, on the host
    ready: Any = None
    """The place in the device's work where its gradients were there, before it waited for other ranks'; None where it
    has to wait for them all along, as with sharded weights."""


class Learner:
    """The module and optimizer of a run, built the same for every scheme; every rank has one and calls it alike.

    Buffers that training changes, such as batch normalisation's running statistics, are rank 0's on every rank after
    each update, as under torch's DistributedDataParallel.

    Args:
        counts_flops: whether FLOPs that no formula gives are counted in the first update, by running it once more
            without its optimizer. Not where code is compiled or in a graph, which hides its operators, or checkpointed,
            which runs some of them twice.

    Raises:
        UsageError: the module or its optimizer cannot be trained like this.
    """

    def __init__(self, config: RunConfig, data: Data, process: Process, *, counts_flops: bool) -> None:
        self._config, self._data, self._process = config, data, process
        step = dataclasses.replace(config.step, device=str(process.device))
        scheme, unused = config.scheme(process.world_size, process.hosts), config.train.allow_unused

        def parallelize(module: nn.Module, make_optimizer: MakeOptimizer) -> Replica:
            replica = build(scheme, process, step, module, make_optimizer, allow_unused=unused)
            finish = replica.finish_gradient_synchronization
            if finish is None or scheme.shards_weights:
                return replica
            return dataclasses.replace(replica, finish_gradient_synchronization=functools.partial(self._ready, finish))

        self._mark: Any = None
        self.step = TrainingStep(data.workload(step), step, parallelize)
        self._part = process.rank, process.world_size, step.batch
        """Part of a global batch that is this rank's, in passes of how many sequences."""
        optimizer = self.step.optimizer
        data.watch(optimizer)
        self._rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.buffers = MovingBuffers(self.step.module, process)
        self._known_flops = data.flops(process.world_size)
        is_plain = (config.step.compile, config.step.checkpointing, config.step.graph) == ("off", "none", "off")
        self._counts_flops, self._counted = counts_flops and is_plain, math.nan
        self._shapes: list[tuple[int, ...]] | None = None  # of the batches whose FLOPs were counted

    def update(self, number: int) -> Update:
        """Update number `number` of the weights, from 1 on."""
        self.buffers.note()
        start = time.perf_counter()
        parts = [self.step.place(part) for part in self._data.training_parts(number, *self._part)]
        data_s = time.perf_counter() - start
        self._set_rates(number)
        tokens, flops = self._counts(parts)
        loss, norm = self.step.accumulate(parts, self._config.train.clip_norm)
        assert norm is not None, "a norm was given"
        self.buffers.share()
        return Update(loss, norm, tokens, flops, data_s, self._mark)

    def _ready(self, finish: Callable[[], object]) -> None:
        self._mark = now(self._process.device)
        finish()

    def validate(self) -> float:
        """The mean loss over the validation batches of all ranks."""
        with self._data.evaluating():
            parts = self._data.validation_parts(*self._part)
            loss = self.step.evaluate([self.step.place(part) for part in parts]).double()
        dist.all_reduce(loss, group=self._process.group)
        return float(loss) / self._process.world_size

    def learning_rate(self, number: int) -> float:
        """Learning rate of an update; where an optimizer has several groups, of the first; NaN where it has none."""
        return self._config.learning_rate(number, self._rates[0]) if self._rates else math.nan

    def _set_rates(self, number: int) -> None:
        if not self._config.train.is_scheduled:
            return
        groups = [group for group in self.step.optimizer.param_groups if "lr" in group]
        for group, peak in zip(groups, self._rates, strict=True):
            rate = self._config.learning_rate(number, peak)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _counts(self, parts: Sequence[Any]) -> tuple[float, float]:
        """Count the tokens of these parts, and the model's FLOPs for them; NaN where they do not tell."""
        counts = [count_tokens(part) for part in parts]
        tokens = math.nan if None in counts else float(sum(count or 0 for count in counts))
        if self._known_flops is not None:
            return tokens, self._known_flops
        shapes = [tuple(tensor.shape) for part in parts for tensor in tensors_of(part)] if self._counts_flops else []
        if self._counts_flops and self._shapes is None:
            self._shapes, self._counted = shapes, self._flops(parts)
        return tokens, self._counted if shapes == self._shapes else math.nan

    def _flops(self, parts: Sequence[Any]) -> float:
        before = [buffer.clone() for buffer in self.step.module.buffers()]
        flops = 0.0
        for part in parts:
            with uncompiled(), counted_flops() as count:
                self.step(part, mode="forward-backward")
            flops = math.nan if count.uncounted or not count() else flops + count()
        with torch.no_grad():
            for buffer, value in zip(self.step.module.buffers(), before, strict=True):
                buffer.copy_(value)
        return flops

    def peak_bytes(self) -> int | None:
        """The most GPU memory that any rank has held since it started; None on a CPU."""
        device, mine = self._process.device, 0
        if device.type == "cuda":
            graph = self.step.graph.memory()[1].values() if self.step.graph is not None else ()
            mine = max(torch.cuda.max_memory_allocated(device), *graph) + uncounted_bytes(self.step.replica)
        peaks: list[int] = [0] * self._process.world_size
        dist.all_gather_object(peaks, mine, group=self._process.group)
        return max(peaks) or None


class MovingBuffers:
    """The buffers of a module that training changes, found by their values: some operators change them unannounced."""

    def __init__(self, module: nn.Module, process: Process) -> None:
        self._module, self._process = module, process
        self._still: dict[str, Tensor] | None = None  # those that have not changed since the first update, as copies
        self.names: list[str] | None = None
        """Names of the buffers that are known to change; None before the first update."""

    def note(self) -> None:
        """Call before an update: what changes from the first one on is a change."""
        if self._still is None:
            self._still = {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def share(self) -> None:
        """Call after an update: those that are known to change become rank 0's."""
        if self.names is None:
            self.look()
        if self._process.world_size == 1 or not self.names:
            return
        named = dict(self._module.named_buffers())
        moving = sorted((named[name] for name in self.names), key=lambda each: str(each.dtype))
        for _, group in groupby(moving, key=lambda each: each.dtype):
            alike = list(group)
            flat = torch.cat([each.detach().reshape(-1) for each in alike])
            broadcast_from_first([flat], self._process.group)
            if self._process.rank:
                for each, value in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
                    with torch.no_grad():
                        each.copy_(value.view_as(each))

    def look(self) -> None:
        """Find those that have changed so far, on any rank; all ranks call it."""
        named, still = dict(self._module.named_buffers()), self._still or {}
        everywhere: list[list[str]] = [[]] * self._process.world_size
        mine = [name for name, value in still.items() if name not in named or not torch.equal(named[name], value)]
        dist.all_gather_object(everywhere, mine, group=self._process.group)
        found = {name for names in everywhere for name in names} | set(self.names or ())
        self.names = [name for name in named if name in found]
        self._still = {name: value for name, value in still.items() if name not in found}

    def lost(self) -> list[str]:
        """Names of buffers that change and that no checkpoint has, as they are not persistent."""
        left_out = {
            f"{path}.{name}".lstrip(".")
            for path, each in self._module.named_modules()
            for name in each._non_persistent_buffers_set
        }
        return [name for name in self.names or () if name in left_out]


@dataclass(frozen=True)
class Reading:
    """An update, as all ranks see it."""

    step: int
    loss: float  # mean over the global batch
    gradient_norm: float  # before clipping
    stop: bool  # whether some rank was told to stop by the end of this update
    seconds: float  # from the end of the update before, or from `restart`, to this one's end
    tokens: int | None = None  # in the batches of all ranks; None where they do not tell
    flops: float | None = None  # of the model for these; None where they were not counted
    ranks_own_ms: list[float | None] | None = None
    """By rank: what an update took until it waited for others, a mean since these were told last; mostly not told."""
    ranks_data_ms: list[float | None] | None = None  # the part of it in which batches were drawn


class Readings:
    """At most one update that is not read yet.

    Every `ranks_every` updates each rank's own times travel with the rest.
    """

    def __init__(self, process: Process, ranks_every: int) -> None:
        self._process, self._every = process, ranks_every
        self._pending: tuple[int, Update, Tensor, Any] | None = None
        self._own: list[float] = []  # seconds of each update since they were told
        self._data: list[float] = []
        self._before = now(process.device)

    def post(self, step: int, update: Update, stop: bool) -> Reading | None:
        """Send off an update's values; returns those of the update before, if they have not been read."""
        told = torch.tensor([float(stop), update.tokens, update.flops, *self._times(step)], dtype=torch.float64)
        if update.loss.is_cuda:  # from pinned memory, or the host would wait for the device
            told = told.pin_memory().to(update.loss.device, non_blocking=True)
        values = torch.cat([torch.stack([update.loss.double(), update.norm.double()]), told])
        dist.all_reduce(values, group=self._process.group)
        if values.is_cuda:
            there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = there.copy_(values, non_blocking=True)
        end = now(self._process.device)
        before = self.take()
        self._pending = (step, update, values, end)
        return before

    def _times(self, step: int) -> list[float]:
        """This rank's times in its place among those of all ranks, where they are due."""
        ranks = self._process.world_size
        if ranks == 1 or step % self._every:
            return []
        times = [0.0] * (2 * ranks)
        for place, taken in enumerate((self._own, self._data)):
            times[place * ranks + self._process.rank] = 1e3 * sum(taken) / len(taken) if taken else math.nan
            taken.clear()
        return times

    def take(self) -> Reading | None:
        """Wait for the update that is not read yet, if there is one."""
        if self._pending is None:
            return None
        step, update, values, end = self._pending
        start, self._before, self._pending = self._before, end, None
        if isinstance(end, float):
            seconds = end - start
        else:
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        self._data.append(update.data_s)
        if update.ready is not None:
            is_host = isinstance(update.ready, float)
            self._own.append(update.ready - start if is_host else start.elapsed_time(update.ready) / 1e3)
        ranks = self._process.world_size
        loss, norm, *told = values.tolist()
        stops, tokens, flops, *times = (None if math.isnan(each) else each for each in told)
        counted = None if tokens is None else round(tokens)
        reading = Reading(step, loss / ranks, norm / ranks, bool(stops), seconds, counted, flops)
        if not times:
            return reading
        own = None if None in times[:ranks] else times[:ranks]
        return dataclasses.replace(reading, ranks_own_ms=own, ranks_data_ms=times[ranks:])

    def restart(self) -> None:
        """Begin the next update's time now: something else than training has just been done."""
        assert self._pending is None, "an update is not read yet"
        self._before = now(self._process.device)


def now(device: torch.device) -> Any:
    """This place in the device's work: on a GPU an event, on a CPU, which works as it is asked, the host's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
