"""`trainstep bench step`: phases, memory and throughput of one training step, case by case over a grid."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainstep.base.config import CASE, PHASES_OF_MODE, PhaseContext, StepConfig, StepMode, settings_with
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.hardware import find_device
from trainstep.base.precision import PrecisionName
from trainstep.base.stats import summarize
from trainstep.bench.cases import expand
from trainstep.bench.turns import is_interpreted
from trainstep.check.step import StepCheck, plain_form
from trainstep.check.verdict import Verdict
from trainstep.measure.environment import describe, device_name, gpu_state
from trainstep.measure.flops import counted_flops
from trainstep.measure.memory import GIB, MemoryPeaks, cache_bytes, step_memory
from trainstep.measure.outcome import Failure, WrongError, attempt, failed_row
from trainstep.measure.timing import DeviceClock, Timing, device_clock, time_steps, time_window
from trainstep.plan.flops import step_flops
from trainstep.rows import StepRow
from trainstep.rows.records import Scalar, Times
from trainstep.step.batches import count_tokens, tensors_of
from trainstep.step.training_step import TrainingStep, build_step, uncompiled
from trainstep.step.weights import optimizer_state_tensors
from trainstep.step.workload import WorkloadSource, resolve_device

WARMUP = 2
"""Steps before the one whose memory is measured: the optimizer has its state and libraries their workspaces."""


@dataclass(frozen=True)
class StepCase:
    """A cell of the grid."""

    source: WorkloadSource
    config: StepConfig
    mode: StepMode = "step"
    warmup: int = 5
    steps: int = 10
    repeat: int = 0
    """Number of the pass over the grid, from 0."""
    sustained: bool = False
    """Timed without a synchronisation between steps."""

    def columns(self) -> dict[str, Any]:
        """The settings of the case's row."""
        own = {"mode": self.mode, "warmup": self.warmup, "steps": self.steps, "repeat": self.repeat}
        timing = {"timing": "sustained"} if self.sustained else {}
        return case_columns(self.source, self.config) | own | timing


def case_columns(source: WorkloadSource, config: StepConfig) -> dict[str, Any]:
    """Workload and settings, as the fields of `StepSettings`."""
    settings = {name: getattr(config, name) for name in settings_with(CASE)}
    for name in ("checkpointing", "fused"):
        if settings[name] == "none":
            settings[name] = None  # as in rows from before there was a choice
    if not source.is_builtin:
        settings |= dict.fromkeys(("batch", "context", "loss"))
        for name in ("attention", "optimizer"):
            if settings[name] == getattr(StepConfig(), name):
                settings[name] = None  # what the model itself calls, and the workload makes
    return {"workload": source.name} | settings


def step_cases(
    sources: Sequence[WorkloadSource],
    axes: Mapping[str, Sequence[Any]],
    *,
    modes: Sequence[StepMode] = ("step",),
    warmups: Sequence[int] = (5,),
    steps: int = 10,
    repeat: int = 1,
    sustained: bool = False,
) -> list[StepCase]:
    """Every combination of workloads, `StepConfig` axes, modes and warm-ups, `repeat` times over.

    Passes over the grid follow one another (A B A B), so that a drift of the machine reaches every case alike.
    """
    if not sources or steps < 1 or repeat < 1 or not warmups or min(warmups) < 0:
        raise UsageError(
            f"nothing to run: {len(sources)} workloads, steps {steps}, repeat {repeat}, warm-ups {list(warmups)}; "
            "expected at least one workload, one step and one pass, and warm-ups of 0 or more"
        )
    points = itertools.product(range(repeat), sources, expand(axes), modes, warmups)
    return [
        StepCase(source, StepConfig(**values), mode, warmup, steps, index, sustained)
        for index, source, values, mode, warmup in points
    ]


Judged = dict[tuple[WorkloadSource, StepConfig], Verdict | Failure]


def run_cases(cases: Iterable[StepCase], *, check: bool = True, judge: StepCheck | None = None) -> Iterator[StepRow]:
    """Measure case by case and yield each row when it is known; a case that fails, or is wrong, is a row too.

    Neighbours that differ only in their warm-up share one run: each row is the window of it that such a case would have
    been, first step included for a warm-up of 0. Before a configuration is first timed it is judged beside the plain
    step of its workload (`check.step`), and with it all others of the grid that have the same plain step. `judge` does
    that for those whose plain step is its own. With a warm-up of 0 the check comes after the run, as it would warm the
    process. Only the first run of a process has a cold first step, so `bench step` gives every such case a process.
    """
    every = list(cases)
    verdicts: Judged = {}
    for _, group in itertools.groupby(every, key=lambda case: dataclasses.replace(case, warmup=0)):
        alike = list(group)
        run = max(alike, key=lambda case: case.warmup)
        key = run.source, run.config
        measure = partial(
            measure_step, run.source, run.config, run.mode, run.warmup, run.steps, sustained=run.sustained
        )
        is_cold = key not in verdicts and any(case.warmup == 0 for case in alike)
        before = attempt(measure) if is_cold else None
        if check and key not in verdicts:
            verdicts |= _judge_alike(run, every, judge)
        found = verdicts.get(key)
        is_wrong = isinstance(found, Verdict) and not found.is_right
        if is_wrong:
            before = Failure("wrong", str(found))
        result = attempt(measure) if before is None else before
        for case in alike:
            yield _record(case, result, found)


def _judge_alike(
    case: StepCase, cases: Sequence[StepCase], judge: StepCheck | None
) -> dict[tuple[WorkloadSource, StepConfig], Verdict | Failure]:
    """Verdicts on all configurations of the grid whose plain step is that of `case`, so that it is taken once."""
    plain = plainest(case.config)
    if judge is None or (judge.source, judge.plain) != (case.source, plain):
        judge = StepCheck(case.source, plain)
    alike = [each.config for each in cases if each.source == case.source and plainest(each.config) == plain]
    return {(case.source, config): attempt(partial(judge.judge, config)) for config in dict.fromkeys(alike)}


def plainest(config: StepConfig) -> StepConfig:
    """Plain form that a step is checked beside: nothing is computed twice."""
    return dataclasses.replace(plain_form(config), checkpointing="none")


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
    step: TrainingStep,
    source: WorkloadSource,
    mode: StepMode,
    warmup: int,
    steps: int,
    *,
    sustained: bool = False,
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
    if step.config.compile != "off" or step.config.checkpointing != "none":
        return None, ()  # compiled code hides its operators from the counter, checkpointed code runs some of them twice
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


def _record(case: StepCase, result: StepMeasurement | Failure, judged: Verdict | Failure | None) -> StepRow:
    environment = describe(resolve_device(case.config.device))
    check: dict[str, Any] = {"not_checked": "not asked for"}
    if isinstance(judged, Failure):
        check = {"not_checked": f"{judged.status}: {judged.reason}"}
    elif judged is not None:
        check = judged.columns()
    if isinstance(result, Failure):
        return dataclasses.replace(failed_row(StepRow, case.columns(), result, environment), **check)
    window = result.timing.window(case.warmup, case.steps)
    assert set(window.samples[0].laps) == set(PHASES_OF_MODE[case.mode]), "a phase went unmeasured"
    fields = measured_fields(result, window, case.config.precision)
    samples: dict[str, Sequence[float]] = dict(phase_samples(window))
    if batch_ms := result.batch_ms[case.warmup : case.warmup + case.steps]:
        samples["batch"] = batch_ms
        fields["times"]["batch"] = Times.of(summarize(batch_ms), spread=False)
    if result.losses:
        samples["training_loss"] = result.losses
    return StepRow(
        **case.columns(),
        **fields,
        **check,
        samples=samples,
        environment=environment,
    )


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
