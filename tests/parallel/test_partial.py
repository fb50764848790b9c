"""Tensors that are a part of a whole: what may be done with them."""

import pickle

import pytest
import torch
from torch import nn

from trainstep.base.errors import UsageError
from trainstep.parallel.ddp.scattered import ScatteredGradient
from trainstep.parallel.partial import RankGradient, before_optimizer_steps, is_elementwise


def marked(complete=True):
    return RankGradient.for_wrapper(None, lambda: complete).mark(torch.arange(1.0, 7.0).view(2, 3))


ELEMENTWISE = {
    "scaled in place": lambda g: g.mul_(2),
    "divided": lambda g: g / 2,
    "subtracted": lambda g: 1 - g,
    "clamped": lambda g: g.clamp_(-1, 1),
    "the sign": torch.sign,
    "compared": lambda g: g > 2,
    "listed": lambda g: torch._foreach_mul([g], 2.0)[0],
    "copied": lambda g: g.detach().clone(),
    "in another dtype": lambda g: g.to(torch.bfloat16),
    "zeroed": lambda g: g.zero_(),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_are_computed_and_stay_a_part(name):
    plain = marked().plain.clone()
    result = ELEMENTWISE[name](marked())
    assert torch.equal(result.as_subclass(torch.Tensor), ELEMENTWISE[name](plain))
    with pytest.raises(UsageError, match="norm of a sharded parameter's gradient"):
        result.float().norm()


MIXING = {
    "norm": lambda g: g.norm(),
    "vector_norm": lambda g: torch.linalg.vector_norm(g),
    "_foreach_norm": lambda g: torch._foreach_norm([g]),
    "sum": lambda g: g.sum(),
    "max": lambda g: g.max(),
    "mean": lambda g: g.mean(0),
    "all": lambda g: torch.isfinite(g).all(),
    "item": lambda g: g.mul(2).item(),
    "matmul": lambda g: g @ g.t(),
    "stack": lambda g: torch.stack([g]),
    "__getitem__": lambda g: g[0],
    "__setitem__": lambda g: g.__setitem__(0, 1.0),
    "svd": lambda g: torch.linalg.svd(g),
    "numpy": lambda g: g.numpy(),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_elements_raises(name):
    with pytest.raises(UsageError, match="a rank has only its rows"):
        MIXING[name](marked())


def test_it_is_not_changed_before_gradients_are_complete():
    with pytest.raises(UsageError, match="mul_ on a gradient before finish_gradient_synchronization"):
        marked(complete=False).mul_(2)
    assert marked(complete=False).shape == (2, 3)


def test_what_is_saved_is_plain():
    saved = pickle.loads(pickle.dumps(marked()))
    assert type(saved) is torch.Tensor
    assert torch.equal(saved, marked().plain)


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
