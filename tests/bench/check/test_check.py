"""The error budget: one definition, whichever check asks."""

import math

import pytest
import torch

from trainstep.bench.check import accumulated_rounding, allowed_error, one_rounding
from trainstep.bench.check.transfer import PIECE, to_device
from trainstep.precision import PRECISIONS


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_reach_the_gpu_bit_for_bit(dtype):
    """Of several pieces, of none, without dimensions, and not contiguous."""
    many = torch.arange(2 * PIECE // dtype.itemsize + 7).to(dtype)
    for tensor in (many, many[:0], many[5], many[: 2**20].view(2**10, 2**10).T):
        found = to_device(tensor, torch.device("cuda"))
        assert found.is_cuda
        assert torch.equal(found.cpu(), tensor)
