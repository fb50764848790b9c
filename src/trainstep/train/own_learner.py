"""The learner of a user's workload: its own learning rates, its module's modes and buffers, and FLOPs that are counted.

Buffers that training changes, such as batch normalisation's running statistics, are rank 0's on every rank after each
update, as under torch's DistributedDataParallel. Which these are is seen in the first update, and looked at again
wherever the run is saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.measure.flops import counted_flops
from trainstep.parallel.collectives import broadcast_from_first
from trainstep.parallel.process import Process
from trainstep.step.batches import tensors_of
from trainstep.step.training_step import uncompiled
from trainstep.train.config import RunConfig
from trainstep.train.learner import Learner, Update
from trainstep.train.own import OwnData, check_steps_once, options_of, tokens_of


class OwnLearner(Learner):
    """A user's module and optimizer, as the run's settings have them; every rank has one and calls it alike.

    Args:
        data: the workload.
        counts_flops: whether the first update's FLOPs are counted, by running it once more without its optimizer. Not
            where code is compiled, which hides its operators, or checkpointed, which runs some of them twice.

    Raises:
        UsageError: the module or its optimizer cannot be trained like this.
    """

    def __init__(self, config: RunConfig, data: OwnData, process: Process, *, counts_flops: bool) -> None:
        super().__init__(config, data, process)
        self._own = data
        optimizer = self.step.optimizer
        check_steps_once(optimizer)
        self.made = options_of(optimizer)
        """Values of the optimizer's groups when it was made."""
        self._rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self._number = 0
        optimizer.register_step_pre_hook(lambda *_: data.seed_update(self._number))
        self.buffers = MovingBuffers(self.step.module, process)
        is_plain = config.step.compile == "off" and config.step.checkpointing == "none"
        self._counts_flops, self._counted = counts_flops and is_plain, math.nan
        self._shapes: list[tuple[int, ...]] | None = None  # of the batches whose FLOPs were counted

    def update(self, number: int) -> Update:
        """Update as of a built-in model; then the buffers that it changed are rank 0's."""
        self._number = number
        self.buffers.note()
        update = super().update(number)
        self.buffers.share()
        return update

    def validate(self) -> float:
        """The mean loss over the validation batches, in eval mode."""
        with self._own.evaluating():
            return super().validate()

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
        tokens = tokens_of(parts)
        shapes = [tuple(tensor.shape) for part in parts for tensor in tensors_of(part)] if self._counts_flops else []
        if self._counts_flops and self._shapes is None:
            self._shapes, self._counted = shapes, self._flops(parts)
        return math.nan if tokens is None else tokens, self._counted if shapes == self._shapes else math.nan

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
