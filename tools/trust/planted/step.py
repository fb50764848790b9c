"""Training steps that are wrong on purpose: what the check of steps is held against.

A wrong step is the built-in model with something done to it where the changed step is built (fused attention), in both
precisions or in bf16 alone. Some are wrong in forward, some in the gradient alone, with a right forward, some only
after ten steps. A wrong optimizer takes the place of the fused one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.trust.planted import table
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

MODEL = ModelConfig(d_model=64, d_ff=160, num_layers=3, num_heads=4, vocab_size=512, max_context=128)
BASE = StepConfig(batch=2, context=128, device="cpu")
PLAIN = builtin_source("toy", MODEL)
Change = dict[str, Any]
BF16 = {"precision": "bf16"}
ATTENTION = {"attention": "sdpa"}
OPTIMIZER = {"optimizer": "adamw-fused"}


@dataclass(frozen=True)
class Planted:
    """One wrong: what it does to the workload of a changed step."""

    apply: Callable[[Workload], Workload | None]
    change: Change = field(default_factory=lambda: dict(ATTENTION))
    """What makes the step a changed one."""
    only_in: str | None = None
    """A precision in which alone it is wrong; None for all."""
    plain: WorkloadSource = PLAIN
    """The same, right."""

    def source(self) -> WorkloadSource:
        """The workload, wrong where the step is changed."""

        def build(step: StepConfig) -> Workload:
            workload = self.plain.build(step)
            changed = all(getattr(step, name) == value for name, value in self.change.items())
            if not changed or self.only_in not in (None, step.precision):
                return workload
            return self.apply(workload) or workload

        return replace(self.plain, build=build)


def gradient(
    names: str, factor: float, rows: slice = slice(None), when: Callable[[int], bool] = lambda number: True
) -> Callable[[Workload], None]:
    """The gradient of parameters whose name has `names` in it, times a factor; of some rows alone, and after passes of
    forward with gradients for whose number, from 1, `when` says so."""

    def apply(workload: Workload) -> None:
        number, found = 0, [each for name, each in workload.module.named_parameters() if names in name]

        def count(*_: Any) -> None:
            nonlocal number
            number += torch.is_grad_enabled()

        assert found, names
        workload.module.register_forward_pre_hook(count)
        for parameter in found:
            parameter.register_hook(lambda grad: _scaled(grad, factor, rows) if when(number) else grad)

    return apply


def _scaled(gradient: Tensor, factor: float, rows: slice) -> Tensor:
    changed = gradient.clone()
    changed[rows] *= factor
    return changed


def through(names: str, factor: float) -> Callable[[Workload], None]:
    """What flows back through the outputs of modules, times a factor: dq, dk, dv of attention."""

    def apply(workload: Workload) -> None:
        for module in _named(workload, names):
            module.register_forward_hook(lambda _, __, output: _backward_scaled(output, factor))

    return apply


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def _backward_scaled(output: Tensor, factor: float) -> Tensor:
    return _Scale.apply(output, factor)  # type: ignore[no-any-return]


def output(names: str, change: Callable[[Tensor], Tensor]) -> Callable[[Workload], None]:
    """The outputs of modules, changed in forward."""

    def apply(workload: Workload) -> None:
        for module in _named(workload, names):
            module.register_forward_hook(lambda _, __, result: change(result))

    return apply


def _named(workload: Workload, names: str) -> list[nn.Module]:
    found = [module for name, module in workload.module.named_modules() if name.endswith(names)]
    assert found, names
    return found


def attention(
    change: Callable[[Tensor], Tensor] = lambda mask: mask, head: int | None = None
) -> Callable[[Workload], None]:
    """Attention with another mask (S, S), True where a query sees a key; on one head or all."""

    def mixed(self: Any, x: Tensor, rotary: nn.Module) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mask = causal.expand(self.num_heads, -1, -1).clone()
        mask[slice(None) if head is None else slice(head, head + 1)] = change(causal.clone())
        out = F.scaled_dot_product_attention(rotary(q), rotary(k), v, attn_mask=mask)
        return self.output(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def apply(workload: Workload) -> None:
        for module in _named(workload, ".attention"):
            module.forward = functools.partial(mixed, module)  # type: ignore[method-assign]

    return apply


def window(mask: Tensor) -> Tensor:
    """The last 120 keys."""
    return mask & mask.new_ones(mask.shape).triu(-119)


def no_diagonal(mask: Tensor) -> Tensor:
    """One query does not see itself."""
    mask[40, 40] = False
    return mask


def ahead(mask: Tensor) -> Tensor:
    """Every query sees one key too many."""
    return mask.new_ones(mask.shape).tril(1)


def first_unseen(mask: Tensor) -> Tensor:
    """No query but the first sees the first key."""
    mask[1:, 0] = False
    return mask


def loss(change: Callable[[Tensor], Tensor]) -> Callable[[Workload], Workload]:
    """Another loss."""

    def apply(workload: Workload) -> Workload:
        right = workload.loss
        workload.loss = lambda result, batch: change(right(result, batch))
        return workload

    return apply


def batches(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Workload], None]:
    """Other data."""

    def apply(workload: Workload) -> None:
        given = workload.batches
        workload.batches = (change(*pair) for pair in given)

    return apply


def optimizer(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Workload], None]:
    """Another optimizer under the fused one's name."""

    def apply(workload: Workload) -> None:
        workload.optimizer = make

    return apply


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """The built-in model's AdamW with other options."""
    return functools.partial(torch.optim.AdamW, **({"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1} | options))


def changed(before: Callable[[Any], object]) -> Callable[[Any], torch.optim.Optimizer]:
    """The built-in model's AdamW, something done to it before each step; `taken` counts them."""

    class Changed(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            self.taken = getattr(self, "taken", 0) + 1
            before(self)
            return super().step()

    return functools.partial(Changed, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


WRONG: dict[str, Planted] = table(globals(), "WRONG")
"""What it is → how it is planted."""


def in_bf16_alone(planted: Planted) -> Planted:
    """The same, wrong in bf16 and right in float32."""
    return replace(planted, change=planted.change | BF16, only_in="bf16")
