"""Stand-in in `param.grad` for a mean gradient of which this rank has its slice alone (see `ddp` and `zero`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from trainstep.base.errors import UsageError
from trainstep.parallel.partial import StandIn, name_of
from trainstep.parallel.slices import check_dense

NO_SCALING = (
    "a GradScaler sees only this rank's slices of the gradients, so it would skip a step on some ranks; leave out "
    "ddp=, or train in bfloat16, which needs no scaling"
)
_MOVES = ("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16")


class ScatteredGradient(StandIn):
    """Says that the gradient is there, in slices. It can be zeroed or dropped; other uses raise.

    Autograd adds the next backward's gradient to it, as to any: that is kept apart until it is scattered too.

    Attributes:
        of_parameter: its name.
        own: the parameter that stands for this rank's slice; its `grad` is the slice of the gradient.
        local: what backward has brought since, of this rank alone, or None; laid out in memory as the parameter.
    """

    of_parameter: str
    own: nn.Parameter
    local: Tensor | None

    @classmethod
    def of(cls, parameter: nn.Parameter, name: str, own: nn.Parameter) -> ScatteredGradient:
        made: ScatteredGradient = cls.like(parameter.detach())
        made.of_parameter, made.own, made.local = name, own, None
        return made

    def take_local(self) -> Tensor:
        """This rank's gradient since the last ones were scattered: zeros if there is none."""
        local, self.local = self.local, None
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if local is None else local

    def _add(self, gradient: Tensor) -> None:
        """Autograd may go on with what it adds, or give it to others too, so it is copied."""
        check_dense(gradient, self.of_parameter)
        if self.local is None:
            self.local = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
            self.local.copy_(gradient)
        else:
            self.local.add_(gradient)

    @classmethod
    def use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = name_of(func)
        if what in ("requires_grad_", "requires_grad"):
            return args[0]
        if what == "data" and args[-1] is args[0]:  # module.to(…) sets what it moved, here to itself
            return None
        if what in _MOVES:
            return cls._moved(args[0], func, args[1:], kwargs)
        given = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, ScatteredGradient)]
        if what in ("zero_", "_foreach_zero_"):
            for each in given:
                each.local = None
                if each.own.grad is not None:
                    each.own.grad.zero_()
            return args[0]
        if what == "_amp_foreach_non_finite_check_and_unscale_":
            raise UsageError(NO_SCALING)
        raise UsageError(
            f"{what} of the gradient of {given[0].of_parameter}: with ShardedOptimizer(…, ddp=ddp) a rank has only its "
            "slice of each. Clip with clip_grad_norm_ of the optimizer; to see or change gradients, leave out ddp="
        )

    @classmethod
    def _moved(cls, gradient: ScatteredGradient, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the gradient itself for a cast or move that changes nothing. It has no layout of its own to change."""
        probe = torch.empty(0, dtype=gradient.dtype, device=gradient.device)
        moved = func(probe, *args, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        if not isinstance(moved, Tensor):  # type() names what it is
            return moved
        if (moved.dtype, moved.device) == (probe.dtype, probe.device):
            return gradient
        raise UsageError(
            f"{name_of(func)} of a module with the gradient of {gradient.of_parameter} in slices; call zero_grad() "
            "first, and make DistributedDataParallel and ShardedOptimizer after casts and moves"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], ScatteredGradient) and not kwargs:
            args[0]._add(args[1])
            return args[0]
        return cls.use(func, args, kwargs or {})
