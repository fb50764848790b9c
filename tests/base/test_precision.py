"""The list of precisions against torch: dtypes, autocast, unit roundoff."""

from typing import get_args

import pytest
import torch

from trainstep.base.errors import UnsupportedError
from trainstep.base.precision import PRECISIONS, PrecisionName, Rate
from trainstep.step.casting import DTYPES, autocast_dtype, check_precision, stored_dtype


def test_the_literal_is_the_list():
    assert get_args(PrecisionName) == tuple(PRECISIONS)


@pytest.mark.parametrize("name", PRECISIONS)
def test_properties_are_torchs(name):
    entry, dtype = PRECISIONS[name], DTYPES[name]
    assert (entry.computed_bytes, entry.stored_bytes) == (dtype.itemsize, getattr(torch, entry.stored).itemsize)
    assert autocast_dtype(name) == (dtype if name in ("bf16", "fp16") else None)
    assert stored_dtype(name) == (torch.bfloat16 if name == "bf16-pure" else None)
    assert entry.needs_scaler == (torch.finfo(dtype).smallest_normal > 1e-30), "its exponent is shorter than float32's"
    assert entry.rate in get_args(Rate)
    rounding = 2.0**-11 if entry.uses_tf32 else torch.finfo(dtype).eps / 2
    assert entry.unit_roundoff == rounding


def test_tf32_is_not_a_cpus():
    with pytest.raises(UnsupportedError, match="tf32 needs an NVIDIA GPU"):
        check_precision("tf32", torch.device("cpu"))
    for name in ("fp32", "bf16", "fp16", "bf16-pure"):
        check_precision(name, torch.device("cpu"))
