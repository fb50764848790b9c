"""What a row of the metrics says of an update: its loss, its learning rate, its speed and its utilisation."""

from __future__ import annotations

from typing import Any

from trainstep.hardware import find_device
from trainstep.measure.environment import device_name
from trainstep.parallel.process import Process
from trainstep.plan.flops import step_flops
from trainstep.train.config import RunConfig
from trainstep.train.readings import Reading


class Meter:
    """Makes rows of what is read of updates.

    Args:
        config: the run.
        process: any of its ranks.
        first: the update that this start goes on from; 0 at the run's start.
    """

    def __init__(self, config: RunConfig, process: Process, first: int) -> None:
        self._config, self._world_size, self._first = config, process.world_size, first
        self._flops = step_flops(config.model, config.train.global_batch, config.step.context, "step")
        spec = find_device(device_name(process.device))
        self.peak_flops = None if spec is None else 1e12 * spec.peak_tflops(config.step.precision) * process.world_size
        """FLOP/s of all ranks at most, in the run's precision; None: no peak is known of the device."""

    def row(self, reading: Reading, validation_loss: float | None) -> dict[str, Any]:
        """One update: the loss over the global batch, the gradient's norm before clipping, speed over all ranks."""
        tokens = self._config.tokens_per_update
        return {
            "step": reading.step,
            "loss": reading.loss,
            "validation_loss": validation_loss,
            "learning_rate": self._config.learning_rate(reading.step),
            "gradient_norm": reading.gradient_norm,
            "step_ms": 1e3 * reading.seconds,
            "tokens_per_s": tokens / reading.seconds,
            "utilisation": None if self.peak_flops is None else self._flops / reading.seconds / self.peak_flops,
            "tokens": reading.step * tokens,
            "world_size": self._world_size,
            "since_start": reading.step - self._first,
        }
