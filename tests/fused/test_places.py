"""Where the operators run, and that they say so where they do not."""

import pytest
import torch

from trainstep.base.errors import UnsupportedError
from trainstep.fused.operators import require_device
from trainstep.fused.triton import INTERPRETED

REFUSED = """
import torch
from trainstep.base.errors import UnsupportedError
from trainstep.fused import linear_cross_entropy, rope
x = torch.ones(1, 1, 2, 2)
for call in (
    lambda: rope(x, x, x[0, 0, :, :1], x[0, 0, :, :1]),
    lambda: linear_cross_entropy(x, torch.nn.Linear(2, 3, bias=False), torch.zeros(1, 1, 2, dtype=torch.int64)),
):
    try:
        call()
    except UnsupportedError as error:
        assert "runs on NVIDIA GPUs, and this is cpu" in str(error), error
    else:
        raise AssertionError("it ran")
"""


def test_they_are_refused_on_a_cpu_without_the_interpreter() -> None:
    if INTERPRETED:
        require_device("it", torch.device("cpu"))
        return
    exec(REFUSED, {})


@pytest.mark.parametrize("version", [(7, 5), (6, 0)])
def test_old_gpus_are_refused(monkeypatch, version) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
    with pytest.raises(UnsupportedError, match=r"needs compute capability 8.0 \(Ampere\) or newer, cuda has"):
        require_device("it", torch.device("cuda"))
