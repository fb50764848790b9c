"""The ladder: from the plain fp32 step upwards, one change per rung, each rung checked before it is timed.

The first rung that fits is the reference. Every later rung is rebuilt from the same seed, computes loss and gradients
of the same first batch, and must stay within its error budget; only then is it timed, over the same following batches.
A rung that is wrong or slower says so and is not built upon; one that is faster, or no slower and smaller, is.

The error budget is that of rounding, not of taste. A network with N elementary operations per weight, each rounding
with unit roundoff u, has a relative error of about u·√N when the roundings are independent (Higham & Mary 2019), and
the reference has its own. That bound admits a new precision. Once plain PyTorch has shown its error in a precision,
later rungs in it may make twice that, plus one rounding. A gradient that is wrong in kind is off by about 1.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.bench.outcome import Failure, attempt
from trainstep.bench.step import StepMeasurement, case_columns, measure_training_step, phase_samples, timing_values
from trainstep.config import Precision, StepConfig
from trainstep.measure.environment import describe
from trainstep.measure.stats import Ratio, ratio_of_medians, summarize, verdict
from trainstep.report.noise_findings import WILD_INTERVAL
from trainstep.report.records import Record, Scalar
from trainstep.training_step import TrainingStep, build_step
from trainstep.workload import WorkloadSource, resolve_device

UNIT_ROUNDOFF: Mapping[Precision, float] = {
    "fp32": 2.0**-24,
    "tf32": 2.0**-11,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "bf16-pure": 2.0**-8,
}
"""Half the spacing of numbers near 1, in the format that matmul inputs are rounded to."""

ROUNDINGS_PER_MODULE = 3
"""Each leaf module rounds in forward and in backward, for its input's gradient and for its weight's."""

WRONG_IN_KIND = 0.5
"""A single parameter's gradient off by this much is another gradient, in any precision. Gradients that the mathematics
makes zero, such as that of a key projection's bias, are nothing but rounding: see `compare_gradients`."""


@dataclass(frozen=True)
class Rung:
    """One change to the configuration kept so far."""

    name: str
    change: Mapping[str, Any]
    """`StepConfig` fields and their new values."""


def rungs_for(source: WorkloadSource, device: torch.device) -> list[Rung]:
    """The changes worth trying on this device, cheapest to adopt first."""
    on_gpu = device.type == "cuda"
    precision = [Rung("TF32 matmuls", {"precision": "tf32"})] if on_gpu else []
    precision += [Rung("bf16 autocast", {"precision": "bf16"})]
    fused_attention = [Rung("fused attention", {"attention": "sdpa"})] if source.is_builtin else []
    if on_gpu:
        fused_attention += [Rung("our FlashAttention", {"attention": "flash-triton"})]
    fused_optimizer = [Rung("fused optimizer", {"optimizer": "adamw-fused"})]
    compiled = [Rung("compiled blocks", {"compile": "blocks"}), Rung("compiled model", {"compile": "model"})]
    chunked = [Rung("chunked loss", {"loss": "chunked"})] if source.is_builtin else []
    if on_gpu:
        return precision + fused_attention + fused_optimizer + compiled + chunked
    return fused_attention + fused_optimizer + precision + compiled[:1] + chunked


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one batch, on the host, in float32."""

    loss: float
    by_name: Mapping[str, Tensor]


@dataclass(frozen=True)
class Deviation:
    """How far a rung's loss and gradients are from the reference's, relative."""

    loss: float
    gradient: float
    """‖g − g_ref‖ / ‖g_ref‖ over all parameters."""
    worst: float
    """The same for the parameter where it is largest."""
    worst_name: str


@dataclass(frozen=True)
class Climbed:
    """One rung that ran."""

    config: StepConfig
    measurement: StepMeasurement
    deviation: Deviation
    budget: float
    check_s: float
    """Seconds of the first forward and backward, compilation included."""

    @property
    def is_right(self) -> bool:
        """Whether loss and gradients stay within the budget."""
        return (
            self.deviation.loss <= self.budget
            and self.deviation.gradient <= self.budget
            and self.deviation.worst <= max(WRONG_IN_KIND, self.budget)
        )

    @property
    def wall_ms(self) -> list[float]:
        """The timed steps."""
        return [sample.wall_ms for sample in self.measurement.timing.samples]

    @property
    def is_unsteady(self) -> bool:
        """Whether the median's interval is so wide that something else must have run."""
        summary = summarize(self.wall_ms)
        return summary.interval is not None and (
            summary.interval.high - summary.interval.low > WILD_INTERVAL * summary.median
        )


def climb(source: WorkloadSource, base: StepConfig, *, warmup: int = 3, steps: int = 10) -> Iterator[Record]:
    """Climb from `base` and yield a row of kind "rung" for every rung, the first included.

    Last comes a row of kind "control": the first rung measured once more. Its ratio to itself should contain 1; if it
    does not, the machine changed during the climb, and the report says so.
    """
    device = resolve_device(base.device)
    ladder = _Ladder(source, device, warmup, steps)
    for rung in [Rung("baseline", {}), *rungs_for(source, device)]:
        yield ladder.try_rung(rung, dataclasses.replace(ladder.kept.config if ladder.kept else base, **rung.change))
    if ladder.first is not None:
        yield ladder.control(ladder.first)


class _Ladder:
    """What the climb remembers: the reference, the errors plain PyTorch showed, and the best rung so far."""

    def __init__(self, source: WorkloadSource, device: torch.device, warmup: int, steps: int) -> None:
        self.source, self.device, self.warmup, self.steps = source, device, warmup, steps
        self.reference: Gradients | None = None
        self.reference_precision: Precision = "fp32"
        self.leaf_calls = 0
        self.plain_error: dict[Precision, float] = {}
        self.first: Climbed | None = None
        self.kept: Climbed | None = None

    def try_rung(self, rung: Rung, config: StepConfig) -> Record:
        case = {"rung": rung.name} | case_columns(self.source, config)
        environment = describe(self.device)
        result, attempts = attempt(partial(self._measure, config)), 1
        if isinstance(result, Climbed) and result.is_right and result.is_unsteady:
            result, attempts = attempt(partial(self._measure, config)), 2  # which counts, whatever it finds
        if isinstance(result, Failure):
            values: dict[str, Scalar] = {"verdict": result.status, "kept": False}
            return Record("rung", case, values, status=result.status, reason=result.reason, environment=environment)
        if not result.is_right:
            values = _deviation_values(result) | {"verdict": "wrong", "kept": False}
            reason = (
                f"off by {result.deviation.gradient:.2g} in the gradients, {result.deviation.loss:.2g} in the loss and "
                f"{result.deviation.worst:.2g} in {result.deviation.worst_name}; the budget is {result.budget:.2g}"
            )
            return Record("rung", case, values, status="wrong", reason=reason, environment=environment)
        values = self._judge(result) | {"attempts": attempts}
        samples = phase_samples(result.measurement.timing) | {"training_loss": result.measurement.losses}
        return Record("rung", case, values, samples, environment=environment)

    def control(self, first: Climbed) -> Record:
        """The first rung again, at the end of the climb."""
        case, environment = case_columns(self.source, first.config), describe(self.device)
        again = attempt(partial(self._measure, first.config))
        if isinstance(again, Failure):
            return Record("control", case, status=again.status, reason=again.reason, environment=environment)
        ratio = ratio_of_medians(again.wall_ms, first.wall_ms)
        medians = {"first_ms": statistics.median(first.wall_ms), "again_ms": statistics.median(again.wall_ms)}
        values = medians | _ratio_values("ratio", ratio)
        return Record("control", case, values, {"step": again.wall_ms}, environment=environment)

    def _measure(self, config: StepConfig) -> Climbed:
        step = build_step(self.source, config)
        start = time.perf_counter()
        deviation, budget = self._check(step)
        check_s = time.perf_counter() - start
        measurement = measure_training_step(step, self.source, "step", self.warmup, self.steps)
        return Climbed(config, measurement, deviation, budget, check_s)

    def _check(self, step: TrainingStep) -> tuple[Deviation, float]:
        """Loss and gradients of the first batch against the reference, which the first rung that fits becomes."""
        batch, precision = step.next_batch(), step.config.precision
        plain_error = self.plain_error.get(precision)
        if self.reference is None:
            with _LeafCalls(step.module) as calls:
                loss = float(step.gradients(batch))
            self.reference = Gradients(loss, _gradients_on_host(step.module))
            self.reference_precision, self.leaf_calls = precision, calls.count
            budget = error_budget(precision, precision, self.leaf_calls, plain_error)
            deviation = Deviation(0.0, 0.0, 0.0, "")
        else:
            loss = float(step.gradients(batch))
            budget = error_budget(precision, self.reference_precision, self.leaf_calls, plain_error)
            deviation = compare_gradients(self.reference, loss, step.module, rounding=budget)
        step.optimizer.zero_grad(set_to_none=True)
        if precision != self.reference_precision:
            self.plain_error.setdefault(precision, deviation.gradient)
        return deviation, budget

    def _judge(self, rung: Climbed) -> dict[str, Scalar]:
        """The rung's row; it becomes the one to build upon if it is faster, or no slower and smaller."""
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
        values = timing_values(rung.measurement, rung.measurement.timing, rung.config.precision)
        return (
            values
            | _ratio_values("speedup", total)
            | _ratio_values("gain", gain)
            | _deviation_values(rung)
            | {"verdict": called, "kept": keep, "check_s": rung.check_s}
        )


def _is_smaller(rung: Climbed, than: Climbed) -> bool:
    """Whether the rung's peak is known and at least 2 % lower."""
    own, other = rung.measurement.memory, than.measurement.memory
    return own is not None and other is not None and own.peak < 0.98 * other.peak


def error_budget(precision: Precision, reference: Precision, leaf_calls: int, plain_error: float | None) -> float:
    """The relative error that a right computation may show against the reference.

    Args:
        precision: of the rung.
        reference: precision of the reference.
        leaf_calls: leaf modules run in one forward pass.
        plain_error: the error that the first rung in this precision made, once there is one.
    """
    unit = UNIT_ROUNDOFF[precision]
    if plain_error is not None:
        return 2 * plain_error + 2 * unit
    return (unit + UNIT_ROUNDOFF[reference]) * math.sqrt(ROUNDINGS_PER_MODULE * max(leaf_calls, 1))


def compare_gradients(reference: Gradients, loss: float, module: nn.Module, rounding: float = 0.0) -> Deviation:
    """Deviation of `loss` and of the module's `.grad`s; a gradient that is missing on one side only counts as 1.

    Args:
        reference: what is right.
        loss: of `module`.
        module: its gradients are compared.
        rounding: the relative error that rounding makes. A parameter's error is held against the norm of its gradient,
            or against `rounding` times the norm of as many typical elements, where that is more: sums that cancel to
            zero leave only rounding, and no two computations agree on that.
    """
    square_error = square_norm = 0.0
    worst, worst_name = 0.0, ""
    elements = sum(gradient.numel() for gradient in reference.by_name.values())
    squares = sum(float(_norm(gradient)) ** 2 for gradient in reference.by_name.values())
    typical = math.sqrt(squares / elements) if elements else 0.0
    own = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    for name in reference.by_name.keys() | own.keys():
        expected, found = reference.by_name.get(name), own.get(name)
        if expected is None or found is None:
            error = norm = size = float(_norm(expected if found is None else found))  # type: ignore[arg-type]
        else:
            on_device = expected.to(found.device)
            error, norm = float(_norm(found.float() - on_device)), float(_norm(on_device))
            size = max(norm, rounding * typical * math.sqrt(expected.numel()))
        square_error += error**2
        square_norm += norm**2
        relative = error / size if size else (math.inf if error else 0.0)
        if relative > worst or math.isnan(relative):
            worst, worst_name = relative, name
    total = math.sqrt(square_error / square_norm) if square_norm else math.inf
    loss_error = abs(loss - reference.loss) / abs(reference.loss) if reference.loss else abs(loss)
    return Deviation(loss_error, total, worst, worst_name)


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64 if tensor.device.type == "cpu" else torch.float32)


def _gradients_on_host(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.to("cpu", torch.float32, copy=True)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


class _LeafCalls:
    """Counts calls of leaf modules while it is entered."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self._leaves = [leaf for leaf in module.modules() if not any(True for _ in leaf.children())]

    def __enter__(self) -> _LeafCalls:
        self._handles = [leaf.register_forward_hook(self._seen) for leaf in self._leaves]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _seen(self, *call: object) -> None:
        self.count += 1


def _ratio_values(name: str, ratio: Ratio) -> dict[str, Scalar]:
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}


def _deviation_values(rung: Climbed) -> dict[str, Scalar]:
    return {
        "loss_error": rung.deviation.loss,
        "gradient_error": rung.deviation.gradient,
        "worst_gradient_error": rung.deviation.worst,
        "worst_parameter": rung.deviation.worst_name,
        "error_budget": rung.budget,
    }
