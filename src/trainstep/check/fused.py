"""Is a fused operator right? Its results and gradients against float64, on the same inputs.

An implementation and its oracle are functions of the same tensors, and are differentiated by those that require it.
Errors are ‖x − ref‖ / ‖ref‖ against the oracle in float64; allowed is twice the error of the oracle in the inputs' own
dtype, which is plain PyTorch, plus one rounding of that dtype (`allowed_error`). Of what should be 0 both are absolute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainstep.check import allowed_error, one_rounding

Operator = Callable[..., Tensor | tuple[Tensor, ...]]
"""Function of the inputs in their order; it may return several results."""


@dataclass(frozen=True)
class Budget:
    """The error of each result and gradient, and what is allowed."""

    found: dict[str, float]
    allowed: dict[str, float]

    @property
    def within(self) -> bool:
        """True if every error is allowed; NaN never is, nor is anything where plain torch has no finite error."""
        return all(self.share(name) <= 1 for name in self.found)

    @property
    def nearest(self) -> str:
        """The one that is nearest to what is allowed, or furthest beyond it."""
        return max(self.found, key=self.share)

    def share(self, name: str) -> float:
        """An error as a share of what is allowed; infinite for NaN, and where what is allowed is not finite."""
        share = self.found[name] / self.allowed[name]
        return share if math.isfinite(share) and math.isfinite(self.allowed[name]) else math.inf

    def __str__(self) -> str:
        """Say what is wrong; empty where nothing is."""
        off = [name for name in self.found if self.share(name) > 1]
        return ", ".join(f"{name} off by {self.found[name]:.2g} of {self.allowed[name]:.2g}" for name in off)


def check(
    implementation: Operator, oracle: Operator, inputs: Sequence[Tensor], names: Sequence[str], seed: int = 2
) -> Budget:
    """Run both forward and backward on copies of `inputs`, and the oracle in float64.

    Args:
        implementation, oracle: of the inputs; the oracle in whatever dtype comes.
        inputs: tensors; floating-point ones that require gradients are differentiated by.
        names: of the results, then of the gradients.
        seed: of the random gradients of the results.
    """
    found, upstream = run(implementation, inputs, seed)
    return compare(found, *expected(oracle, inputs, upstream), names)


def expected(
    oracle: Operator, inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the oracle for the inputs in their own dtype, and in float64."""
    plain = differentiate(oracle, inputs, upstream)
    wide = [_wide(each) for each in inputs]
    return plain, differentiate(oracle, wide, [each.double() for each in upstream])


def compare(found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], names: Sequence[str]) -> Budget:
    """The budget of results that are there already, in one order."""
    errors, allowed = {}, {}
    for name, own, ordinary, reference in zip(names, found, plain, exact, strict=True):
        if own.shape != reference.shape:
            raise AssertionError(f"{name} has shape {tuple(own.shape)}, expected {tuple(reference.shape)}")
        errors[name] = _error(own, reference)
        allowed[name] = allowed_error(_error(ordinary, reference), one_rounding(ordinary.dtype))
    return Budget(errors, allowed)


def run(function: Operator, inputs: Sequence[Tensor], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """The results of `function` on copies of the inputs and the gradients by those that require one; the random
    gradients of the results that those were for."""
    drawn: list[Tensor] = []
    return differentiate(function, inputs, drawn, seed), drawn


def differentiate(
    function: Operator, inputs: Sequence[Tensor], upstream: Sequence[Tensor], seed: int | None = None
) -> list[Tensor]:
    """The same for gradients of the results that are given; with a seed they are drawn into the list `upstream`."""
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    if seed is not None:
        assert isinstance(upstream, list)
        upstream += [_signed_eighths(each, seed) for each in results]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    kept = [each.detach().clone() for each in results]  # a peer's backward may write over them
    return [*kept, *torch.autograd.grad(results, wanted, [each.clone() for each in upstream])]


def _signed_eighths(result: Tensor, seed: int) -> Tensor:
    """A gradient for a result: eighths up to 2 and -2 without 0, which every dtype holds exactly."""
    generator = torch.Generator(result.device).manual_seed(seed)
    size, sign = (
        torch.randint(*ends, result.shape, device=result.device, generator=generator) for ends in ((1, 17), (0, 2))
    )
    return (size * (2 * sign - 1) / 8).to(result.dtype)


def _wide(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _error(own: Tensor, reference: Tensor) -> float:
    own, reference = own.detach().double(), reference.detach().double()
    off, size = own - reference, float(reference.norm())
    return float(off.norm()) / size if size else float(off.norm())
