"""Fields that rows of several kinds share."""

from __future__ import annotations

from dataclasses import dataclass

from trainstep.records import Row, setting


@dataclass(frozen=True, kw_only=True)
class StepSettings(Row):
    """How a training step was taken: fields of `StepConfig`, those that a user's workload fixes left None."""

    workload: str | None = setting(None)
    batch: int | None = setting(None)
    context: int | None = setting(None)
    precision: str | None = setting(None)
    compile: str | None = setting(None)
    attention: str | None = setting(None)
    loss: str | None = setting(None)
    checkpointing: str | None = setting(None)
    optimizer: str | None = setting(None)
    seed: int | None = setting(None)


@dataclass(frozen=True, kw_only=True)
class GpuState(Row):
    """The GPU right after the last timed step; None on a CPU."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rates(Row):
    """What kernels computed and moved, and how fast, where it could be counted."""

    tflop: float | None = None
    gb: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    flop_per_byte: float | None = None
