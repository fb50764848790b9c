"""`trainstep bench attention`: time and memory of attention, forward and backward, case by case over a grid.

`check.attention` checks each case, and `bench.turns` times the implementations of one shape in turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch

from trainstep.attention import attention, flash_attn
from trainstep.base.config import PhaseContext
from trainstep.base.errors import UnsupportedError
from trainstep.base.operators import ATTENTION
from trainstep.bench.cases import AttentionCase
from trainstep.bench.turns import IN_INTERPRETER, Pass, Turns, require_interpretable
from trainstep.check.attention import NAMES, STATISTICS, Implementation, check, deterministic, random_inputs
from trainstep.check.verdict import Verdict
from trainstep.measure.memory import GIB, step_memory
from trainstep.measure.step import is_interpreted
from trainstep.plan.flops import attention_flops
from trainstep.plan.memory import eager_memory, flash_memory
from trainstep.rows import AttentionRatioRow, AttentionRow
from trainstep.rows.records import Scalar
from trainstep.step.casting import DTYPES

BACKWARD_FLOPS = 2.5
"""Backward over forward: five matrix products for two, the scores recomputed."""

OURS = "flash-triton"

INTERPRETED_SCORE_S = 1e-5
"""Seconds that a score takes forward and backward in Triton's interpreter on one core, by 512 tokens in float32."""
LONGEST_S = 60.0
"""Longest time of one pass in the interpreter."""


class AttentionTurns(Turns[AttentionCase]):
    """`bench attention`: the implementations of one shape in turns."""

    row, ratio, ours = AttentionRow, AttentionRatioRow, OURS

    def problem(self, case: AttentionCase) -> Hashable:
        return case.shape, case.causal, case.reach, case.dtype, case.deterministic

    def columns(self, case: AttentionCase) -> Mapping[str, Scalar]:
        return asdict(case) | {"window": case.reach, "deterministic": "yes" if case.is_deterministic else None}

    def implementation(self, case: AttentionCase) -> Implementation:
        if case.impl == OURS and is_interpreted(self.device):
            require_interpretable(case.dtype)
            _require_small(case)
        return lambda q, k, v: attention(q, k, v, is_causal=case.is_causal, window=case.reach, impl=case.impl)

    def verdict(self, case: AttentionCase, implementation: Implementation) -> Verdict:
        asked: dict[str, Any] = {"is_causal": case.is_causal, "window": case.reach}
        asked["is_deterministic"] = case.is_deterministic
        return check(implementation, case.shape, DTYPES[case.dtype], self.device, **asked)

    def errors(self, verdict: Verdict) -> dict[str, Scalar]:
        return {f"{each}_error": verdict.parts[f"{each} all"].error for each in NAMES} | super().errors(verdict)

    def wrong(self, verdict: Verdict) -> tuple[Mapping[str, Scalar], str]:
        """Each result that is wrong, with the statistic that is furthest beyond what is allowed."""
        allowed: dict[str, Scalar] = {f"{name}_allowed": verdict.parts[f"{name} all"].allowed for name in NAMES}
        parts = [[verdict.parts[f"{name} {each}"] for each in STATISTICS] for name in NAMES]
        worst = {part.name: part for each in parts if (part := max(each, key=lambda part: part.share))}
        return self.errors(verdict) | allowed, str(Verdict(parts=worst, faults=verdict.faults))

    def values(self, case: AttentionCase, implementation: Implementation) -> Mapping[str, Scalar]:
        package = flash_attn.installed()[0] if case.impl == "flash-attn" else None
        if case.impl == OURS and is_interpreted(self.device):
            return {"not_timed": IN_INTERPRETER}
        return {**_memory_values(implementation, case, self.device), "package": package}

    def predicted(self, case: AttentionCase) -> Mapping[str, Scalar]:
        """Predictions of the formulas for the case's memory, for the implementations they describe."""
        sizes = (case.batch, max(case.heads, 1), case.seq, case.head_dim, DTYPES[case.dtype].itemsize)
        if case.impl == "eager":
            memory = eager_memory(*sizes, is_causal=case.is_causal, on_gpu=self.device.type == "cuda")
        elif case.impl == "flash-triton":
            from trainstep.attention.flash import sums_dq_in_any_order  # here: it loads Triton

            q = torch.empty((0, case.head_dim), dtype=DTYPES[case.dtype], device=self.device)
            on_hopper = self.device.type == "cuda" and case.reach is None
            with deterministic(case.is_deterministic):
                memory = flash_memory(*sizes, sums_dq=on_hopper and sums_dq_in_any_order(q))
        else:
            return {}
        return {
            "predicted_before_backward_gib": memory.before_backward / GIB,
            "predicted_peak_gib": memory.peak / GIB,
            "score_matrices_at_peak": memory.score_matrices,
        }

    def rates(self, case: AttentionCase, name: str, milliseconds: float) -> Mapping[str, Scalar]:
        sizes = (case.batch, max(case.heads, 1), case.seq, case.seq, case.head_dim)
        forward = attention_flops(*sizes, is_causal=case.is_causal, window=case.reach)
        factor = {"forward": 1, "backward": BACKWARD_FLOPS, "both": 1 + BACKWARD_FLOPS}[name]
        return {f"{name}_tflops": factor * forward / milliseconds / 1e9}

    def step(self, case: AttentionCase, implementation: Implementation) -> Pass:
        q, k, v, do = random_inputs(case.shape, DTYPES[case.dtype], self.device, seed=2)

        def step(phase: PhaseContext) -> None:
            with phase("forward"):
                o = implementation(q, k, v)
            with phase("backward"):
                torch.autograd.grad(o, (q, k, v), do)

        return step

    def around(self, case: AttentionCase) -> AbstractContextManager[None]:
        return deterministic(case.is_deterministic)


def _require_small(case: AttentionCase) -> None:
    """Raise UnsupportedError where a pass in Triton's interpreter takes more than `LONGEST_S`."""
    scores = case.batch * max(case.heads, 1) * max(case.seq, 64) ** 2  # a tile has at least 64 × 64 of them
    if (seconds := scores * INTERPRETED_SCORE_S) > LONGEST_S:
        told = f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.0f} hours"
        raise UnsupportedError(f"in Triton's interpreter a pass takes about {told}; choose --seq 128 --heads 2 there")


def _memory_values(implementation: Implementation, case: AttentionCase, device: torch.device) -> dict[str, Scalar]:
    """Memory of one pass with all that it owns allocated inside, so that what was there before can be taken off."""
    if device.type == "cpu" and case.impl != "auto" and ATTENTION[case.impl].is_compiled:
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
