"""The model of a run on one rank, with the tokens that it is given: what an update and a validation are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.process import Process
from trainstep.replicas import uncounted_bytes
from trainstep.train.build import build_training_step
from trainstep.train.config import RunConfig
from trainstep.train.data import TokenData
from trainstep.training_step import Replica, TrainingStep


class Learner:
    """Built from the seed; every rank has one and calls it alike.

    Args:
        config: the run.
        tokens: its data.
        process: this rank.
    """

    def __init__(self, config: RunConfig, tokens: TokenData, process: Process) -> None:
        self._config, self._tokens, self._process = config, tokens, process
        self.step: TrainingStep = build_training_step(config, process)

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
        parts = self._tokens.training_parts(number, *self._part())
        for group in self.step.optimizer.param_groups:
            group["lr"] = self._config.learning_rate(number)
        return self.step.clipped([self.step.place(part) for part in parts], self._config.train.clip_norm)

    def validate(self) -> float:
        """The mean loss over the validation sequences of all ranks."""
        parts = self._tokens.validation_parts(*self._part())
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

    def _part(self) -> tuple[int, int, int]:
        """Which part of a global batch is this rank's, in passes of how many sequences."""
        return self._process.rank, self._process.world_size, self._config.step.batch
