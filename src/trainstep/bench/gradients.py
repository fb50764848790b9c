"""Loss and gradients of one batch, and how far others are from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainstep.errors import UsageError
from trainstep.precision import PrecisionName
from trainstep.training_step import TrainingStep


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
    """Those of the step's next batch; none is left on the module."""
    loss = float(step.gradients(step.next_batch()))
    gradients = Gradients(loss, _gradients_on_host(step.module))
    step.optimizer.zero_grad(set_to_none=True)
    return gradients


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


def _gradients_on_host(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: _dense(parameter.grad).to("cpu", torch.float32, copy=True)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
