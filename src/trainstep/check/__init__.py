"""Right results: how far a computation may be from its reference, the error budget that every check shares.

Errors are relative, ‖x − ref‖ / ‖ref‖, against a reference in a wider precision. Allowed is at most twice the error
that the plain computation makes in the same precision, plus one rounding of that precision (`allowed_error`).

Where no plain computation has shown its error yet, the error of N roundings stands in for it: independent roundings
with unit roundoff u add up to about u·√N (Higham & Mary 2019, `accumulated_rounding`).
"""

from __future__ import annotations

import math

import torch

from trainstep.base.precision import PRECISIONS, PrecisionName


def one_rounding(form: torch.dtype | PrecisionName) -> float:
    """A rounding of numbers near 1, twice the unit roundoff: of a dtype, or of a precision's matmul inputs."""
    return torch.finfo(form).eps if isinstance(form, torch.dtype) else PRECISIONS[form].one_rounding


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


def larger(a: float, b: float) -> float:
    """The larger of two differences that roundings make; where they make one no number, they may make any."""
    return math.inf if math.isnan(a) or math.isnan(b) else max(a, b)
