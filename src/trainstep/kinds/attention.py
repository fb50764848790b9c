"""Rows of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainstep.kinds.shared import GpuState
from trainstep.records import Times, setting, times


@dataclass(frozen=True, kw_only=True)
class AttentionRow(GpuState):
    """One case of `bench attention`: times of forward, backward and both, memory, and errors against float64."""

    kind: ClassVar[str] = "attention"
    impl: str = setting()
    batch: int = setting()
    heads: int = setting()
    seq: int = setting()
    head_dim: int = setting()
    causal: str = setting()
    """yes or no."""
    dtype: str = setting()
    times: Mapping[str, Times] = times()
    n: int | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    """Backward counts as 2.5 forwards, causal attention as half."""
    both_tflops: float | None = None
    before_backward_gib: float | None = None
    peak_gib: float | None = None
    check_s: float | None = None
    compilations: int | None = None
    recompilations_timed: int | None = None
    o_error: float | None = None
    dq_error: float | None = None
    dk_error: float | None = None
    dv_error: float | None = None
    o_allowed: float | None = None
    """The error budget, where the result was wrong."""
    dq_allowed: float | None = None
    dk_allowed: float | None = None
    dv_allowed: float | None = None
    predicted_before_backward_gib: float | None = None
    predicted_peak_gib: float | None = None
    score_matrices_at_peak: float | None = None
