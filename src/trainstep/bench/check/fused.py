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

from trainstep.bench.check import allowed_error, one_rounding

Operator = Callable[..., Tensor | tuple[Tensor, ...]]
"""Of the inputs in their order; may return several results."""


@dataclass(frozen=True)
class Budget:
    """The error of each result and gradient, and what is allowed."""

    found: dict[str, float]
    allowed: dict[str, float]

    @property
    def within(self) -> bool:
        """Whether every error is allowed; NaN never is."""
        return all(self.found[name] <= self.allowed[name] for name in self.found)

    @property
    def nearest(self) -> str:
        """The one that is nearest to what is allowed, or furthest beyond it."""
        return max(self.found, key=self.share)

    def share(self, name: str) -> float:
        """An error as a share of what is allowed; infinite for NaN."""
        share = self.found[name] / self.allowed[name]
        return math.inf if math.isnan(share) else share

    def __str__(self) -> str:
        """What is wrong, in words; empty where nothing is."""
        off = [name for name in self.found if not self.found[name] <= self.allowed[name]]
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
    found = run(implementation, inputs, seed)
    plain = run(oracle, inputs, seed)
    wide = [_wide(each) for each in inputs]
    exact = run(oracle, wide, seed)
    return compare(found, plain, exact, names)


def compare(found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], names: Sequence[str]) -> Budget:
    """The budget of results that are there already, in one order."""
    errors, allowed = {}, {}
    for name, own, ordinary, reference in zip(names, found, plain, exact, strict=True):
        if own.shape != reference.shape:
            raise AssertionError(f"{name} has shape {tuple(own.shape)}, expected {tuple(reference.shape)}")
        errors[name] = _error(own, reference)
        allowed[name] = allowed_error(_error(ordinary, reference), one_rounding(ordinary.dtype))
    return Budget(errors, allowed)


def run(function: Operator, inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """The results of `function` on copies of the inputs, then the gradients of those that take one."""
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted:
        return [each.detach() for each in results]
    generator = torch.Generator().manual_seed(seed)
    upstream = [_signed_eighths(each, generator) for each in results]
    return [*(each.detach() for each in results), *torch.autograd.grad(results, wanted, upstream)]


def _signed_eighths(result: Tensor, generator: torch.Generator) -> Tensor:
    """A gradient for a result: eighths up to 2 and -2 without 0, which every dtype holds exactly."""
    size, sign = (torch.randint(*ends, result.shape, generator=generator) for ends in ((1, 17), (0, 2)))
    return (size * (2 * sign - 1) / 8).to(result.device, result.dtype)


def _wide(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _error(own: Tensor, reference: Tensor) -> float:
    off, size = own.double() - reference.double(), float(reference.double().norm())
    return float(off.norm()) / size if size else float(off.norm())
