"""Is a fused operator right? Its results and gradients against float64, on the same inputs.

An implementation and its oracle are functions of the same tensors, and are differentiated by those that require it.
Errors are ‖x − ref‖ / ‖ref‖ against the oracle in float64; allowed is twice the error of the oracle in the inputs' own
dtype, which is plain PyTorch, plus one rounding of that dtype (`allowed_error`). Of what should be 0 both are absolute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from trainstep.base.operators import Fused, Sizes, function_at
from trainstep.base.tolerance import allowed_error, one_rounding
from trainstep.check.verdict import Part, Verdict

Operator = Callable[..., Tensor | tuple[Tensor, ...]]
"""Function of the inputs in their order; it may return several results."""
CHECK_TOKENS, LAST_TOKENS = 1024, 64


def check_operator(
    entry: Fused, implementation: Operator, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """All results and gradients on `CHECK_TOKENS` tokens; where there are more, also the last ones of all of those.

    The second is about addresses, which grow with the size: results of the last `LAST_TOKENS` tokens, and the gradients
    of their inputs, must be what the oracle makes of these tokens alone.
    """
    oracle = oracle_of(entry)
    verdict = check(implementation, oracle, inputs_of(entry, sizes, CHECK_TOKENS, dtype, device), entry.names)
    if sizes.tokens <= CHECK_TOKENS or not verdict.is_right:
        return verdict
    last = _check_last(entry, implementation, inputs_of(entry, sizes, sizes.tokens, dtype, device), sizes.tokens)
    return max(verdict, last, key=lambda each: each.nearest.share)


def oracle_of(entry: Fused) -> Operator:
    """The function that an operator is held against."""
    return cast(Operator, function_at(f"fused.eager:{entry.oracle}"))


def inputs_of(entry: Fused, sizes: Sizes, most: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Random inputs of an operator, the same every time, of at most so many tokens."""
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(shape, device=device, generator=generator, dtype=torch.float32)
        return numbers.to(dtype).requires_grad_()

    made = function_at(f"fused.eager:{entry.inputs}")(sizes, min(sizes.tokens, most), draw)
    return cast(tuple[Tensor, ...], made)


def _check_last(entry: Fused, implementation: Operator, inputs: tuple[Tensor, ...], tokens: int) -> Verdict:
    found, upstream = run(implementation, inputs, seed=2)
    along = entry.by_token[0]  # results are along the same dimension

    def end(tensor: Tensor, dimension: int) -> Tensor:
        part = tensor.detach().narrow(dimension, tokens - LAST_TOKENS, LAST_TOKENS)
        return part.requires_grad_(tensor.requires_grad)

    part = [end(each, entry.by_token[place]) if place in entry.by_token else each for place, each in enumerate(inputs)]
    n_results = len(upstream)
    if not entry.mean_of_tokens:
        upstream = [end(each, along) for each in upstream]
    plain, exact = expected(oracle_of(entry), part, upstream)
    # Results of these tokens, and gradients by the inputs that have a row for each.
    kept = [] if entry.mean_of_tokens else [(number, along) for number in range(n_results)]
    places = [place for place, each in enumerate(inputs) if each.requires_grad]
    for number, place in enumerate(places, n_results):
        if place in entry.by_token:
            kept.append((number, entry.by_token[place]))
    share = LAST_TOKENS / tokens if entry.mean_of_tokens else 1.0  # of the mean that these tokens are
    return compare(
        [end(found[number], dimension) for number, dimension in kept],
        [plain[number] * share for number, _ in kept],
        [exact[number] * share for number, _ in kept],
        [f"{entry.names[number]} of the last tokens" for number, _ in kept],
    )


def check(
    implementation: Operator, oracle: Operator, inputs: Sequence[Tensor], names: Sequence[str], seed: int = 2
) -> Verdict:
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


def compare(found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], names: Sequence[str]) -> Verdict:
    """The verdict on results that are there already, in one order."""
    parts = {}
    for name, own, ordinary, reference in zip(names, found, plain, exact, strict=True):
        if own.shape != reference.shape:
            raise AssertionError(f"{name} has shape {tuple(own.shape)}, expected {tuple(reference.shape)}")
        allowed = allowed_error(_error(ordinary, reference), one_rounding(ordinary.dtype))
        # Where plain torch has no finite error, nothing is right.
        parts[name] = Part(_error(own, reference), allowed if math.isfinite(allowed) else math.nan, name)
    return Verdict(parts=parts)


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
