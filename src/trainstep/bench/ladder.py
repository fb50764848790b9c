"""The ladder: from the plain step upwards, one change per rung, each rung checked before it is timed.

Every rung is rebuilt from the same seed and judged beside the plain step (`check.step`): in float32, in its own
precision, with initial and with trained weights, and by its updates. Only what is right is timed, over the same
batches. A rung that is faster is built upon, and one that is smaller if it is certainly not much slower (`NO_SLOWER`).

Times of a quiet minute and of a disturbed one cannot be compared. Where the first samples of a rung or of the one it
is held against scatter, or their ratio has a wide interval that decides nothing, both are measured once more, one after
the other, and all samples count. A rung that was not kept is tried once more on the top, where it may bring what it did
not bring below. Last, the first rung and the top are measured again, as controls.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from trainstep.bench.check.step import StepCheck, Verdict, plain_form
from trainstep.bench.outcome import Failure, attempt, failed_row
from trainstep.bench.step import StepMeasurement, case_columns, measure_training_step, measured_fields, phase_samples
from trainstep.config import OptimizerImpl, StepConfig
from trainstep.kinds import ControlRow, RungRow
from trainstep.measure.environment import describe
from trainstep.measure.timing import Sample, Timing
from trainstep.stats import RUN_SPREAD, Ratio, ratio_of_medians, summarize, verdict
from trainstep.training_step import build_step
from trainstep.workload import WorkloadSource, resolve_device

NO_SLOWER = 0.98
"""A change that saves memory is kept where the whole interval of its gain is above this."""

NOISY = 0.08
"""A median, or a gain that is undecided, with an interval wider than this part of it is measured again."""


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


@dataclass
class Climbed:
    """One rung that was judged, and timed if it is right."""

    config: StepConfig
    check: Verdict
    check_s: float
    """Seconds of the check, compilation included."""
    runs: list[StepMeasurement] = field(default_factory=list)

    @property
    def wall_ms(self) -> list[float]:
        """The timed steps of all runs."""
        return [sample.wall_ms for run in self.runs for sample in run.timing.samples]

    @property
    def is_noisy(self) -> bool:
        """Whether the median's interval is wide."""
        found = summarize(self.wall_ms)
        return found.interval is not None and found.interval.high - found.interval.low > NOISY * found.median


def climb(
    source: WorkloadSource, base: StepConfig, *, warmup: int = 3, steps: int = 10
) -> Iterator[RungRow | ControlRow]:
    """Climb from `base` and yield a row of kind "rung" for every rung, the first included.

    Last come rows of kind "control": the first rung and the top measured once more. Their ratios to themselves should
    contain 1; if they do not, the machine changed during the climb, and the report says so.
    """
    device = resolve_device(base.device)
    ladder = _Ladder(source, base, device, warmup, steps)
    rungs = rungs_for(source, device, base.optimizer)
    for rung in [Rung("baseline", {}), *rungs]:
        yield ladder.try_rung(rung)
    for rung in rungs:
        if ladder.is_worth_another_try(rung):
            yield ladder.try_rung(Rung(f"{rung.name}, on the top", rung.change))
    if ladder.first is not None and ladder.kept is not None:
        yield ladder.control(ladder.first)
        if ladder.kept is not ladder.first:
            yield ladder.control(ladder.kept)


class _Ladder:
    """What the climb remembers: what is right, the best rung so far, and what each change was tried on."""

    def __init__(self, source: WorkloadSource, base: StepConfig, device: torch.device, warmup: int, steps: int) -> None:
        self.source, self.base, self.device, self.warmup, self.steps = source, base, device, warmup, steps
        self.judge = StepCheck(source, plain_form(base))
        self.first: Climbed | None = None
        self.kept: Climbed | None = None
        self._left: dict[str, StepConfig] = {}
        """Rungs that ran and were not kept, with the configuration they were tried on."""

    def try_rung(self, rung: Rung) -> RungRow:
        before = self.kept.config if self.kept else self.base
        config = dataclasses.replace(before, **rung.change)
        case = {"rung": rung.name} | case_columns(self.source, config)
        environment = describe(self.device)
        result = attempt(partial(self._checked, config))
        row = partial(RungRow, **case, environment=environment)
        if isinstance(result, Failure):
            return dataclasses.replace(failed_row(RungRow, case, result, environment), verdict=result.status)
        if not result.check.is_right:
            return row(**result.check.columns(), verdict="wrong", kept=False, status="wrong", reason=str(result.check))
        judged = self._compare(result)
        if not judged["kept"]:
            self._left[rung.name] = before
        last = result.runs[-1]
        return row(
            **result.check.columns(),
            **measured_fields(last, Timing(_all_steps(result), 0), config.precision)
            | {"first_step_ms": result.runs[0].timing.first.wall_ms},
            **judged,
            check_s=result.check_s,
            attempts=len(result.runs),
            samples=_samples(result),
        )

    def is_worth_another_try(self, rung: Rung) -> bool:
        """Whether it ran, was not kept, and something else was kept since that it would not undo."""
        before, now = self._left.get(rung.name), self.kept.config if self.kept else None
        return before not in (None, now) and all(getattr(before, name) == getattr(now, name) for name in rung.change)

    def control(self, first: Climbed) -> ControlRow:
        """A rung again, at the end of the climb."""
        case, environment = case_columns(self.source, first.config), describe(self.device)
        again = attempt(partial(self._timed, first.config))
        if isinstance(again, Failure):
            return failed_row(ControlRow, case, again, environment)
        samples = [sample.wall_ms for sample in again.timing.samples]
        return ControlRow(
            **case,
            first_ms=statistics.median(first.wall_ms),
            again_ms=statistics.median(samples),
            **_ratio_fields("ratio", ratio_of_medians(samples, first.wall_ms)),
            samples={"step": samples},
            environment=environment,
        )

    def _checked(self, config: StepConfig) -> Climbed:
        start = time.perf_counter()
        step, check = self.judge.start(config)
        found = Climbed(config, check, time.perf_counter() - start)
        if check.is_right:
            found.runs.append(measure_training_step(step, self.source, "step", self.warmup, self.steps))
            start = time.perf_counter()
            found.check = self.judge.end(step, check)
            found.check_s += time.perf_counter() - start
        return found

    def _timed(self, config: StepConfig) -> StepMeasurement:
        return measure_training_step(build_step(self.source, config), self.source, "step", self.warmup, self.steps)

    def _compare(self, rung: Climbed) -> dict[str, Any]:
        """What it brings; it becomes the rung to build upon if it is faster, or smaller and certainly not slower."""
        if self.kept is None or self.first is None:
            self.first = self.kept = rung
            one = Ratio(1.0, None)
            return {**_ratio_fields("speedup", one), **_ratio_fields("gain", one), "verdict": "baseline", "kept": True}
        gain = ratio_of_medians(self.kept.wall_ms, rung.wall_ms)
        if _is_open(gain) or self.kept.is_noisy or rung.is_noisy:
            for each in (self.kept, rung):
                again = attempt(partial(self._timed, each.config))
                if not isinstance(again, Failure):
                    each.runs.append(again)
            gain = ratio_of_medians(self.kept.wall_ms, rung.wall_ms)
        total, called = ratio_of_medians(self.first.wall_ms, rung.wall_ms), verdict(gain)
        no_slower = gain.interval is not None and gain.interval.low >= NO_SLOWER
        keep = called == "faster" or (no_slower and _is_smaller(rung, self.kept))
        if keep:
            self.kept = rung
        return {**_ratio_fields("speedup", total), **_ratio_fields("gain", gain), "verdict": called, "kept": keep}


def _is_open(gain: Ratio) -> bool:
    """Whether more samples may find a difference; a narrow interval around 1 says that there is none."""
    found = gain.interval
    return found is not None and verdict(gain) == "inconclusive" and found.high - found.low > NOISY * gain.value


def _is_smaller(rung: Climbed, than: Climbed) -> bool:
    """Whether the rung's peak is known and lower by more than runs differ."""
    own, other = rung.runs[0].memory, than.runs[0].memory
    return own is not None and other is not None and own.peak < (1 - RUN_SPREAD) * other.peak


def _all_steps(rung: Climbed) -> tuple[Sample, ...]:
    return tuple(sample for run in rung.runs for sample in run.timing.samples)


def _samples(rung: Climbed) -> dict[str, Sequence[float]]:
    """Phases of all runs; losses of the first, whose batches are those of every rung's."""
    return phase_samples(Timing(_all_steps(rung), 0)) | {"training_loss": rung.runs[0].losses}


def _ratio_fields(name: str, ratio: Ratio) -> dict[str, Any]:
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}
