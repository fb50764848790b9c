"""What backward adds to gradients that are there, beside one process: kept at zero, finished twice, or thrown away."""

import copy

import pytest
import torch
from torch import nn

from trainstep.base.errors import UsageError
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.distributed

WIDTH, ROWS = 4, 6


class Einsum(nn.Module):
    """The gradient comes with the weight's strides turned around."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x):
        return torch.einsum("bi,oi->bo", x, self.weight)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(ROWS, WIDTH).t()), nn.Parameter(torch.randn(ROWS, 2))

    def forward(self, x):
        return torch.tanh(torch.einsum("bi,ij->bj", x, self.weight)) @ self.last


class OneForThree(nn.Module):
    """One tensor is the gradient of two parameters, and of the output that the first layer's is computed from."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2)
        self.one, self.other = nn.Parameter(torch.randn(ROWS, 2)), nn.Parameter(torch.randn(ROWS, 2))

    def forward(self, x):
        return self.first(x) + self.one + self.other


class Expanded(nn.Module):
    """The gradient is one number, seen many times."""

    def __init__(self):
        super().__init__()
        self.first, self.summed = nn.Linear(WIDTH, 2), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x):
        return self.first(x) + self.summed.sum()


MODELS = [Einsum, Transposed, OneForThree, Expanded]


def _loss(module, rank, step):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return module(x).tanh().square().mean()


def _train(module, how, backward, finish, no_sync, optimizer):
    """Four steps; `backward(step)` of a loss, and what else a loop does between."""
    for step in range(4):
        if how == "finished twice":
            backward(step + 20)
            finish()
        if how == "thrown away":
            with no_sync():
                backward(step + 20, 10.0)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(step)
        finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=how == "finished twice")


def _trained(process, kind, how, settings):
    """Parameters of a sharded optimizer, and of one process that takes every rank's part."""
    torch.manual_seed(0)
    module = kind()
    plain = copy.deepcopy(module)
    ddp = DistributedDataParallel(module, **settings)
    sharded = ShardedOptimizer(module.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1, momentum=0.9)

    def backward(step, scale=1.0):
        (scale * _loss(ddp, process.rank, step)).backward()

    _train(ddp, how, backward, ddp.finish_gradient_synchronization, ddp.no_sync, sharded)

    def backward_of_all(step, scale=1.0):
        (scale * sum(_loss(plain, rank, step) for rank in range(2)) / 2).backward()

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    _train(plain, how, backward_of_all, lambda: None, torch.enable_grad, optimizer)
    kept = sum(each.local is not None for each in ddp._stand_ins.values())
    return [each.detach() for each in module.parameters()], [each.detach() for each in plain.parameters()], kept


@pytest.mark.parametrize("transport", ["collectives", "peer-copies"])
@pytest.mark.parametrize("how", ["kept at zero", "finished twice", "thrown away"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_that_are_added_are_those_of_one_process(two, kind, how, transport):
    for bucket_mb in (0, None):
        settings = {"transport": transport, "bucket_mb": bucket_mb}
        for found, expected, kept in two.run(_trained, kind, how, settings):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert kept == 0, "nothing of this rank alone is held"


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
