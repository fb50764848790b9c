"""The error budget: one definition, whichever check asks."""

import math

import pytest
import torch

from trainstep.base.precision import PRECISIONS
from trainstep.base.tolerance import accumulated_rounding, allowed_error, larger, one_rounding


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_one_rounding_is_that_of_the_format(dtype, precision):
    assert (
        one_rounding(dtype)
        == one_rounding(precision)
        == 2 * PRECISIONS[precision].unit_roundoff
        == torch.finfo(dtype).eps
    )


def test_tf32_rounds_as_fp16_does():
    assert one_rounding("tf32") == one_rounding(torch.float16)


def test_twice_the_plain_error_plus_one_rounding_is_allowed_and_no_less_than_the_floor():
    assert allowed_error(0.01, 2**-7) == 0.02 + 2**-7
    assert allowed_error(0.01, 2**-7, floor=0.5) == 0.5 + 2**-7
    assert allowed_error(0.3, 2**-7, floor=0.5) == 0.6 + 2**-7
    assert math.isnan(allowed_error(math.nan, 2**-7)), "nothing is within an unknown budget"


def test_roundings_add_up_with_the_root_of_their_number():
    assert accumulated_rounding(2**-24, 900) == pytest.approx(30 * 2**-24)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(1.0, 2.0, 2.0), (2.0, 1.0, 2.0), (math.nan, 1.0, math.inf), (1.0, math.nan, math.inf), (0.0, math.inf, math.inf)],
)
def test_what_is_no_number_is_larger_than_any(a, b, expected):
    assert larger(a, b) == expected
