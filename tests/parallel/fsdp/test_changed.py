"""Weights that are changed between a forward and what uses them, and gradients that are forgotten half-way."""

import copy

import pytest
import torch
from torch import nn

from tests.parallel.fsdp.training import gradients_beside
from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x, last=5):
        for block in self.blocks[:last]:
            x = torch.tanh(block(x))
        return x


def _sharded():
    torch.manual_seed(0)
    module = Stack()
    plain = copy.deepcopy(module)
    return FullyShardedDataParallel(module), plain


def _input(rank=0):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))


@torch.no_grad()
def _halve(parameters):
    for parameter in parameters:
        parameter.mul_(0.5)


def _halve_data(parameters):
    """As averages take the weights' place, which no version tells."""
    for parameter in parameters:
        parameter.data.mul_(0.5)


def _between(process):
    """Backward over weights that are not forward's any more; then a step as always."""
    sharded, plain = _sharded()
    loss = sharded(_input()).square().sum()
    _halve(sharded.parameters())
    with pytest.raises(UsageError, match=r"weights of blocks\.4 were changed between forward and backward"):
        loss.backward()
    sharded.zero_grad()
    _halve(plain.parameters())
    sharded(_input()).square().sum().backward()
    sharded.finish_gradient_synchronization()
    plain(_input()).square().sum().backward()
    for own, expected in gradients_beside(sharded, plain):
        torch.testing.assert_close(own, expected)


def test_backward_over_changed_weights_is_refused(two):
    two.run(_between)


def _apart(process):
    """The module is called itself, after forwards whose outputs were dropped and one that left early."""
    sharded, plain = _sharded()
    found, expected = [], []
    for grad, last, halve in ((True, 5, _halve), (False, 5, _halve), (False, 2, _halve), (False, 5, _halve_data)):
        for _ in range(2):
            with torch.set_grad_enabled(grad):
                sharded(_input(), last)
        gathered = sum(group.is_gathered for group in sharded._schedule.groups)
        assert grad or gathered == 0, "of what was gathered ahead"
        for module in (sharded, plain):
            halve(module.parameters())
        with torch.no_grad():
            found.append(sharded.module(_input()))
            expected.append(plain(_input()))
    return found, expected


def test_the_module_itself_computes_with_weights_as_they_are(two):
    for found, expected in two.run(_apart):
        torch.testing.assert_close(found, expected)


def _forgotten_inside(process):
    """Gradients of 64 small backward passes, of which those before zero_grad() do not count."""
    torch.manual_seed(0)
    sharded = FullyShardedDataParallel(nn.Linear(6, 6), compute_dtype=torch.bfloat16)
    gradients = []
    for inside in (True, False):
        sharded.zero_grad()
        with sharded.no_sync():
            if inside:
                sharded.zero_grad()
            for number in range(64):
                sharded(_input(number)).float().sum().backward()
        sharded(_input(64)).float().sum().backward()
        sharded.finish_gradient_synchronization()
        gradients.append([each.grad.to_local().clone() for each in sharded.parameters()])
    return gradients


def test_gradients_forgotten_inside_of_no_sync_leave_the_sum_in_float32(two):
    for inside, before in two.run(_forgotten_inside):
        for one, other in zip(inside, before, strict=True):
            assert torch.equal(one, other)


class Chosen(nn.Module):
    """A block's output is added, times 0 on some ranks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.rank = 0

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = x + (number + self.rank) % 2 * block(x)
        return x


def _chosen(process):
    torch.manual_seed(0)
    module = Chosen()
    plain = copy.deepcopy(module)
    sharded = FullyShardedDataParallel(module)
    module.rank = process.rank
    sharded(_input()).square().sum().backward()
    sharded.finish_gradient_synchronization()
    for rank in range(2):
        plain.rank = rank
        (plain(_input()).square().sum() / 2).backward()
    for own, expected in gradients_beside(sharded, plain):
        torch.testing.assert_close(own, expected)


def test_outputs_times_0_do_as_the_error_advises(two):
    two.run(_chosen)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(6, 2)


def _saved(process):
    sharded, _ = _sharded()
    with pytest.raises(UsageError, match=r"FullyShardedDataParallel inside, as 'inner\.'; save the wrapper's own"):
        Outer(sharded).state_dict()
    state = sharded.state_dict()
    extra = {**state, "other": torch.zeros(1)}
    extra.pop("blocks.0.weight")
    missing, unexpected = sharded.load_state_dict(extra, strict=False)
    assert (missing, unexpected) == (["blocks.0.weight"], ["other"])
    for norm_type in (-1.0, 0.0, -float("inf"), float("nan")):
        with pytest.raises(UsageError, match="expected a number above 0, or inf"):
            sharded.clip_grad_norm_(1.0, norm_type)


def test_states_of_outer_modules_names_that_do_not_fit_and_norms_that_are_none(two):
    two.run(_saved)
