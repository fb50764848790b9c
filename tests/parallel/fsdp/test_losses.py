"""A loss that reads the head's weight by slices of tokens trains sharded weights as the plain loss does whole ones."""

import pytest
import torch

from tests.parallel.losses import trained, trained_alone

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("checkpointing", ["none", "every-1"])
@pytest.mark.parametrize("scheme", ["fsdp", "torch-fsdp2"])
def test_by_slices_that_are_computed_again(two, scheme, checkpointing):
    expected, losses = trained_alone(2)
    found = two.run(_chunked, scheme, checkpointing)
    for rank, (parameters, last) in enumerate(found):
        assert last == pytest.approx(losses[rank], rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def _chunked(process, scheme, checkpointing):
    return trained(process, scheme, loss="chunked", checkpointing=checkpointing)
