"""Forward and backward of one operator: whether it is right, and a pass to time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trainstep.base.config import PhaseContext
from trainstep.bench.cases import FusedCase
from trainstep.bench.fused.problems import PROBLEMS, Problem
from trainstep.check.fused import Budget, Operator, check, compare, expected, run
from trainstep.step.casting import DTYPES

CHECK_TOKENS, LAST_TOKENS = 1024, 64


def judge(case: FusedCase, implementation: Operator, device: torch.device) -> Budget:
    """All results and gradients on `CHECK_TOKENS` tokens; where the case has more, also the last ones of all of those.

    The second is about addresses, which grow with the size: results of the last `LAST_TOKENS` tokens, and the gradients
    of their inputs, must be what the oracle makes of these tokens alone.
    """
    problem, tokens = PROBLEMS[case.operator], case.sizes.tokens
    inputs = _inputs(case, min(tokens, CHECK_TOKENS), device)
    budget = check(implementation, problem.oracle, inputs, problem.names)
    if tokens <= CHECK_TOKENS or not budget.within:
        return budget
    last = _judge_last(problem, implementation, _inputs(case, tokens, device), tokens)
    return max(budget, last, key=lambda each: each.share(each.nearest))


def step_of(case: FusedCase, implementation: Operator, device: torch.device) -> Callable[[PhaseContext], None]:
    """A pass over inputs that are made here."""
    inputs = _inputs(case, case.sizes.tokens, device)
    leaves = [each for each in inputs if each.requires_grad]
    with torch.no_grad():
        results = implementation(*inputs)
    upstream = [torch.ones_like(each) for each in (results if isinstance(results, tuple) else (results,))]
    del results

    def step(phase: PhaseContext) -> None:
        with phase("forward"):
            found = implementation(*inputs)
        with phase("backward"):
            torch.autograd.grad(found, leaves, upstream)

    return step


def _inputs(case: FusedCase, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(1)
    dtype = DTYPES[case.dtype]

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(shape, device=device, generator=generator, dtype=torch.float32)
        return numbers.to(dtype).requires_grad_()

    return PROBLEMS[case.operator].inputs(case.sizes, tokens, draw)


def _judge_last(problem: Problem, implementation: Operator, inputs: tuple[Tensor, ...], tokens: int) -> Budget:
    found, upstream = run(implementation, inputs, seed=2)
    end = partial(_end, tokens=tokens)
    along = problem.by_token[0]  # results are along the same dimension
    part = [
        end(each, problem.by_token[place]) if place in problem.by_token else each for place, each in enumerate(inputs)
    ]
    n_results = len(upstream)
    if not problem.mean_of_tokens:
        upstream = [end(each, along) for each in upstream]
    plain, exact = expected(problem.oracle, part, upstream)
    places = [place for place, each in enumerate(inputs) if each.requires_grad]
    kept = [] if problem.mean_of_tokens else [(number, along) for number in range(n_results)]
    kept += [
        (n_results + number, problem.by_token[place])
        for number, place in enumerate(places)
        if place in problem.by_token
    ]
    share = LAST_TOKENS / tokens if problem.mean_of_tokens else 1.0  # of the mean that these tokens are
    return compare(
        [end(found[number], dimension) for number, dimension in kept],
        [plain[number] * share for number, _ in kept],
        [exact[number] * share for number, _ in kept],
        [f"{problem.names[number]} of the last tokens" for number, _ in kept],
    )


def _end(tensor: Tensor, dimension: int, tokens: int) -> Tensor:
    return tensor.detach().narrow(dimension, tokens - LAST_TOKENS, LAST_TOKENS).requires_grad_(tensor.requires_grad)
