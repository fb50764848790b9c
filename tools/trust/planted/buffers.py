"""Steps whose gradients are right and whose batch normalisation keeps wrong statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tools.trust.planted import table
from tools.trust.planted.right import convolutions, own
from tools.trust.planted.step import OPTIMIZER, Planted

CONVOLUTIONS = own(convolutions, (4, 3, 12, 12), OPTIMIZER)[0]


def norms(module: nn.Module) -> list[nn.Module]:
    """Its batch normalisations, in their order."""
    return [each for each in module.modules() if isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d))]


def moves(norm: Any, x: Tensor) -> None:
    """The running statistics, once more."""
    nn.functional.batch_norm(x, norm.running_mean, norm.running_var, training=True, momentum=norm.momentum)


def biased(norm: Any, x: Tensor) -> None:
    """The variance as it is divided by, over n, not as it is kept, over n − 1."""
    share = norm.momentum * x.shape[1] / x.numel()
    norm.running_var.data -= share * x.var([0, *range(2, x.dim())])  # .data: backward has it, and does not look at it


def momentum(value: float, which: slice = slice(None)) -> Callable[[nn.Module], None]:
    """Another momentum of these batch normalisations."""

    def change(module: nn.Module) -> None:
        for norm in norms(module)[which]:
            norm.momentum = value  # type: ignore[assignment]

    return change


def _after(act: Callable[[Any, Tensor], object]) -> Callable[[nn.Module], None]:
    """Something done to the first one after each forward in training, given its input."""

    def hook(norm: nn.Module, inputs: tuple[Tensor], _: Any) -> None:
        if norm.training:
            act(norm, inputs[0].detach().float())

    def change(module: nn.Module) -> None:
        norms(module)[0].register_forward_hook(hook)

    return change


def _one_channel(norm: Any, x: Tensor) -> None:
    norm.running_mean.data[5] = 0.0


def _uncounted(norm: Any, x: Tensor) -> None:
    norm.num_batches_tracked.data -= 1


def _wrong(change: Callable[[nn.Module], None]) -> Planted:
    return Planted(lambda workload: change(workload.module), dict(OPTIMIZER), plain=CONVOLUTIONS)


WRONG: dict[str, Planted] = table(globals(), "WRONG")
"""What it is → how it is planted."""
