"""The ladder: from the plain fp32 step upwards, one change per rung, each rung checked before it is timed.

The first rung that fits is the reference. Every later rung is rebuilt from the same seed, computes loss and gradients
of the same first batch, and must stay within its error budget; only then is it timed, over the same following batches.
A rung that is wrong or slower says so and is not built upon; one that is faster, or no slower and smaller, is.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainstep.bench.check.step import GradientCheck, Verdict
from trainstep.bench.outcome import Failure, attempt, failed_row
from trainstep.bench.step import StepMeasurement, case_columns, measure_training_step, measured_fields, phase_samples
from trainstep.config import OptimizerImpl, StepConfig
from trainstep.kinds import ControlRow, RungRow
from trainstep.measure.environment import describe
from trainstep.stats import RUN_SPREAD, WILD_INTERVAL, Ratio, ratio_of_medians, summarize, verdict
from trainstep.training_step import build_step
from trainstep.workload import WorkloadSource, resolve_device


@dataclass(frozen=True)
class Rung:
    """One change to the configuration kept so far."""

    name: str
    change: Mapping[str, Any]
    """`StepConfig` fields and their new values."""


def rungs_for(source: WorkloadSource, device: torch.device, optimizer: OptimizerImpl) -> list[Rung]:
    """The changes worth trying on this device, cheapest to adopt first, from a step with this optimizer.

    They change how the step is computed, not what is: SGD has no fused form here, and AdamW is not one.
    """
    on_gpu = device.type == "cuda"
    precision = [Rung("TF32 matmuls", {"precision": "tf32"})] if on_gpu else []
    precision += [Rung("bf16 autocast", {"precision": "bf16"})]
    fused_attention = [Rung("fused attention", {"attention": "sdpa"})] if source.is_builtin else []
    fused_attention += [Rung("our FlashAttention", {"attention": "flash-triton"})] if on_gpu else []
    fused_optimizer = [Rung("fused optimizer", {"optimizer": "adamw-fused"})] if optimizer != "sgd" else []
    compiled = [Rung("compiled blocks", {"compile": "blocks"}), Rung("compiled model", {"compile": "model"})]
    chunked = [Rung("chunked loss", {"loss": "chunked"})] if source.is_builtin else []
    if on_gpu:
        return precision + fused_attention + fused_optimizer + compiled + chunked
    return fused_attention + fused_optimizer + precision + compiled[:1] + chunked


@dataclass(frozen=True)
class Climbed:
    """One rung that ran."""

    config: StepConfig
    measurement: StepMeasurement
    check: Verdict
    check_s: float
    """Seconds of the first forward and backward, compilation included."""

    @property
    def wall_ms(self) -> list[float]:
        """The timed steps."""
        return [sample.wall_ms for sample in self.measurement.timing.samples]

    @property
    def is_unsteady(self) -> bool:
        """Whether the median's interval is so wide that something else must have run."""
        found = summarize(self.wall_ms)
        return found.interval is not None and found.interval.high - found.interval.low > WILD_INTERVAL * found.median


def climb(
    source: WorkloadSource, base: StepConfig, *, warmup: int = 3, steps: int = 10
) -> Iterator[RungRow | ControlRow]:
    """Climb from `base` and yield a row of kind "rung" for every rung, the first included.

    Last comes a row of kind "control": the first rung measured once more. Its ratio to itself should contain 1; if it
    does not, the machine changed during the climb, and the report says so.
    """
    device = resolve_device(base.device)
    ladder = _Ladder(source, device, warmup, steps)
    for rung in [Rung("baseline", {}), *rungs_for(source, device, base.optimizer)]:
        yield ladder.try_rung(rung, dataclasses.replace(ladder.kept.config if ladder.kept else base, **rung.change))
    if ladder.first is not None:
        yield ladder.control(ladder.first)


class _Ladder:
    """What the climb remembers: what is right, and the best rung so far."""

    def __init__(self, source: WorkloadSource, device: torch.device, warmup: int, steps: int) -> None:
        self.source, self.device, self.warmup, self.steps = source, device, warmup, steps
        self.gradients = GradientCheck(source)
        self.first: Climbed | None = None
        self.kept: Climbed | None = None

    def try_rung(self, rung: Rung, config: StepConfig) -> RungRow:
        case = {"rung": rung.name} | case_columns(self.source, config)
        environment = describe(self.device)
        result, attempts = attempt(partial(self._measure, config)), 1
        if isinstance(result, Climbed) and result.check.is_right and result.is_unsteady:
            result, attempts = attempt(partial(self._measure, config)), 2  # which counts, whatever it finds
        if isinstance(result, Failure):
            return dataclasses.replace(failed_row(RungRow, case, result, environment), verdict=result.status)
        check, off, measurement = result.check, result.check.deviation, result.measurement
        row = partial(
            RungRow,
            **case,
            loss_error=off.loss,
            gradient_error=off.gradient,
            worst_gradient_error=off.worst,
            worst_parameter=off.worst_name,
            error_budget=check.budget,
            compared=None if check.compared == "as it is" else check.compared,
            environment=environment,
        )
        if not check.is_right:
            reason = (
                f"off by {off.gradient:.2g} in the gradients, {off.loss:.2g} in the loss and {off.worst:.2g} in "
                f"{off.worst_name}; the budget is {check.budget:.2g}"
            )
            return row(verdict="wrong", kept=False, status="wrong", reason=reason)
        return row(
            **measured_fields(measurement, measurement.timing, config.precision),
            **self._judge(result),
            check_s=result.check_s,
            attempts=attempts,
            samples=phase_samples(measurement.timing) | {"training_loss": measurement.losses},
        )

    def control(self, first: Climbed) -> ControlRow:
        """The first rung again, at the end of the climb."""
        case, environment = case_columns(self.source, first.config), describe(self.device)
        again = attempt(partial(self._measure, first.config))
        if isinstance(again, Failure):
            return failed_row(ControlRow, case, again, environment)
        return ControlRow(
            **case,
            first_ms=statistics.median(first.wall_ms),
            again_ms=statistics.median(again.wall_ms),
            **_ratio_fields("ratio", ratio_of_medians(again.wall_ms, first.wall_ms)),
            samples={"step": again.wall_ms},
            environment=environment,
        )

    def _measure(self, config: StepConfig) -> Climbed:
        step = build_step(self.source, config)
        start = time.perf_counter()
        check = self.gradients.check(step)
        check_s = time.perf_counter() - start
        measurement = measure_training_step(step, self.source, "step", self.warmup, self.steps)
        return Climbed(config, measurement, check, check_s)

    def _judge(self, rung: Climbed) -> dict[str, Any]:
        """What it brings; it becomes the rung to build upon if it is faster, or no slower and smaller."""
        self.first = self.first or rung
        total = gain = Ratio(1.0, None)
        called, keep = "baseline", True
        if self.kept is not None:
            total = ratio_of_medians(self.first.wall_ms, rung.wall_ms)
            gain = ratio_of_medians(self.kept.wall_ms, rung.wall_ms)
            called = verdict(gain)
            no_slower = called == "inconclusive" and gain.interval is not None
            keep = called == "faster" or (no_slower and _is_smaller(rung, self.kept))
        if keep:
            self.kept = rung
        return {**_ratio_fields("speedup", total), **_ratio_fields("gain", gain), "verdict": called, "kept": keep}


def _is_smaller(rung: Climbed, than: Climbed) -> bool:
    """Whether the rung's peak is known and lower by more than runs differ."""
    own, other = rung.measurement.memory, than.measurement.memory
    return own is not None and other is not None and own.peak < (1 - RUN_SPREAD) * other.peak


def _ratio_fields(name: str, ratio: Ratio) -> dict[str, Any]:
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}
