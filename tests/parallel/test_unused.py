"""A gradient that is there stays, where allow_unused lets a later backward bring none."""

import copy

import pytest
import torch
from torch import nn

from trainstep.parallel import DistributedDataParallel

pytestmark = pytest.mark.distributed


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, use):
        return self.always(x) + (self.sometimes(x) if use else 0)


def _unused_later(process, how):
    """Weights after steps whose second backward leaves a layer out, beside one process's."""
    torch.manual_seed(0)
    module = Sometimes()
    plain = copy.deepcopy(module)
    ddp = DistributedDataParallel(module, allow_unused=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (module, plain)]
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for _ in range(2):
        for use in (True, False):
            ddp(inputs[process.rank], use).square().mean().backward()
            ddp.finish_gradient_synchronization()
            (sum(plain(x, use).square().mean() for x in inputs) / 2).backward()
            if how == "kept at zero":
                for each in optimizers:
                    each.step()
                    each.zero_grad(set_to_none=False)
        if how == "finished twice":
            for each in optimizers:
                each.step()
                each.zero_grad()
    return [each.detach() for each in module.parameters()], [each.detach() for each in plain.parameters()]


@pytest.mark.parametrize("how", ["kept at zero", "finished twice"])
def test_a_gradient_that_is_there_stays_where_a_backward_brings_none(two, how):
    for found, expected in two.run(_unused_later, how):
        torch.testing.assert_close(found, expected)
