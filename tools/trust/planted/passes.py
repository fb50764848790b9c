"""Steps that are wrong in some passes alone, or in rows that few batches reach; and right ones that look alike."""

from __future__ import annotations

import functools
import itertools
import random  # noqa: F401 – cases.toml has it
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.trust.planted import table
from tools.trust.planted.right import Case, Experts, Residual
from tools.trust.planted.step import OPTIMIZER, Planted, gradient, loss  # noqa: F401 – cases.toml has them
from trainstep.base.config import StepConfig
from trainstep.step.workload import Workload, WorkloadSource

CONFIG = StepConfig(device="cpu")
WORDS, RARE, LONG, BATCHES = 48, (5, 9, 20, 33, 60, 100), 40, 110
"""Words that all batches have; the places of batches of which each has one more; the place of a longer one."""


class Model(nn.Module):
    """Words and positions, two layers, one of experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS + len(RARE) + 2, 24), nn.Embedding(32, 24)
        self.mix, self.experts = Residual(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU()), Experts(24)
        self.head = nn.Linear(24, 16)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        return self.head(self.experts(self.mix(x)))  # type: ignore[no-any-return]


def _build(config: StepConfig) -> Workload:
    torch.manual_seed(config.seed)
    generator, batches = torch.Generator().manual_seed(1), []
    for place in range(BATCHES):
        words = torch.randint(WORDS, (2, 32 if place == LONG else 12), generator=generator)
        if place in RARE:
            words[0, 3] = WORDS + RARE.index(place)
        batches.append((words,))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    return Workload(Model(), batches, lambda result, batch: (result - 0.3).square().mean(), adamw)


PLAIN = WorkloadSource("words", _build)


PLANTED = functools.partial(Planted, change=dict(OPTIMIZER), plain=PLAIN)


def computes(name: str, forward: Callable[..., Tensor]) -> Callable[[Workload], None]:
    """Another forward of a module, given the module and its input."""

    def apply(workload: Workload) -> None:
        module = workload.module.get_submodule(name)
        module.forward = functools.partial(forward, module)  # type: ignore[method-assign]

    return apply


class _Rows(torch.autograd.Function):
    """Embeddings whose backward gives the words below a limit their gradient alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, words: Tensor, limit: int) -> Tensor:
        ctx.save_for_backward(words)
        ctx.shape, ctx.limit = weight.shape, limit
        return weight[words]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (words,) = ctx.saved_tensors
        found = grad.new_zeros(ctx.shape).index_add(0, words.flatten(), grad.flatten(0, 1))
        return found * (torch.arange(len(found)) < ctx.limit)[:, None], None, None


def one_hot(module: Any, words: Tensor) -> Tensor:
    """A product in place of a lookup."""
    return F.one_hot(words, len(module.weight)).float() @ module.weight  # type: ignore[no-any-return]


def in_turns(*forwards: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Another way to compute in each pass."""
    each = itertools.cycle(forwards)
    return lambda module, x: next(each)(module, x)


WRONG: dict[str, Planted] = {what: PLANTED(apply) for what, apply in table(globals(), "WRONG").items()}
"""What it is → how it is planted."""
RIGHT: dict[str, Case] = {
    what: (PLANTED(apply).source(), CONFIG, dict(OPTIMIZER)) for what, apply in table(globals(), "RIGHT").items()
}
"""What it is → its workload, the plain configuration, and the change."""
