"""The fused loss with a head whose weight is sharded: ours and FSDP2."""

import pytest
import torch

from tests.fused.places import DEVICE, HERE
from tests.parallel.losses import trained, trained_alone
from tests.workers import Workers

GPUS = torch.cuda.device_count() if DEVICE == "cuda" and torch.cuda.is_available() else 2
pytestmark = [*HERE, pytest.mark.distributed, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs; there are {GPUS}")]


def _fused(process, scheme):
    return trained(process, scheme, loss="fused", checkpointing="every-1")


@pytest.mark.parametrize("scheme", ["fsdp", pytest.param("torch-fsdp2", marks=pytest.mark.thorough)])
def test_trains_as_one_process_with_the_plain_loss(scheme) -> None:
    expected, losses = trained_alone(2, DEVICE)
    with Workers(2, device=DEVICE) as workers:
        found = workers.run(_fused, scheme)
    for rank, (parameters, last) in enumerate(found):
        assert last == pytest.approx(losses[rank], rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)
