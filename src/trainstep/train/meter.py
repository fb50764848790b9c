"""What a row of the metrics says of an update: its loss, its learning rate, its speed and its utilisation."""

from __future__ import annotations

from typing import Any

from trainstep.hardware import find_device
from trainstep.measure.environment import device_name
from trainstep.parallel.process import Process
from trainstep.plan.flops import step_flops
from trainstep.train.config import RunConfig
from trainstep.train.readings import Reading
from trainstep.train.schedule import learning_rate


class Meter:
    """Makes rows. `peak_flops` is that of all ranks in the run's precision, None for an unknown device."""

    def __init__(self, config: RunConfig, process: Process, first: int) -> None:
        self.config, self.world_size, self.first = config, process.world_size, first
        self.tokens = config.train.global_batch * config.step.context
        self.flops = step_flops(config.model, config.train.global_batch, config.step.context, "step")
        spec = find_device(device_name(process.device))
        self.peak_flops = None if spec is None else 1e12 * spec.peak_tflops(config.step.precision) * process.world_size

    def learning_rate(self, step: int) -> float:
        """That of an update."""
        train = self.config.train
        return learning_rate(
            step,
            peak=self.config.step.learning_rate,
            warmup=train.warmup_steps,
            steps=train.steps,
            floor=train.min_learning_rate,
        )

    def row(self, reading: Reading, validation_loss: float | None) -> dict[str, Any]:
        """One update: the loss over the global batch, the gradient's norm before clipping, speed over all ranks."""
        return {
            "step": reading.step,
            "loss": reading.loss,
            "validation_loss": validation_loss,
            "learning_rate": self.learning_rate(reading.step),
            "gradient_norm": reading.gradient_norm,
            "step_ms": 1e3 * reading.seconds,
            "tokens_per_s": self.tokens / reading.seconds,
            "utilisation": None if self.peak_flops is None else self.flops / reading.seconds / self.peak_flops,
            "tokens": reading.step * self.tokens,
            "world_size": self.world_size,
            "since_start": reading.step - self.first,
        }
