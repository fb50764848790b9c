"""Steps that drop otherwise than the plain one, wrong and right: dropout by hand, in the place of torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tools.trust.planted import table
from tools.trust.planted.right import Case, Residual, own
from tools.trust.planted.step import BF16, OPTIMIZER, Change, Planted  # noqa: F401 – cases.toml has it
from trainstep.step.workload import Workload, WorkloadSource

P = 0.3
Drop = Callable[[Tensor], Tensor]
"""Dropout of one module in training."""


def _block() -> nn.Module:
    return Residual(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(P))


PLAIN, CONFIG, _ = own(lambda: nn.Sequential(_block(), _block(), _block()), (8, 32, 32), OPTIMIZER)
ALL, ONE = slice(None), slice(1, 2)


def by_hand(drop: Drop, which: slice = ALL, *, policy: Any = None) -> Callable[[Workload], None]:
    """Dropouts of some blocks drop like this in training; with a policy, blocks are computed again under it."""

    def apply(workload: Workload) -> None:
        blocks: Any = workload.module
        for block in blocks[which]:
            block.part[4].forward = lambda x, module=block.part[4]: drop(x) if module.training else x
        for block in blocks if policy else ():
            block.part.forward = functools.partial(checkpoint, block.part.forward, use_reentrant=False, **policy)

    return apply


def scaled(x: Tensor, kept: Tensor, p: float = P) -> Tensor:
    """What is kept, scaled."""
    return x * kept / (1 - p)


def drawn(x: Tensor, p: float = P, **options: Any) -> Tensor:
    """A mask: True where an element is kept."""
    return torch.rand(x.shape, **options) >= p


def hand(x: Tensor, p: float = P) -> Tensor:
    """Right if p is."""
    return scaled(x, drawn(x, p), p)


class _Apart(torch.autograd.Function):
    """Forward and backward each with a factor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Callable[[], Tensor]) -> Tensor:
        ctx.back = back
        return x * there

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient * ctx.back(), None, None


def apart(back: Callable[[Tensor], Tensor]) -> Drop:
    """Dropout whose backward has another factor, made of forward's."""

    def drop(x: Tensor) -> Tensor:
        factor = drawn(x) / (1 - P)
        return _Apart.apply(x, factor, lambda: back(factor))  # type: ignore[no-any-return]

    return drop


def seeded(x: Tensor) -> Tensor:
    """From one seed in every pass."""
    torch.manual_seed(0)
    return F.dropout(x, P)


def from_seed(x: Tensor, end: int = 2**31, more: Callable[[], int] = lambda: 0) -> Tensor:
    """From a generator of its own, which backward starts once more; its seed is drawn below `end`."""
    number = int(torch.randint(end, ())) + more()

    def factor() -> Tensor:
        return drawn(x, generator=torch.Generator().manual_seed(number)) / (1 - P)

    return _Apart.apply(x, factor(), factor)  # type: ignore[no-any-return]


def _wrong(drop: Drop, which: slice = ALL, **policy: Any) -> Planted:
    return Planted(by_hand(drop, which, **policy), dict(OPTIMIZER), plain=PLAIN)


other = apart(lambda factor: drawn(factor) / (1 - P))
WRONG: dict[str, Planted] = table(globals(), "WRONG")
"""What it is → how it is planted."""


def _right(
    drop: Drop, which: slice = ALL, change: Change = OPTIMIZER, plain: WorkloadSource = PLAIN, **policy: Any
) -> Case:
    return Planted(by_hand(drop, which, **policy), dict(change), plain=plain).source(), CONFIG, dict(change)


BY_HAND = Planted(by_hand(hand), {}, plain=PLAIN).source()
RIGHT: dict[str, Case] = table(globals(), "RIGHT")
"""What it is → its workload, the plain configuration, and the change."""
