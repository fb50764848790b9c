"""A training step measured: its times by phase, its memory, FLOPs and throughput, and that batches do no work of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainstep.base.config import CASE, PhaseContext, StepConfig, StepMode, settings_with
from trainstep.base.errors import UnsupportedError
from trainstep.base.hardware import find_device
from trainstep.base.precision import PrecisionName
from trainstep.base.stats import summarize
from trainstep.measure.environment import device_name, gpu_state
from trainstep.measure.flops import counted_flops
from trainstep.measure.memory import GIB, MemoryPeaks, cache_bytes, step_memory
from trainstep.measure.outcome import WrongError
from trainstep.measure.timing import DeviceClock, Timing, device_clock, time_steps, time_window
from trainstep.plan.flops import step_flops
from trainstep.rows.records import Scalar, Times
from trainstep.step.batches import count_tokens, tensors_of
from trainstep.step.training_step import TrainingStep, build_step, uncompiled
from trainstep.step.weights import optimizer_state_tensors
from trainstep.step.workload import WorkloadSource


def is_interpreted(device: torch.device) -> bool:
    """True if our Triton kernels run on this device in Triton's interpreter, which says nothing of their speed."""
    from trainstep.attention.flash import INTERPRETED  # here: it loads Triton

    return device.type == "cpu" and INTERPRETED


WARMUP = 2
"""Steps before the one whose memory is measured: the optimizer has its state and libraries their workspaces."""


def case_columns(source: WorkloadSource, config: StepConfig) -> dict[str, Any]:
    """Workload and settings, as the fields of `StepSettings`."""
    settings = {name: getattr(config, name) for name in settings_with(CASE)}
    for name in ("checkpointing", "fused", "graph"):
        if settings[name] in ("none", "off"):
            settings[name] = None  # as in rows from before there was a choice
    if not source.is_builtin:
        settings |= dict.fromkeys(("batch", "context", "loss"))
        for name in ("attention", "optimizer"):
            if settings[name] == getattr(StepConfig(), name):
                settings[name] = None  # what the model itself calls, and the workload makes
    return {"workload": source.name} | settings


@dataclass(frozen=True)
class StepMeasurement:
    """Results of one run of a case."""

    timing: Timing
    losses: tuple[float, ...]
    """Losses per step in the order they ran, warm-up included; empty in mode "forward"."""
    memory: MemoryPeaks | None
    """None for compiled code on a CPU, whose allocations cannot be followed."""
    optimizer_bytes: int
    """Bytes of optimizer state after the run."""
    tokens: int | None
    """Tokens per step; None where the batch does not tell."""
    flops: int | None
    """Model FLOPs per step: by formula for ours, counted for a user's workload; None where they can't be."""
    uncounted: tuple[str, ...]
    """Operators that are not in these, though they may be products."""
    device: torch.device
    gpu_state: Mapping[str, Scalar]
    """Clocks, power and throttling right after the last step."""
    batch_ms: Sequence[float] = ()
    """Milliseconds to make the batch after each step ready; empty where sustained, whose steps' times have that."""


def measure_step(
    source: WorkloadSource,
    config: StepConfig,
    mode: StepMode = "step",
    warmup: int = 5,
    steps: int = 10,
    *,
    sustained: bool = False,
) -> StepMeasurement:
    """Build the workload and measure its step: time, then memory on one more step."""
    return measure_training_step(build_step(source, config), source, mode, warmup, steps, sustained=sustained)


class BatchedStep:
    """Takes a step on a batch that is ready, then makes the next one ready: every step trains on another batch.

    Raises:
        UnsupportedError: our kernels would run in Triton's interpreter, whose times say nothing.
    """

    def __init__(self, step: TrainingStep, mode: StepMode = "step") -> None:
        config = step.config
        is_ours = config.attention == "flash-triton" or config.loss == "fused" or config.fused != "none"
        if is_ours and is_interpreted(step.device):
            raise UnsupportedError("Triton's interpreter runs our kernels here, and its times say nothing of a step's")
        self.step, self.mode, self.batch = step, mode, step.next_batch()
        self.losses: list[Tensor] = []
        """Losses per step; none in mode "forward"."""

    def run(self, phase: PhaseContext) -> None:
        """Take a step on the batch that is ready."""
        loss = self.step(self.batch, mode=self.mode, phase=phase)
        if loss is not None:
            self.losses.append(loss)

    def prepare_next(self, *_: object) -> None:
        """Make the next batch ready."""
        self.batch = self.step.next_batch()


def measure_training_step(
    step: TrainingStep, source: WorkloadSource, mode: StepMode, warmup: int, steps: int, *, sustained: bool = False
) -> StepMeasurement:
    """Measure a step that is already built; every step takes the next batch, so it trains as it goes.

    Raises:
        WrongError: making a batch changes weights or optimizer state.
    """
    runner = BatchedStep(step, mode)
    clock = device_clock(step.device)
    preparing = Preparing(runner.prepare_next, clock)
    if sustained:
        timing = time_window(runner.run, device=clock, warmup=warmup, steps=steps, after_step=runner.prepare_next)
    else:
        timing = time_steps(runner.run, device=clock, warmup=warmup, steps=steps, after_step=preparing)
    state = gpu_state(step.device)
    flops, uncounted = _count_flops(step, source, runner.batch, mode)
    memory = step_peaks(step, runner.batch, mode)
    check_batches_leave_weights(step, runner.batch, mode)
    return StepMeasurement(
        timing=timing,
        losses=tuple(map(float, runner.losses)),
        memory=memory,
        optimizer_bytes=sum(tensor.nbytes for tensor in optimizer_state_tensors(step.optimizer)),
        tokens=count_tokens(runner.batch),
        flops=flops,
        uncounted=uncounted,
        device=step.device,
        gpu_state=state,
        batch_ms=preparing.ms,
    )


def step_peaks(step: TrainingStep, batch: Any, mode: StepMode) -> MemoryPeaks | None:
    """The peaks of one more step; None for compiled code on a CPU, whose allocations cannot be followed."""
    if step.device.type == "cpu" and step.config.compile != "off":
        return None
    kept = [*step.module.parameters(), *step.module.buffers(), *optimizer_state_tensors(step.optimizer)]
    resident = [*kept, *tensors_of(batch)]
    if step.graph is not None:
        step(batch, mode=mode)
        before, by_phase = step.graph.memory()
        return MemoryPeaks(before, max(by_phase.values()), by_phase, {})
    caches: list[int] = []
    step.on_outputs = lambda outputs: caches.append(cache_bytes(outputs))
    with uncompiled() if step.device.type == "cpu" else nullcontext():
        found = step_memory(lambda phase: step(batch, mode=mode, phase=phase), step.device, resident)
    step.on_outputs = lambda outputs: None
    is_uncompiled = step.device.type == "cpu" and step.compiles_by_itself
    return dataclasses.replace(found, is_uncompiled=is_uncompiled, cache=max(caches, default=0))


def _count_flops(
    step: TrainingStep, source: WorkloadSource, batch: Any, mode: StepMode
) -> tuple[int | None, tuple[str, ...]]:
    """Model FLOPs, and the operators that are not among them."""
    if source.model is not None:
        return step_flops(source.model, step.config.batch, step.config.context, mode), ()
    if (step.config.compile, step.config.checkpointing, step.config.graph) != ("off", "none", "off"):
        return None, ()  # compiled code and graphs hide operators from the counter, checkpointed code runs some twice
    with uncompiled(), counted_flops() as count:
        step(batch, mode="forward" if mode == "forward" else "forward-backward")
    return count() or None, count.uncounted


def measured_fields(measurement: StepMeasurement, timing: Timing, precision: PrecisionName) -> dict[str, Any]:
    """The fields of `MeasuredStep` for one window of a measurement."""
    step_s = summarize([sample.wall_ms for sample in timing.samples]).median / 1e3
    spec = find_device(device_name(measurement.device))
    counted = None if measurement.uncounted else measurement.flops  # of a part, the rate would be too low
    achieved = None if counted is None else counted / step_s / 1e12
    return {
        "times": {name: Times.of(summarize(samples)) for name, samples in phase_samples(timing).items()},
        "n": len(timing.samples),
        "first_step_ms": timing.first.wall_ms,
        "tokens_per_s": None if measurement.tokens is None else measurement.tokens / step_s,
        "model_tflop": None if measurement.flops is None else measurement.flops / 1e12,
        "flops_uncounted": measurement.uncounted or None,
        "achieved_tflops": achieved,
        "utilisation": None if achieved is None or spec is None else achieved / spec.peak_tflops(precision),
        **memory_values(measurement.memory),
        "optimizer_state_gib": measurement.optimizer_bytes / GIB,
        **measurement.gpu_state,
    }


def memory_values(memory: MemoryPeaks | None) -> dict[str, Scalar]:
    """Peaks as columns, in GiB; no columns where they are unknown."""
    if memory is None:
        return {}
    phases = {f"{name}_peak_gib": peak / GIB for name, peak in memory.by_phase.items()}
    said: dict[str, Scalar] = {"uncompiled": True} if memory.is_uncompiled else {}
    said |= {"cache_gib": memory.cache / GIB} if memory.cache else {}
    return {"at_rest_gib": memory.before / GIB, "peak_gib": memory.peak / GIB, **phases, **said}


def phase_samples(timing: Timing) -> dict[str, list[float]]:
    """Milliseconds per step: the whole step (host clock), each phase, each phase's issue time, and the host's wait."""
    samples = timing.samples
    columns = {"step": [sample.wall_ms for sample in samples]}
    for name in samples[0].laps:
        columns[name] = [sample.laps[name].ms for sample in samples]
    if any(lap.device_ms is not None for lap in samples[0].laps.values()):
        for name in samples[0].laps:
            columns[f"{name}_issue"] = [sample.laps[name].host_ms for sample in samples]
        columns["wait"] = [sample.wait_ms for sample in samples]
    return columns


# The next batch, made ready between steps: timed apart from them, and not allowed to do a step's work.
#
# What a step leaves for when its next batch is asked for is outside of the step's time. So that time is a sample of its
# own, and weights and optimizer state must be bit for bit the same after it.
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
