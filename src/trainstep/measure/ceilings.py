"""What this device really reaches: the rate of a large matrix product per precision, and of a large copy.

Random inputs, never zeros (zeros run faster: fewer bits toggle, so less power); the best of several, since a ceiling is
what the device can do, not what it does on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainstep.casting import DTYPES, matmul_precision
from trainstep.measure.timing import device_clock, time_steps
from trainstep.phases import PhaseContext
from trainstep.precision import PrecisionName


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device."""

    matmul_tflops: dict[PrecisionName, float]
    """Best rate of an n × n × n product, 1e12 FLOP/s."""
    copy_gb_s: float
    """Best rate of a device-to-device copy, bytes read plus bytes written, 1e9 bytes/s."""


def measure_ceilings(device: torch.device, precisions: Sequence[PrecisionName]) -> Ceilings:
    """Measure in about a second on a CPU and less on a GPU; `precisions` must be supported by the device."""
    on_gpu = device.type == "cuda"
    size, copied = (8192, 2**30) if on_gpu else (1024, 2**27)
    rates = {precision: _matmul_tflops(device, precision, size) for precision in precisions}
    source = torch.empty(copied // 4, device=device, dtype=torch.float32).normal_()
    target = torch.empty_like(source)
    milliseconds = _best_ms(lambda: target.copy_(source), device)
    return Ceilings(rates, 2 * copied / milliseconds / 1e6)


def _matmul_tflops(device: torch.device, precision: PrecisionName, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
    out = torch.empty_like(a)
    with matmul_precision(precision):
        milliseconds = _best_ms(lambda: torch.mm(a, b, out=out), device)
    return 2 * size**3 / milliseconds / 1e9


def _best_ms(work: Callable[[], object], device: torch.device) -> float:
    def step(phase: PhaseContext) -> None:
        with phase("work"):
            work()

    timing = time_steps(step, device=device_clock(device), warmup=3, steps=10)
    return min(sample.laps["work"].ms for sample in timing.samples)
