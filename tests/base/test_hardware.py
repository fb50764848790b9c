import re
from pathlib import Path

import pytest

from trainstep.base.errors import UsageError
from trainstep.base.hardware import DEVICES, find_device, require_device
from trainstep.rows.records import read_records

RESULTS = Path(__file__).parents[2] / "docs" / "results"


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


def test_an_h200_has_the_memory_that_measured_rows_name():
    rows = [row for path in RESULTS.glob("h200-analyze-*.jsonl") for row in read_records(path)]
    reported = {row.environment["device_memory_gib"] for row in rows}
    assert reported == {require_device("NVIDIA H200").memory_gib}


NAMED = [(spec, int(found[1])) for spec in DEVICES.values() if (found := re.search(r"(\d+)GB", spec.name))]


@pytest.mark.parametrize(("spec", "size"), NAMED, ids=lambda value: getattr(value, "name", None))
def test_the_size_in_a_name_is_nearly_in_gib(spec, size):
    """A vendor's GB is a GiB, of which the driver keeps one or two percent."""
    assert len(NAMED) >= 5
    assert 0.98 * size < spec.memory_gib < size


def test_unknown_and_ambiguous_names():
    with pytest.raises(UsageError, match=r"'TPU' is not a known device; .* only one of these has: 'NVIDIA H200"):
        require_device("TPU")
    with pytest.raises(UsageError, match="matches more than one device"):
        require_device("A100")
    assert find_device("A100") is None
