"""Does a step that draws random numbers drop what it should, though it drops other elements than the plain step?

Which elements a dropout drops, its author chooses: another kernel, order or generator is as right. So masks are not
compared. With the generators set to a state, three things hold of any dropout that is right:

1. Passes from one state are equal, and the gradient is that of the loss under the masks of that state: it fits the
   difference of the loss along it. Other elements dropped in backward, or in a block that is computed again, do not
   fit. The step of the difference changes the loss by about `STEP` of itself, so that float32's roundings of two losses
   are 2⁻¹³ of what is fitted. The fit may be off by `STEP` and by twice what the plain step's is, which has the same
   curvature and kinks.
2. Passes from two states differ, as much as the plain step's.
3. Loss, norms of gradients, and distances between the gradients of two states have the plain step's means over many
   states (Welch's t). The norms show a scale, the distances a share, or a layer that drops the same in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainstep.base.tolerance import REPEATS, allowed_error
from trainstep.check.gradients import Gradients, Rounding
from trainstep.check.parts import norm
from trainstep.check.reference import gradients_at
from trainstep.step.randomness import from_seed
from trainstep.step.training_step import TrainingStep

PAIRS = 12
"""Pairs of passes, each from a state of its own, over which means are taken."""
DEVIATIONS = 8.0
"""Standard errors that two means over `PAIRS` may be apart: Student's t with 22 degrees of freedom is beyond that once
in 15 million, and a large model has a thousand means."""
FITS = 3
"""States in which the gradient is held against a difference."""
STEP = 2.0**-10


@dataclass(frozen=True)
class Draws:
    """Behaviour of a step over states of the generators."""

    unfit: float
    """Error of the gradient, held against differences of the loss, relative; the largest of `FITS`."""
    names: tuple[str, ...]
    """Quantities of which there are means."""
    values: Tensor
    """Each quantity in each of `PAIRS`, (PAIRS, quantities): the loss, every ‖g‖² and every distance², in float64."""

    @staticmethod
    def of(step: TrainingStep, batch: Any) -> Draws:
        """Take all of it with the weights as they are; what the passes make of buffers stays."""
        trained = [name for name, parameter in step.module.named_parameters() if parameter.requires_grad]
        rows = []
        for pair in range(PAIRS):
            one, other = (gradients_at(step, batch, 2 * pair + each) for each in (0, 1))
            apart = Rounding.between(other, one)
            squares = [one.squares.get(name, 0.0) + other.squares.get(name, 0.0) for name in trained]
            distances = [apart.by_name[name].norm ** 2 if name in apart.by_name else 0.0 for name in trained]
            rows.append([one.loss + other.loss, *squares, *distances])
        names = "the loss", *(f"{kind} of {name}" for kind in ("the norm", "the variance") for name in trained)
        unfit = max(_unfit(step, batch, number) for number in range(FITS))
        return Draws(unfit, names, torch.tensor(rows, dtype=torch.float64))

    def fault(self, plain: Draws) -> str:
        """Say what is wrong with a step that draws like this, beside the plain one; empty where nothing is."""
        expected = plain.values.mean(0)
        # A gradient that the mathematics makes zero is nothing but rounding, so the least sizes do not count.
        least = REPEATS**2 * expected[1:].max() * (torch.arange(len(expected)) > 0)
        noise = ((self.values.var(0) + plain.values.var(0)) / PAIRS).sqrt()
        off = self.values.mean(0) - expected
        share = off.abs() / (DEVIATIONS * noise + REPEATS * expected.abs() + least)
        worst = int(share.argmax())
        if not self.unfit <= (allowed := allowed_error(plain.unfit, STEP)):
            return (
                "drops other elements in backward than in forward, or in two passes from one state of random numbers: "
                f"its gradient is {self.unfit:.2g} of {allowed:.2g} off the difference of its loss"
            )
        if not float(share[worst]) > 1:
            return ""
        return (
            f"drops another share, the same in every pass, or scales otherwise: {self.names[worst]} over {2 * PAIRS} "
            f"passes is {off[worst] / expected[worst]:+.2g} off the plain step's mean, "
            f"{off[worst].abs() / noise[worst]:.2g} standard errors of {DEVIATIONS:g}"
        )


def still_gradients(step: TrainingStep, batch: Any, number: int = 0) -> Gradients:
    """Loss and gradients of a batch in eval mode, which a dropout of the author's own looks at."""
    # Batch normalisation has another formula there, and cuDNN's recurrent kernels have no backward.
    still = [each for each in step.module.modules() if each.training and not isinstance(each, (_NormBase, nn.RNNBase))]
    for each in still:
        each.training = False
    found = gradients_at(step, batch, number)
    for each in still:
        each.training = True
    return found


def _unfit(step: TrainingStep, batch: Any, number: int) -> float:
    """Error of the gradient from one state, relative, along itself: each parameter is moved by as much as any other."""
    slopes = {name: each for name, each in gradients_at(step, batch, number).by_name.items() if each.any()}
    parameters = [(each, slopes[name]) for name, each in step.module.named_parameters() if name in slopes]
    starts = [(each, each.detach().clone(), slope, norm(slope)) for each, slope in parameters]

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for parameter, start, slope, size in starts:
                parameter.copy_(start + slope * (distance / size))
        with from_seed(step.config.seed + number, [step.device]):
            return float(step.differentiable_loss(batch).detach())

    if not (expected := sum(size for *_, size in starts)):
        return 0.0
    distance = STEP / 2 * (abs(loss_at(0.0)) or 1.0) / expected
    found = (loss_at(distance) - loss_at(-distance)) / (2 * distance)
    loss_at(0.0)
    return abs(found / expected - 1)
