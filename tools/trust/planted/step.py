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


def gradient(names: str, factor: float, rows: slice = slice(None)) -> Callable[[Workload], None]:
    """The gradient of parameters whose name has `names` in it, times a factor; of some rows alone."""

    def apply(workload: Workload) -> None:
        found = [parameter for name, parameter in workload.module.named_parameters() if names in name]
        assert found, names
        for parameter in found:
            parameter.register_hook(functools.partial(_scaled, factor=factor, rows=rows))

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


def late(apply_after: int = 10) -> Callable[[Workload], None]:
    """The gradients of one block times 1.5, once forward has run ten times with gradients."""

    def apply(workload: Workload) -> None:
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += torch.is_grad_enabled()

        workload.module.register_forward_pre_hook(count)
        for parameter in workload.module.blocks[1].parameters():  # type: ignore[union-attr, index]
            parameter.register_hook(lambda grad: grad * 1.5 if calls > apply_after else grad)

    return apply


class FromEleventh(torch.optim.AdamW):
    """Another learning rate from its eleventh step."""

    def step(self, closure: Any = None) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        for group in self.param_groups:
            group["lr"] = 3e-4 * (1.05 if self.taken > 10 else 1)
        return super().step()


class StopsDecay(torch.optim.AdamW):
    """Decays no weight once its state says that ten steps were taken."""

    def step(self, closure: Any = None) -> Any:
        taken = max((float(state["step"]) for state in self.state.values()), default=0)
        for group in self.param_groups:
            group["weight_decay"] = 0.0 if taken >= 10 else 0.1
        return super().step()


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


class Idle(torch.optim.AdamW):
    """Updates nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class Forgets(torch.optim.AdamW):
    """Starts every update without moments, and so without the bias of later ones."""

    def step(self, closure: Any = None) -> Any:
        self.state.clear()
        return super().step()


class SkipsLast(torch.optim.AdamW):
    """Leaves one parameter as it is."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][-1].grad = None
        return super().step()


WRONG: dict[str, Planted] = {
    "all gradients × 1.02": Planted(gradient("", 1.02)),
    "all gradients × 100": Planted(gradient("", 100.0)),
    "one block's gradients × 1.10": Planted(gradient("blocks.1.", 1.10)),
    "query gradients × 1.45": Planted(gradient("query", 1.45)),
    "query gradients × 0.55": Planted(gradient("query", 0.55)),
    "key gradients × 1.45": Planted(gradient("key", 1.45)),
    "embedding gradient × 1.45": Planted(gradient("embedding", 1.45)),
    "norm gradients × 1.45": Planted(gradient("norm", 1.45)),
    "gate gradients × 1.25": Planted(gradient("gate", 1.25)),
    "down gradient of one layer × 0.9": Planted(gradient("blocks.2.feed_forward.down", 0.9)),
    "one head's query rows × 1.5": Planted(gradient("blocks.0.attention.query", 1.5, slice(16, 32))),
    "one row of the head's gradient zero": Planted(gradient("head", 0.0, slice(32, 33))),
    "one row of an up projection's gradient zero": Planted(gradient("blocks.1.feed_forward.up", 0.0, slice(7, 8))),
    "dq × 1.25": Planted(through("attention.query", 1.25)),
    "dk × 1.25": Planted(through("attention.key", 1.25)),
    "dv × 1.10": Planted(through("attention.value", 1.10)),
    "what flows back into one block × 1.2": Planted(through("blocks.1", 1.2)),
    "attention scale × 1.05": Planted(output("attention.query", lambda q: q * 1.05)),
    "attention's output × 1.03": Planted(output("attention.output", lambda o: o * 1.03)),
    "one value head zero": Planted(
        output("blocks.1.attention.value", lambda v: v * (torch.arange(64, device=v.device) < 48))
    ),
    "key heads in another order": Planted(output("blocks.0.attention.key", lambda k: k.roll(16, -1))),
    "a window of 120 of 128": Planted(attention(window)),
    "one row without its diagonal key": Planted(attention(no_diagonal)),
    "the mask one key too wide": Planted(attention(ahead)),
    "the first key unseen": Planted(attention(first_unseen)),
    "one head without a mask": Planted(attention(torch.ones_like, head=2)),
    "gate × 1.1": Planted(output("feed_forward.gate", lambda x: x * 1.1)),
    "no final norm gain": Planted(output("feed_forward_norm", lambda x: x * 1.02)),
    "loss × 1.02": Planted(loss(lambda value: value * 1.02)),
    "a sum for a mean": Planted(loss(lambda value: value * 256)),
    "loss right, gradient × 1.03": Planted(loss(lambda value: value.detach() + 1.03 * (value - value.detach()))),
    "targets one token late": Planted(batches(lambda x, y: (x, y.roll(1, -1)))),
    "half the batch twice": Planted(batches(lambda x, y: (x[:1].repeat(2, 1), y[:1].repeat(2, 1)))),
    "one block's gradients × 1.5 after ten steps": Planted(late()),
    "an optimizer that updates nothing": Planted(optimizer(functools.partial(Idle, lr=3e-4)), OPTIMIZER),
    "one that ascends": Planted(optimizer(adamw(maximize=True)), OPTIMIZER),
    "learning rate × 10": Planted(optimizer(adamw(lr=3e-3)), OPTIMIZER),
    "learning rate × 1.05": Planted(optimizer(adamw(lr=3.15e-4)), OPTIMIZER),
    "SGD for AdamW": Planted(optimizer(functools.partial(torch.optim.SGD, lr=3e-4)), OPTIMIZER),
    "no weight decay": Planted(optimizer(adamw(weight_decay=0.0)), OPTIMIZER),
    "β₂ of 0.999": Planted(optimizer(adamw(betas=(0.9, 0.999))), OPTIMIZER),
    "β₁ of 0.8": Planted(optimizer(adamw(betas=(0.8, 0.95))), OPTIMIZER),
    "weight decay inside the gradient (Adam)": Planted(
        optimizer(functools.partial(torch.optim.Adam, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)), OPTIMIZER
    ),
    "moments forgotten": Planted(
        optimizer(functools.partial(Forgets, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)), OPTIMIZER
    ),
    "one parameter not updated": Planted(
        optimizer(functools.partial(SkipsLast, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)), OPTIMIZER
    ),
    "learning rate × 1.05 after ten steps": Planted(
        optimizer(functools.partial(FromEleventh, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)), OPTIMIZER
    ),
    "no weight decay after ten steps": Planted(
        optimizer(functools.partial(StopsDecay, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)), OPTIMIZER
    ),
}
"""What it is → how it is planted."""


def in_bf16_alone(planted: Planted) -> Planted:
    """The same, wrong in bf16 and right in float32."""
    return replace(planted, change=planted.change | BF16, only_in="bf16")
