"""The next batch, made ready between steps: timed apart from them, and not allowed to do a step's work.

What a step leaves for when its next batch is asked for is outside of the step's time. So that time is a sample of its
own, and weights and optimizer state must be bit for bit the same after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainstep.base.config import StepMode
from trainstep.measure.outcome import WrongError
from trainstep.measure.timing import DeviceClock
from trainstep.step.training_step import TrainingStep
from trainstep.step.weights import optimizer_state_tensors

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → whole numbers of its size."""


class Preparing:
    """Makes the next batch ready, and times it until the device has it; for `time_steps` to call after each step."""

    def __init__(self, prepare_next: Callable[[], object], device: DeviceClock) -> None:
        self._prepare_next, self._device = prepare_next, device
        self.ms: list[float] = []
        """Milliseconds of the host's clock, one per step."""

    def __call__(self, _: object) -> None:
        """After a step."""
        start = time.perf_counter()
        self._prepare_next()
        self._device.synchronize()
        self.ms.append((time.perf_counter() - start) * 1e3)


def check_batches_leave_weights(step: TrainingStep, batch: Any, mode: StepMode) -> None:
    """Take one more step, on a batch that is ready, and ask for the next one.

    Raises:
        WrongError: weights or optimizer state are others after that than before it.
    """
    step(batch, mode=mode)
    before = _prints(step)
    step.next_batch()
    if _prints(step) != before:
        raise WrongError(
            "asking for the next batch changed weights or optimizer state, which is work of the step outside of its "
            "time: expected batches alone; update in the optimizer's step()"
        )


def _prints(step: TrainingStep) -> list[int]:
    """Sums of the bits as whole numbers, of each trained tensor and each of the optimizer's state."""
    return [_bits(each) for each in (*step.module.parameters(), *optimizer_state_tensors(step.optimizer))]


def _bits(tensor: Tensor) -> int:
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return int(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64))
