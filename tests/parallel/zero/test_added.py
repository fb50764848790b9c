"""Gradients and states of the sharded optimizer that are set, kept or thrown away by hand; `odd.added` has more."""

import copy

import pytest
import torch
from torch import nn

from trainstep.base.errors import UsageError
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.distributed

WIDTH, ROWS = 4, 6


def _loss(module, rank, step):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return module(x).tanh().square().mean()


def _not_finished(process):
    module = nn.Linear(WIDTH, 2)
    ddp = DistributedDataParallel(module)
    sharded = ShardedOptimizer(module.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
    _loss(ddp, process.rank, 0).backward()
    ddp.finish_gradient_synchronization()
    sharded.step()
    for set_to_none in (False, True):
        sharded.zero_grad(set_to_none=set_to_none)
        with ddp.no_sync():
            _loss(ddp, process.rank, 1).backward()
        with pytest.raises(UsageError, match="before gradients were averaged"):
            sharded.step()


def test_a_step_after_backward_in_no_sync_alone_is_refused(two):
    two.run(_not_finished)


def _halves(process):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    plain = copy.deepcopy(module)
    ddp = DistributedDataParallel(module)
    both = [ShardedOptimizer(part.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1) for part in module]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        _loss(ddp, process.rank, step).backward()
        ddp.finish_gradient_synchronization()
        (sum(_loss(plain, rank, step) for rank in range(2)) / 2).backward()
        for each in (*both, optimizer):
            each.step()
            each.zero_grad()
    return [each.detach() for each in module.parameters()], [each.detach() for each in plain.parameters()]


def test_two_optimizers_divide_the_gradients_of_one_wrapper(two):
    for found, expected in two.run(_halves):
        torch.testing.assert_close(found, expected)


def _set_by_hand(process):
    """A step of gradients that have other strides than their parameters."""
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    plain = copy.deepcopy(module)
    sharded = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    gradient = torch.randn(WIDTH, WIDTH)
    module.weight.grad, plain.weight.grad = gradient.t().contiguous().t(), gradient
    sharded.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return module.weight.detach(), plain.weight.detach()


def test_gradients_of_other_strides(two):
    for found, expected in two.run(_set_by_hand):
        torch.testing.assert_close(found, expected)


def _snapshot(process):
    module = nn.Linear(WIDTH, 2)
    sharded = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    counts = []
    for _ in range(2):
        _loss(module, 0, 0).backward()
        sharded.step()
        counts.append(sharded.full_state_dict())
    return [[float(each["step"]) for each in state["state"].values()] for state in counts if state]


def test_a_full_state_is_a_copy(two):
    first, _ = two.run(_snapshot)
    assert first == [[1.0, 1.0], [2.0, 2.0]]
