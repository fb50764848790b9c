"""Checks a step's loss and gradients against those of the same batch in the first step that fits.

The budget is the error that rounding explains. A network with N elementary operations per weight, each rounding
with unit roundoff u, has a relative error of about u·√N when the roundings are independent (Higham & Mary 2019), and
the reference has its own. That bound admits a new precision. Once plain PyTorch has shown its error in a precision,
later steps in it may make twice that, plus one rounding. A gradient that is wrong in kind is off by about 1.

That bound takes the network to pass errors on as they are. Some enlarge them: through batch normalisation over a small
batch, one rounding of the weights to bf16 moves the gradients by a fifth. So a gradient over the budget is held against
the model's own condition: how far the reference's gradients move when its weights are rounded at random to the
precision at hand. A computation is stable if it is as far off as an exact one on rounded inputs (Higham 2002, section
1.5). The loss keeps the first bound.

A model with dropout has other gradients under other masks. Compiled code draws other random numbers than eager code, so
compiled code over the budget is compiled once more for the check alone, with eager code's numbers. On a GPU another
precision draws other masks: what is over the budget still is compared without dropout, on both sides. A verdict says
how it was arrived at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from trainstep.bench.check import accumulated_rounding, allowed_error, one_rounding
from trainstep.bench.check.dropout import eager_random, without_dropout
from trainstep.config import StepConfig
from trainstep.errors import UsageError
from trainstep.precision import PRECISIONS, PrecisionName
from trainstep.training_step import TrainingStep, build_step
from trainstep.workload import WorkloadSource

ROUNDINGS_PER_MODULE = 3
"""Each leaf module rounds in forward and in backward, for its input's gradient and for its weight's."""

WRONG_IN_KIND = 0.5
"""A single parameter's gradient off by this much is another gradient, in any precision. Gradients that the mathematics
makes zero, such as that of a key projection's bias, are nothing but rounding: see `compare_gradients`."""

Compared = Literal["as it is", "with eager code's random numbers", "without dropout"]
"""How a step was held against the reference."""


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one batch, on the host, in float32."""

    loss: float
    by_name: Mapping[str, Tensor]


@dataclass(frozen=True)
class Deviation:
    """How far loss and gradients are from the reference's, relative."""

    loss: float
    gradient: float
    """‖g − g_ref‖ / ‖g_ref‖ over all parameters."""
    worst: float
    """The same for the parameter where it is largest."""
    worst_name: str


def gradients_of(step: TrainingStep) -> Gradients:
    """Loss and gradients of the step's next batch; no gradient is left on the module."""
    loss = float(step.gradients(step.next_batch()))
    by_name = {
        name: _dense(parameter.grad).to("cpu", torch.float32, copy=True)
        for name, parameter in step.module.named_parameters()
        if parameter.grad is not None
    }
    step.optimizer.zero_grad(set_to_none=True)
    return Gradients(loss, by_name)


def check_finite(reference: Gradients, precision: PrecisionName) -> None:
    """Raise UsageError where the loss or a gradient, computed in `precision`, is not finite."""
    broken = [name for name, gradient in reference.by_name.items() if not gradient.isfinite().all()]
    if not math.isfinite(reference.loss) or broken:
        where = f", the gradient of {broken[0]} is not finite" if broken else ""
        raise UsageError(
            f"in {precision}, the loss of the first batch is {reference.loss:.4g}{where}: there is nothing to hold "
            "other settings against; look at the batch, the loss and the initial weights"
        )


def compare_gradients(reference: Gradients, loss: float, module: nn.Module, rounding: float = 0.0) -> Deviation:
    """Deviation of `loss` and of the module's `.grad`s; a gradient that is missing on one side only counts as 1.

    Args:
        rounding: the relative error that rounding makes. A parameter's error is held against the norm of its gradient,
            or against `rounding` times the norm of as many typical elements, where that is more: sums that cancel to
            zero leave only rounding, and no two computations agree on that.
    """
    square_error = square_norm = 0.0
    worst, worst_name = 0.0, ""
    elements = sum(gradient.numel() for gradient in reference.by_name.values())
    squares = sum(float(_norm(gradient)) ** 2 for gradient in reference.by_name.values())
    typical = math.sqrt(squares / elements) if elements else 0.0
    own = {name: _dense(parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None}
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


def _dense(gradient: Tensor) -> Tensor:
    """An embedding's gradient may be sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64 if tensor.device.type == "cpu" else torch.float32)


@dataclass(frozen=True)
class Verdict:
    """A deviation and what is allowed."""

    deviation: Deviation
    budget: float
    """Of the gradients."""
    loss_budget: float
    compared: Compared = "as it is"
    """How, having been over the budget as it is if otherwise."""

    @property
    def is_right(self) -> bool:
        """Whether loss and gradients stay within the budget; NaN never does."""
        return (
            self.deviation.loss <= self.loss_budget
            and self.deviation.gradient <= self.budget
            and self.deviation.worst <= max(WRONG_IN_KIND, self.budget)
        )


class GradientCheck:
    """Checks steps of one workload; the first becomes the reference."""

    def __init__(self, source: WorkloadSource) -> None:
        self.source = source
        self.reference: Gradients | None = None
        self.reference_config = StepConfig()
        self.leaf_calls = 0
        self.other_masks: set[PrecisionName] = set()
        """Precisions in which eager code draws other dropout masks than the reference."""
        self.plain_error: dict[PrecisionName, float] = {}
        self.condition: dict[PrecisionName, float] = {}

    def check(self, step: TrainingStep) -> Verdict:
        """The step's loss and gradients of its next batch, which has to be the workload's first. No gradient is left.

        Raises:
            UsageError: the reference's loss or gradients are not finite, so nothing can be compared with them.
        """
        if self.reference is None:
            return self._refer_to(step)
        precision, is_compiled = step.config.precision, step.config.compile != "off"
        found = self._compare(step, self.reference)
        if not found.is_right and is_compiled and precision not in self.other_masks:
            with eager_random():
                found = self._compare_again(found, step.config, self.reference, "with eager code's random numbers")
        if not found.is_right and self._reference_without_dropout is not None:
            with without_dropout():
                found = self._compare_again(found, step.config, self._reference_without_dropout, "without dropout")
            if found.is_right and not is_compiled:
                self.other_masks.add(precision)
        if not found.is_right and found.deviation.loss <= found.loss_budget:
            found = dataclasses.replace(found, budget=max(found.budget, self._conditioned_budget(precision)))
        if found.is_right and precision != self.reference_config.precision:
            self.plain_error.setdefault(precision, found.deviation.gradient)
        return found

    def _refer_to(self, step: TrainingStep) -> Verdict:
        with _LeafCalls(step.module) as calls:
            reference = gradients_of(step)
        check_finite(reference, step.config.precision)
        self.reference, self.reference_config, self.leaf_calls = reference, step.config, calls.count
        budget = self._budget(step.config.precision)
        return Verdict(Deviation(0.0, 0.0, 0.0, ""), budget, budget)

    def _compare(self, step: TrainingStep, reference: Gradients) -> Verdict:
        loss = float(step.gradients(step.next_batch()))
        budget = self._budget(step.config.precision)
        deviation = compare_gradients(reference, loss, step.module, rounding=budget)
        step.optimizer.zero_grad(set_to_none=True)
        return Verdict(deviation, budget, budget)

    def _compare_again(self, found: Verdict, config: StepConfig, reference: Gradients, compared: Compared) -> Verdict:
        """The nearer of `found` and the verdict on a step that is built anew."""
        again = dataclasses.replace(self._compare(build_step(self.source, config), reference), compared=compared)
        return again if again.deviation.gradient < found.deviation.gradient else found

    def _budget(self, precision: PrecisionName) -> float:
        plain_error = self.plain_error.get(precision)
        return error_budget(precision, self.reference_config.precision, self.leaf_calls, plain_error)

    @cached_property
    def _reference_without_dropout(self) -> Gradients | None:
        """The reference once more with dropout switched off, or None for a model that has none."""
        with without_dropout() as seen:
            gradients = gradients_of(build_step(self.source, self.reference_config))
        return gradients if seen.calls else None

    def _conditioned_budget(self, precision: PrecisionName) -> float:
        """Twice what rounding does to the gradients: three roundings of a module, of which one is measured."""
        moved = self._condition(precision) + self._condition(self.reference_config.precision)
        return min(2 * math.sqrt(ROUNDINGS_PER_MODULE) * moved, WRONG_IN_KIND)

    def _condition(self, precision: PrecisionName) -> float:
        """How far the reference's gradients move when its weights are rounded at random to `precision`."""
        assert self.reference is not None, "the first step is the reference"
        if precision not in self.condition:
            step = build_step(self.source, self.reference_config)
            batch = step.next_batch()
            _round_at_random(step.module, PRECISIONS[precision].unit_roundoff)
            loss = float(step.gradients(batch))
            self.condition[precision] = compare_gradients(self.reference, loss, step.module).gradient
        return self.condition[precision]


def _round_at_random(module: nn.Module, unit: float) -> None:
    """Multiply every weight by 1 + δ, each δ from [-unit, unit]."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, module.parameters()):
            random = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter.double() * (1 + unit * (2 * random.to(parameter.device) - 1)))


def error_budget(
    precision: PrecisionName, reference: PrecisionName, leaf_calls: int, plain_error: float | None
) -> float:
    """The relative error that a right computation may show against the reference.

    Args:
        leaf_calls: leaf modules run in one forward pass.
        plain_error: the error that the first step in this precision made, once there is one.
    """
    if plain_error is not None:
        return allowed_error(plain_error, one_rounding(precision))
    both = PRECISIONS[precision].unit_roundoff + PRECISIONS[reference].unit_roundoff
    return accumulated_rounding(both, ROUNDINGS_PER_MODULE * max(leaf_calls, 1))


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
