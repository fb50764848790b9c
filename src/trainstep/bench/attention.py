"""`trainstep bench attention`: time and memory of attention, forward and backward, case by case over a grid.

Each case is first checked (see `check.attention`); a wrong one gets no time. Then the implementations of one shape are
timed in turns, so that what drifts reaches all alike. Before every pass the L2 cache is overwritten, which also keeps
the device busy while the host launches the pass. Compilation is timed apart, and a compilation that happens during the
timed passes is counted and shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from trainstep.attention import attention, flash_attn
from trainstep.base.config import PhaseContext
from trainstep.base.errors import UnsupportedError
from trainstep.base.stats import summarize
from trainstep.bench.cases import AttentionCase
from trainstep.bench.turns import (
    IN_INTERPRETER,
    Checked,
    by_problem,
    compilations,
    flush_for,
    is_interpreted,
    pass_columns,
    ratio_columns,
    require_interpretable,
    take_turns,
    time_passes,
)
from trainstep.check.attention import (
    NAMES,
    STATISTICS,
    Implementation,
    check,
    deterministic,
    random_inputs,
)
from trainstep.check.verdict import Verdict
from trainstep.measure.environment import describe, gpu_state
from trainstep.measure.memory import GIB, step_memory
from trainstep.measure.outcome import Failure, failed_row
from trainstep.measure.timing import Timing
from trainstep.plan.flops import attention_flops
from trainstep.plan.memory import eager_memory, flash_memory
from trainstep.rows import AttentionRatioRow, AttentionRow
from trainstep.rows.records import Scalar, make_row
from trainstep.step.casting import DTYPES
from trainstep.step.workload import resolve_device

BACKWARD_FLOPS = 2.5
"""Backward over forward: five matrix products for two, the scores recomputed."""

OURS = "flash-triton"

INTERPRETED_SCORE_S = 1e-5
"""Seconds that a score takes forward and backward in Triton's interpreter on one core, by 512 tokens in float32."""
LONGEST_S = 60.0
"""Longest time of one pass in the interpreter."""

COMPILED_IMPLS = ("eager-compiled", "flex", "flex-max-autotune")
"""Made by torch.compile, so that on a CPU their allocations cannot be followed."""


def run_cases(
    cases: Iterable[AttentionCase], *, device: str, warmup: int, passes: int, rounds: int = 1
) -> Iterator[AttentionRow | AttentionRatioRow]:
    """Measure shape by shape and yield the rows of each when they are known; a case that fails, or is wrong, is a row.

    Args:
        warmup: passes before the timed ones, in each round.
        passes: timed passes of a case, divided among the rounds.
        rounds: turns that the implementations of one shape take, each round in an order drawn anew.
    """
    target = resolve_device(device)
    for rows in by_problem(
        cases,
        lambda case: (case.shape, case.causal, case.reach, case.dtype, case.deterministic),
        lambda alike, rounds: _measure_in_turns(alike, target, warmup, passes, rounds),
        warmup=warmup,
        passes=passes,
        rounds=rounds,
    ):
        yield from rows
        yield from ratio_rows(rows)


def _measure_in_turns(
    cases: Sequence[AttentionCase], device: torch.device, warmup: int, passes: int, rounds: int
) -> list[AttentionRow]:
    """The rows of cases of one shape."""
    flush = flush_for(device)
    found = take_turns(
        cases,
        partial(_check, device=device),
        lambda checked, case, count: _time_round(checked, case, flush, warmup, count),
        passes,
        rounds,
    )
    return [_row(case, result, device, rounds) for case, result in found.items()]


def _row(case: AttentionCase, result: Checked | Verdict | Failure, device: torch.device, rounds: int) -> AttentionRow:
    asked = "yes" if case.is_deterministic else None
    columns, environment = asdict(case) | {"window": case.reach, "deterministic": asked}, describe(device)
    row = partial(make_row, AttentionRow, columns, environment=environment)
    if isinstance(result, Failure):  # a case that did not fit is shown beside what it would have needed
        return failed_row(AttentionRow, columns, result, environment, _predicted(case, device))
    if isinstance(result, Verdict):
        allowed: dict[str, Scalar] = {f"{name}_allowed": result.parts[f"{name} all"].allowed for name in NAMES}
        return row(_error_values(result) | allowed, status="wrong", reason=_what_is_wrong(result))
    if not result.is_timed:
        return row(result.values | _predicted(case, device))
    samples, values = pass_columns(result.passes)
    values |= {"rounds": rounds, "recompilations_timed": result.recompilations}
    return row(_time_values(case, samples) | values | result.values | _predicted(case, device), samples=samples)


def ratio_rows(rows: Sequence[AttentionRow]) -> Iterator[AttentionRatioRow]:
    """Our kernels over each other implementation, for rows of one shape and run."""
    timed = [row for row in rows if row.status == "ok" and row.not_timed is None]
    for ours, theirs in ((a, b) for a in timed for b in timed if a.impl == OURS != b.impl):
        values: dict[str, Scalar] = {"rounds": ours.rounds}
        for name in ours.samples:
            values |= ratio_columns(name, ours, theirs)
        yield make_row(AttentionRatioRow, {**ours.case, "peer": theirs.impl}, values, environment=ours.environment)


def _error_values(found: Verdict) -> dict[str, Scalar]:
    in_all: dict[str, Scalar] = {f"{each}_error": found.parts[f"{each} all"].error for each in NAMES}
    return in_all | {"error_share": found.nearest.share, "error_nearest": found.nearest.name}


def _what_is_wrong(found: Verdict) -> str:
    """Each result that is wrong, with the statistic that is furthest beyond what is allowed."""
    worst = [max((found.parts[f"{name} {each}"] for each in STATISTICS), key=lambda part: part.share) for name in NAMES]
    return str(Verdict(parts={part.name: part for part in worst}, faults=found.faults))


def _check(case: AttentionCase, device: torch.device) -> Checked | Verdict:
    def implementation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=case.is_causal, window=case.reach, impl=case.impl)

    if interpreted := case.impl == OURS and is_interpreted(device):
        require_interpretable(case.dtype)
        _require_small(case)
    compiled_before = compilations()
    start = time.perf_counter()
    errors = check(
        implementation, case.shape, DTYPES[case.dtype], device, is_causal=case.is_causal, window=case.reach,
        is_deterministic=case.is_deterministic,
    )  # fmt: skip
    check_s = time.perf_counter() - start
    compiled = compilations() - compiled_before
    if not errors.is_right:
        return errors
    values: dict[str, Scalar] = {
        **({} if interpreted else _memory_values(implementation, case, device)),
        "not_timed": IN_INTERPRETER if interpreted else None,
        "check_s": check_s,
        "compilations": compiled,
        "package": flash_attn.installed()[0] if case.impl == "flash-attn" else None,
        **_error_values(errors),
    }
    return Checked(implementation, values)


def _require_small(case: AttentionCase) -> None:
    """Raise UnsupportedError where a pass in Triton's interpreter takes more than `LONGEST_S`."""
    scores = case.batch * max(case.heads, 1) * max(case.seq, 64) ** 2  # a tile has at least 64 × 64 of them
    if (seconds := scores * INTERPRETED_SCORE_S) > LONGEST_S:
        told = f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.0f} hours"
        raise UnsupportedError(f"in Triton's interpreter a pass takes about {told}; choose --seq 128 --heads 2 there")


def _time_round(checked: Checked, case: AttentionCase, flush: Tensor, warmup: int, passes: int) -> None:
    compiled_before = compilations()
    checked.passes += _time(checked.implementation, case, flush, warmup, passes).samples
    checked.recompilations += compilations() - compiled_before
    checked.values |= gpu_state(flush.device)


def _time(implementation: Implementation, case: AttentionCase, flush: Tensor, warmup: int, passes: int) -> Timing:
    device = flush.device
    q, k, v, do = random_inputs(case.shape, DTYPES[case.dtype], device, seed=2)

    def step(phase: PhaseContext) -> None:
        with phase("forward"):
            o = implementation(q, k, v)
        with phase("backward"):
            torch.autograd.grad(o, (q, k, v), do)

    with deterministic(case.is_deterministic):
        return time_passes(step, flush, warmup, passes)


def _memory_values(implementation: Implementation, case: AttentionCase, device: torch.device) -> dict[str, Scalar]:
    """Memory of one pass with all that it owns allocated inside, so that what was there before can be taken off."""
    if device.type == "cpu" and case.impl in COMPILED_IMPLS:
        return {}

    def step(phase: PhaseContext) -> None:
        with phase("inputs"):
            q, k, v, do = random_inputs(case.shape, DTYPES[case.dtype], device, seed=3)
        with phase("forward"):
            o = implementation(q, k, v)
        with phase("backward"):
            gradients = torch.autograd.grad(o, (q, k, v), do)
        del gradients

    with deterministic(case.is_deterministic):
        peaks = step_memory(step, device, [])
    passes = max(peaks.by_phase["forward"], peaks.by_phase["backward"])  # making the inputs needs float32 copies
    return {
        "before_backward_gib": (peaks.after["forward"] - peaks.before) / GIB,
        "peak_gib": (passes - peaks.before) / GIB,
    }


def _time_values(case: AttentionCase, samples: Mapping[str, list[float]]) -> dict[str, Scalar]:
    heads = max(case.heads, 1)
    forward = attention_flops(
        case.batch, heads, case.seq, case.seq, case.head_dim, is_causal=case.is_causal, window=case.reach
    )
    flops = {"forward": forward, "backward": BACKWARD_FLOPS * forward, "both": (1 + BACKWARD_FLOPS) * forward}
    values: dict[str, Scalar] = {}
    for name, milliseconds in samples.items():
        summary = summarize(milliseconds)
        values |= {**summary.columns(name), f"{name}_tflops": flops[name] / summary.median / 1e9}
    return values


def _predicted(case: AttentionCase, device: torch.device) -> dict[str, Scalar]:
    """Predictions of the formulas for the case's memory, for the implementations they describe."""
    sizes = (case.batch, max(case.heads, 1), case.seq, case.head_dim, DTYPES[case.dtype].itemsize)
    if case.impl == "eager":
        memory = eager_memory(*sizes, is_causal=case.is_causal, on_gpu=device.type == "cuda")
    elif case.impl == "flash-triton":
        from trainstep.attention.flash import sums_dq_in_any_order  # here: it loads Triton

        q = torch.empty((0, case.head_dim), dtype=DTYPES[case.dtype], device=device)
        on_hopper = device.type == "cuda" and case.reach is None
        with deterministic(case.is_deterministic):
            memory = flash_memory(*sizes, sums_dq=on_hopper and sums_dq_in_any_order(q))
    else:
        return {}
    return {
        "predicted_before_backward_gib": memory.before_backward / GIB,
        "predicted_peak_gib": memory.peak / GIB,
        "score_matrices_at_peak": memory.score_matrices,
    }
