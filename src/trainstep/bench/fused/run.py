"""Cases of `bench fused` → rows: each checked, then timed in turns with the others of its operator, shape and dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from trainstep.base.config import PhaseContext, no_phases
from trainstep.base.stats import summarize
from trainstep.bench.cases import FusedCase
from trainstep.bench.fused import problems
from trainstep.bench.fused.problems import PROBLEMS, Problem
from trainstep.bench.turns import (
    IN_INTERPRETER,
    Checked,
    by_problem,
    compilations,
    flush_for,
    is_interpreted,
    pass_columns,
    ratio_columns,
    take_turns,
    time_passes,
)
from trainstep.check.fused import Operator, check, compare, expected, run
from trainstep.check.verdict import Verdict
from trainstep.fused import liger
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.memory import GIB, step_memory
from trainstep.measure.outcome import Failure, failed_row
from trainstep.rows import FusedRatioRow, FusedRow
from trainstep.rows.records import Scalar, make_row
from trainstep.step.casting import DTYPES
from trainstep.step.workload import resolve_device


def run_cases(
    cases: Iterable[FusedCase], *, device: str, warmup: int, passes: int, rounds: int = 1
) -> Iterator[FusedRow | FusedRatioRow]:
    """Measure problem by problem and yield the rows of each when they are known; what fails, or is wrong, is a row.

    Args:
        warmup: passes before the timed ones, in each round.
        passes: timed passes of a case, divided among the rounds.
        rounds: turns that the implementations of a problem take, each round in an order drawn anew.
    """
    target = resolve_device(device)
    for rows in by_problem(
        cases,
        lambda case: (case.operator, case.shape, case.dtype),
        lambda alike, rounds: _measure(alike, target, warmup, passes, rounds),
        warmup=warmup,
        passes=passes,
        rounds=rounds,
    ):
        yield from rows
        yield from ratio_rows(rows)


def _measure(cases: Sequence[FusedCase], device: torch.device, warmup: int, passes: int, rounds: int) -> list[FusedRow]:
    flush = flush_for(device)

    def time_round(checked: Checked, case: FusedCase, count: int) -> None:
        before = compilations()
        step = step_of(case, checked.implementation, device)
        checked.passes += time_passes(step, flush, warmup, count).samples
        checked.recompilations += compilations() - before
        checked.values |= gpu_state(device)

    found = take_turns(cases, partial(_check, device=device), time_round, passes, rounds)
    return [_row(case, result, device, rounds) for case, result in found.items()]


def _check(case: FusedCase, device: torch.device) -> Checked | Verdict:
    before, start = compilations(), time.perf_counter()
    implementation = problems.implementation_of(case, device)
    budget = judge(case, implementation, device)
    check_s = time.perf_counter() - start
    if not budget.is_right:
        return budget
    step = step_of(case, implementation, device)
    values: dict[str, Scalar] = {
        **_memory_values(step, device),
        **_error_values(budget),
        "check_s": check_s,
        "compilations": compilations() - before,
        "package": _package(case),
        "not_timed": IN_INTERPRETER if case.impl == "ours" and is_interpreted(device) else None,
    }
    return Checked(implementation, values)


def _package(case: FusedCase) -> str | None:
    return liger.installed()[0] if case.impl.startswith("liger") else None


def _memory_values(step: Callable[[PhaseContext], None], device: torch.device) -> dict[str, Scalar]:
    """Memory of one pass after one that made what is made once; on a GPU alone."""
    if device.type == "cpu":
        return {}
    step(no_phases)
    peaks = step_memory(step, device, [])
    left = peaks.after["forward"] - peaks.before
    return {"before_backward_gib": left / GIB, "peak_gib": (peaks.peak - peaks.before) / GIB}


def _error_values(found: Verdict) -> dict[str, Scalar]:
    return {"error_share": found.nearest.share, "error_nearest": found.nearest.name}


def _row(case: FusedCase, result: Checked | Verdict | Failure, device: torch.device, rounds: int) -> FusedRow:
    columns = {"operator": case.operator, "impl": case.impl, "shape": case.shape, "dtype": case.dtype}
    columns |= asdict(case.sizes)
    environment = describe(device)
    row = partial(make_row, FusedRow, columns, environment=environment)
    if isinstance(result, Failure):
        return failed_row(FusedRow, columns, result, environment)
    if isinstance(result, Verdict):
        errors = _error_values(result)
        finite = {name: value for name, value in errors.items() if value != float("inf")}
        return row(finite, status="wrong", reason=str(result))
    if not result.is_timed:
        return row(result.values)
    samples, values = pass_columns(result.passes)
    values |= {"rounds": rounds, "recompilations_timed": result.recompilations}
    for name, milliseconds in samples.items():
        values |= summarize(milliseconds).columns(name)
    return row(values | result.values, samples=samples)


def ratio_rows(rows: Sequence[FusedRow]) -> Iterator[FusedRatioRow]:
    """Our operator over each other implementation, for rows of one problem and run."""
    timed = [row for row in rows if row.status == "ok" and row.not_timed is None]
    for ours, theirs in ((a, b) for a in timed for b in timed if a.impl == "ours" != b.impl):
        values: dict[str, Scalar] = {"rounds": ours.rounds}
        for name in ours.samples:
            values |= ratio_columns(name, ours, theirs)
        yield make_row(FusedRatioRow, {**ours.case, "peer": theirs.impl}, values, environment=ours.environment)


# Forward and backward of one operator: whether it is right, and a pass to time.
CHECK_TOKENS, LAST_TOKENS = 1024, 64


def judge(case: FusedCase, implementation: Operator, device: torch.device) -> Verdict:
    """All results and gradients on `CHECK_TOKENS` tokens; where the case has more, also the last ones of all of those.

    The second is about addresses, which grow with the size: results of the last `LAST_TOKENS` tokens, and the gradients
    of their inputs, must be what the oracle makes of these tokens alone.
    """
    problem, tokens = PROBLEMS[case.operator], case.sizes.tokens
    inputs = _inputs(case, min(tokens, CHECK_TOKENS), device)
    budget = check(implementation, problem.oracle, inputs, problem.names)
    if tokens <= CHECK_TOKENS or not budget.is_right:
        return budget
    last = _judge_last(problem, implementation, _inputs(case, tokens, device), tokens)
    return max(budget, last, key=lambda each: each.nearest.share)


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


def _judge_last(problem: Problem, implementation: Operator, inputs: tuple[Tensor, ...], tokens: int) -> Verdict:
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
