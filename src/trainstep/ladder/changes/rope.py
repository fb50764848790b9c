"""Rotary positions by our kernel, in workloads: no script that was measured gained by it."""

from __future__ import annotations

from trainstep.base.advice import Line
from trainstep.ladder.change import Change

ROPE = Change(
    "fused RoPE",
    Line("trainstep.fused.rope(q, k, cos, sin)", "in place of the same written out, after import trainstep.fused"),
    {"cuda": 1.02},
    step={"fused": "rope"},
    step_if=lambda source, base: source.is_builtin,
    where=("cuda",),
)
