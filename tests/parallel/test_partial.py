"""Tensors that are a part of a whole: what may be done with them."""

import pytest
import torch
from torch import nn

from trainstep.base.errors import UsageError
from trainstep.parallel.ddp.scattered import ScatteredGradient
from trainstep.parallel.partial import before_optimizer_steps, is_elementwise


def scattered():
    parameter = nn.Parameter(torch.ones(2, 2))
    own = nn.Parameter(torch.ones(2))
    own.grad = torch.ones(2)
    parameter.grad = ScatteredGradient.of(parameter, "weight", own)
    return parameter, own


def test_a_scattered_gradient_is_added_to_by_backward_and_zeroed_in_its_slice():
    parameter, own = scattered()
    for _ in range(2):
        (3 * parameter).sum().backward()
    assert torch.equal(parameter.grad.take_local(), torch.full((2, 2), 6.0))
    assert not parameter.grad.take_local().any(), "taken once"
    torch.optim.SGD([parameter], lr=1.0).zero_grad(set_to_none=False)
    assert not own.grad.any()


@pytest.mark.parametrize(
    "use", [lambda p: nn.utils.clip_grad_norm_([p], 1.0), lambda p: p.grad * 2, lambda p: p.grad[0]]
)
def test_other_uses_of_a_scattered_gradient_raise(use):
    with pytest.raises(UsageError, match="of the gradient of weight"):
        use(scattered()[0])


def test_an_optimizer_says_whether_it_is_elementwise():
    class Own(torch.optim.SGD):
        """A subclass may do anything."""

    class Declared(Own):
        is_elementwise = True

    assert is_elementwise(torch.optim.AdamW)
    assert not is_elementwise(Own)
    assert is_elementwise(Declared([nn.Parameter(torch.ones(2))]))


class Owner:
    pass


def test_an_owner_may_be_collected_while_an_optimizer_looks_for_its_hooks():
    """In several runs of ten, a wrapper of the scheme before was collected in a step of the next: torch raised, on one
    rank."""
    owners = [Owner(), Owner()]
    for owner in owners:
        before_optimizer_steps(owner, lambda alive, stepping: owners.clear())
    del owner
    torch.optim.SGD([nn.Parameter(torch.ones(2))]).step()
    assert owners == []


def test_a_check_before_steps_ends_with_its_owner():
    seen = []
    owner, optimizer = Owner(), torch.optim.SGD([nn.Parameter(torch.ones(2))])
    before_optimizer_steps(owner, lambda alive, stepping: seen.append(stepping))
    optimizer.step()
    del owner
    optimizer.step()
    assert seen == [optimizer]
