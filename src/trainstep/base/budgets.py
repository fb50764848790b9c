"""Allowances for rounding that every comparison adds to measured ones: factors that do not depend on the compared
values.

Imports no torch, so that what only reads rows can judge by the same factors.
"""

from __future__ import annotations

import math

HEADROOM = 4.0
"""Standard deviations: with a hundred thousand rows, the largest is about four above the mean."""

VACUOUS = 0.5
"""A result that may be off by this share of its own size says nothing."""

FLOAT32_LOSES = 6.0
"""Tensor cores multiply float32 as three products of TF32, as fused attention does on a GPU, and cut sums off where
others round. On an H200, gradients of q by PyTorch's fused attention in float32 were off by up to 5.3 times what the
plain formula was, in a model of 2.7 B after ten updates (docs/lab-log.md, 2026-11-23)."""


def headroom(count: float) -> float:
    """By which factor a norm of `count` independent errors may exceed its expectation."""
    return 1 + HEADROOM / math.sqrt(2 * count)
