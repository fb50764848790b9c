"""Every tolerance of the checks, with its derivation. Imports no torch, so that a reader of rows uses the same ones.

Errors are relative, ‖x − ref‖ / ‖ref‖, against a reference in a wider precision. A check allows at most twice the error
that the plain computation makes in the same precision, plus one rounding of that precision (`allowed_error`).

Where no plain computation has shown its error yet, the error of N roundings stands in for it: independent roundings
with unit roundoff u add up to about u·√N (Higham & Mary 2019, `accumulated_rounding`).

A norm of n independent errors exceeds its expectation by 1 + z/√(2n) as often as a normal variable exceeds z. With
z = 4 a parameter of one element may be off by four times the plain computation's error, and one of a million by just
that much (`headroom`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainstep.base.precision import PRECISIONS, PrecisionName

if TYPE_CHECKING:
    import torch

HEADROOM = 4.0
"""Standard deviations: with a hundred thousand rows, the largest is about four above the mean."""

VACUOUS = 0.5
"""A tolerance this large, relative, says nothing."""

FLOAT32_LOSES = 6.0
"""Tensor cores multiply float32 as three products of TF32, as fused attention does on a GPU, and cut sums off where
others round. On an H200, gradients of q by PyTorch's fused attention in float32 were off by up to 5.3 times what the
plain formula was, in a model of 2.7 B after ten updates (notebook/lab-log.md, 2026-11-23)."""

ROWS = 2.0
"""A row may be off by twice what a parameter may: another algorithm has its worst of thousands in another row."""

SUMS = 1e-5
"""Sums over a batch in another order may move a buffer by this part of the largest of its module in root mean square.
Gradients were seen to be that far apart on a GPU."""

REPEATS = 1e-3
"""Gradients of one batch and the same weights that are further apart were made by other random numbers: on a GPU, sums
in another order bring them 1e-5 apart."""

ROUNDINGS = 2
"""The same in a narrower precision, in roundings of it: each of two builds may be off by one. Kernels that add up in
any order brought a bf16 Llama of 24 blocks 1.06 apart on an H200; other masks make it 90."""

REPEATED = 8.0
"""Factor by which one parameter's gradients may be further apart than all together, where they are small."""

FLOAT32_AT_MOST = 1e-3
"""Float64's gradients further from float32's than this are of a model that computes something else in float64."""

FLOAT32_ROUNDOFF = 2.0**-24
"""Unit roundoff of float32, in which every optimizer computes. A loss is one number of it: a plain loss that is off by
nothing may be off by half of its last place."""

LOST_BITS = 2.0**10
"""An update's 1 − 0.999 has lost this factor of its digits."""

DRAWS = 3
"""Random roundings that a budget is measured with: their largest error counts."""
MORE_DRAWS = 20
"""At most, twice as many each time, where a step is over its budget: a router that sends a token elsewhere for one
rounding in ten shows by then."""
TRAINING_DRAWS = 8
"""The same for training of some steps that is over its budget: where a ReLU's input is as near to zero as roundings
bring it, a rounding in two decides a neuron's gradients."""
SCRIPT_DRAWS = 8
"""The same for a script, whose runs take minutes, where its gradients are `NEAR` their budget."""
NEAR = 4.0
"""A script's gradients that are over their budget by at most this factor get `SCRIPT_DRAWS`."""


def one_rounding(form: torch.dtype | PrecisionName) -> float:
    """A rounding of numbers near 1, twice the unit roundoff: of a dtype, or of a precision's matmul inputs."""
    if isinstance(form, str):
        return PRECISIONS[form].one_rounding
    import torch

    return torch.finfo(form).eps


def accumulated_rounding(unit: float, count: int) -> float:
    """The relative error that `count` independent roundings with unit roundoff `unit` add up to."""
    return unit * math.sqrt(count)


def allowed_error(plain: float, rounding: float, *, floor: float = 0.0) -> float:
    """At most twice the plain computation's error, plus one rounding.

    Args:
        plain: error of the plain computation in the same precision.
        rounding: `one_rounding` of that precision; for absolute errors, times the size of what is compared.
        floor: an error that is allowed, before the rounding, even where the plain one is less than half of it.
    """
    return max(2 * plain, floor) + rounding


def headroom(count: float) -> float:
    """By which factor a norm of `count` independent errors may exceed its expectation."""
    return 1 + HEADROOM / math.sqrt(2 * count)


def larger(a: float, b: float) -> float:
    """The larger of two differences that roundings make; where they make one no number, they may make any."""
    return math.inf if math.isnan(a) or math.isnan(b) else max(a, b)
