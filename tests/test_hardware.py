import pytest

from trainstep.errors import UsageError
from trainstep.hardware import DEVICES, find_device, require_device


def test_the_h200_of_the_datasheet():
    h200 = require_device("H200")
    assert h200 is find_device("NVIDIA H200")
    assert h200.peak_tflops("bf16") == h200.peak_tflops("fp16") == h200.peak_tflops("bf16-pure") == 989.4
    assert h200.peak_tflops("tf32") == 494.7
    assert h200.peak_tflops("fp32") == 67


@pytest.mark.parametrize("spec", DEVICES.values(), ids=lambda spec: spec.name)
def test_every_device_is_plausible_and_sourced(spec):
    assert spec.fp32_tflops <= spec.tf32_tflops <= spec.bf16_tflops
    assert spec.bandwidth_gb_s > 100
    assert spec.source


def test_unknown_and_ambiguous_names():
    with pytest.raises(UsageError, match="'TPU' is not a known device; expected one of: NVIDIA H200"):
        require_device("TPU")
    with pytest.raises(UsageError, match="matches more than one device"):
        require_device("A100")
    assert find_device("A100") is None
