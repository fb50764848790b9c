"""Steps whose gradients are right and whose batch normalisation keeps wrong statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.planted.right import convolutions, own
from tests.planted.step import OPTIMIZER, Planted
from trainstep.workload import Workload

CONVOLUTIONS = own(convolutions, (4, 3, 12, 12), OPTIMIZER)[0]


def norms(change: Callable[[nn.BatchNorm2d], object]) -> Callable[[Workload], None]:
    """Something done to each batch normalisation."""

    def apply(workload: Workload) -> None:
        found = [module for module in workload.module.modules() if isinstance(module, nn.BatchNorm2d)]
        assert found
        for module in found:
            change(module)

    return apply


def after(change: Callable[[nn.BatchNorm2d, Tensor], object]) -> Callable[[Workload], None]:
    """Something done to the first one after each forward in training, given its input."""

    def hook(module: nn.BatchNorm2d, inputs: tuple[Tensor], _: Any) -> None:
        if module.training:
            change(module, inputs[0].detach().float())

    def apply(workload: Workload) -> None:
        first = next(module for module in workload.module.modules() if isinstance(module, nn.BatchNorm2d))
        first.register_forward_hook(hook)

    return apply


def _twice(module: nn.BatchNorm2d, x: Tensor) -> None:
    nn.functional.batch_norm(x, module.running_mean, module.running_var, training=True, momentum=module.momentum or 0.0)


def _mean_of_square(module: nn.BatchNorm2d, x: Tensor) -> None:
    """The sum of squares over n, where n − 1 is right."""
    count, share = x.numel() // x.shape[1], module.momentum or 0.0
    assert module.running_var is not None
    module.running_var.data -= share * x.var((0, 2, 3)) / count  # .data: backward has it, and does not look at it


def _one_channel(module: nn.BatchNorm2d, x: Tensor) -> None:
    assert module.running_mean is not None
    module.running_mean.data[5] = 0.0


def _uncounted(module: nn.BatchNorm2d, x: Tensor) -> None:
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.data -= 1


def _wrong(apply: Callable[[Workload], None]) -> Planted:
    return Planted(apply, dict(OPTIMIZER), plain=CONVOLUTIONS)


WRONG: dict[str, Planted] = {
    "batch statistics moved twice": _wrong(after(_twice)),
    "batch statistics never moved": _wrong(norms(lambda norm: setattr(norm, "momentum", 0.0))),
    "their momentum 0.12 for 0.1": _wrong(norms(lambda norm: setattr(norm, "momentum", 0.12))),
    "a running variance over n for n − 1": _wrong(after(_mean_of_square)),
    "one channel's running mean left at zero": _wrong(after(_one_channel)),
    "a batch that is not counted": _wrong(after(_uncounted)),
}
"""What it is → how it is planted."""
