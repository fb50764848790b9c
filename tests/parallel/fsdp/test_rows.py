"""Rows of a whole: what runs on them gives the rows of what it gives on the whole, and everything else raises."""

import copy
import pickle

import pytest
import torch
from torch import nn

from trainstep.base.errors import UsageError
from trainstep.parallel.fsdp.rows import RankGradient, RankRows, Sharing

SHAPES = ((5, 4), (5, 3, 2), (1, 4), (4, 4), (3,))  # the rows of one rank and of none, and no rows at all
RANKS = 2


def whole(shape=(5, 4), seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(value, rank, kind=RankRows, complete=True):
    """What one of two ranks has."""
    sharing = Sharing(None, lambda values: None, lambda: not complete, set())
    if value.dim() < 2:
        return kind.of(value.clone(), value.shape, None, sharing)
    each = -(-len(value) // RANKS)
    rows = slice(min(rank * each, len(value)), min((rank + 1) * each, len(value)))
    return kind.of(value[rows].clone(), value.shape, rows, sharing)


def joined(parts):
    """The whole that the ranks' rows make."""
    assert len({part.shape for part in parts}) == 1
    plain = [part.to_local() for part in parts]
    result = plain[0] if parts[0].rows is None else torch.cat(plain)
    assert result.shape == parts[0].shape
    return result


ELEMENTWISE = {
    "scaled in place": lambda p: p.mul_(2),
    "divided": lambda p: p / 2,
    "subtracted": lambda p: 1 - p,
    "clamped": lambda p: p.clamp_(-1, 1),
    "the sign": torch.sign,
    "compared": lambda p: p > 2,
    "listed": lambda p: torch._foreach_mul([p], 2.0)[0],
    "copied": lambda p: p.detach().clone(),
    "copied deeply": lambda p: copy.deepcopy([p.exp(), p])[1],
    "copied deeply beside another": lambda p: copy.deepcopy([rows_of(whole((6, 2)), 0), p])[1],
    "in another dtype": lambda p: p.to(torch.bfloat16),
    "zeroed": lambda p: p.zero_(),
    "filled": lambda p: nn.init.constant_(p, 3.0),
    "from the whole": lambda p: p.copy_(whole(p.shape, 7)),
    "with the whole": lambda p: torch.where(p > whole(p.shape, 7), p, whole(p.shape, 7)),
    "with another's rows": lambda p: p * p.exp(),
    "with a row": lambda p: p + torch.arange(p.shape[-1]),
    "with a column": lambda p: p * torch.arange(len(p)).view(-1, *[1] * (p.dim() - 1)),
    "into its data": lambda p: p.data.add_(whole(p.shape, 7)),
    "listed with wholes": lambda p: torch._foreach_lerp([p, p.exp()], [whole(p.shape, 7), p], 0.3)[1],
    "listed in place": lambda p: (torch._foreach_addcmul_([p], [p.exp()], [whole(p.shape, 7)]), p)[1],
    "zeros like it": lambda p: torch.zeros_like(p).add_(p),
    "flat beyond its rows": lambda p: p.reshape(len(p), -1) * 2 if p.dim() > 1 else p * 2,
    "in the shape of another": lambda p: p.view_as(p * 2),
    "a vector in its shape": lambda p: p + torch.arange(p.numel()).view_as(p),
    "a number like it": lambda p: p + torch.tensor(3).to(p) + torch.tensor([2.0]).type_as(p),
    "from a vector": lambda p: (nn.utils.vector_to_parameters(torch.arange(p.numel()) / 3, [p]), p)[1],
    "by fused AdamW": lambda p: fused_adamw(p),
    "as a parameter": lambda p: nn.Parameter(p.detach()).detach(),
}


def fused_adamw(p):
    states = [torch.zeros_like(p) for _ in range(2)]
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    gradients, steps = [p.exp()], [torch.ones(())]
    flags = {"amsgrad": False, "maximize": False}
    torch._fused_adamw_([p], gradients, [states[0]], [states[1]], [], steps, **settings, **flags)
    return p


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_are_those_of_the_whole(name):
    for shape in SHAPES:
        expected = ELEMENTWISE[name](whole(shape))
        parts = [ELEMENTWISE[name](rows_of(whole(shape), rank)) for rank in range(RANKS)]
        assert torch.equal(joined(parts), expected), shape
        if parts[0].rows is not None:
            with pytest.raises(UsageError, match="norm of a sharded parameter's values"):
                parts[0].float().norm()


FILLS = {
    "normal_": lambda p: nn.init.normal_(p, 1.0, 2.0),
    "uniform_": lambda p: p.uniform_(-2, 3),
    "xavier_uniform_": lambda p: nn.init.xavier_uniform_(p) if p.dim() > 1 else p.normal_(),
    "xavier_normal_": lambda p: nn.init.xavier_normal_(p, 2.0) if p.dim() > 1 else p.normal_(),
    "kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p, a=5**0.5) if p.dim() > 1 else p.normal_(),
    "kaiming_normal_": lambda p: nn.init.kaiming_normal_(p, mode="fan_out") if p.dim() > 1 else p.normal_(),
    "by its shape": lambda p: p.normal_(std=p.shape[0] ** -0.5).mul_(p.numel()),
    "of its data": lambda p: (p.data.normal_(), p)[1],
    "exponential_": lambda p: p.exponential_(2.0),
    "bernoulli_": lambda p: p.bernoulli_(0.3),
    "random_": lambda p: p.random_(0, 9),
    "noise": lambda p: p.add_(torch.randn_like(p), alpha=0.1),
    "a mask": lambda p: p.mul_(torch.rand_like(p) > 0.5),
    "integers": lambda p: torch.randint_like(p, 9) + p,
    "a generator of its own": lambda p: p.normal_(generator=torch.Generator().manual_seed(9)),
}


@pytest.mark.parametrize("name", FILLS)
def test_random_numbers_are_those_of_the_whole(name):
    for shape in SHAPES:
        ends, parts = [], []
        for rank in (None, *range(RANKS)):
            torch.manual_seed(3)
            parts.append(FILLS[name](whole(shape) if rank is None else rows_of(whole(shape), rank)))
            ends.append(torch.get_rng_state())
        assert torch.equal(joined(parts[1:]), parts[0]), shape
        assert torch.equal(ends[0], ends[1])
        assert torch.equal(ends[0], ends[2])


MIXING = {
    "norm": lambda p: p.norm(),
    "vector_norm": lambda p: torch.linalg.vector_norm(p),
    "_foreach_norm": lambda p: torch._foreach_norm([p]),
    "sum": lambda p: p.sum(),
    "max": lambda p: p.max(),
    "mean": lambda p: p.mean(0),
    "std": lambda p: p.std(),
    "quantile": lambda p: torch.quantile(p.abs(), 0.9),
    "topk": lambda p: p.flatten(1).topk(2),
    "all": lambda p: torch.isfinite(p).all(),
    "item": lambda p: p.mul(2).item(),
    "matmul": lambda p: p @ p,
    "t": lambda p: p.t(),
    "stack": lambda p: torch.stack([p]),
    "cumsum": lambda p: p.cumsum(0),
    "softmax": lambda p: p.softmax(-1),
    "dropout": lambda p: nn.functional.dropout(p),
    "equal": lambda p: torch.equal(p, whole()),
    "allclose": lambda p: torch.allclose(p, whole()),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "orthogonal_": lambda p: nn.init.orthogonal_(p),
    "sparse_": lambda p: nn.init.sparse_(p, 0.5),
    "eye_": lambda p: nn.init.eye_(p),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "where its indices are": lambda p: torch.where(p > 0),
    "into the whole": lambda p: whole().copy_(p),
    "out": lambda p: torch.add(p, p, out=whole()),
    "a list with rows of another": lambda p: torch._foreach_add([p], rows_of(whole((1, 1)), 0)),
    "with rows of another": lambda p: p + rows_of(whole((4, 4)), 0),
    "with more dimensions": lambda p: p + whole((2, 5, 4)),
    "rrelu": lambda p: nn.functional.rrelu(p, training=True),
    "__getitem__": lambda p: p[0],
    "__setitem__": lambda p: p.__setitem__(0, 1.0),
    "__iter__": lambda p: list(p),
    "svd": lambda p: torch.linalg.svd(p),
    "numpy": lambda p: p.numpy(),
    "tolist": lambda p: p.tolist(),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "data of another shape": lambda p: setattr(p, "data", whole((2, 2))),
}


@pytest.mark.parametrize("kind", [RankRows, RankGradient])
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_elements_raises(name, kind):
    with pytest.raises(UsageError, match=r"a rank has only its rows|data of a sharded parameter's"):
        MIXING[name](rows_of(whole(), 0, kind))


def test_a_plain_tensor_does_not_take_over_memory_that_is_not_there():
    """As `average.data = 0.9 * average.data + 0.1 * p.data` would: torch reads at address 0 afterwards."""
    average = whole()
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        average.data = 0.9 * average.data + 0.1 * rows_of(whole(), 0).data
    assert rows_of(whole(), 0).layout == torch.strided
    assert not rows_of(whole(), 0).is_sparse
    assert rows_of(whole(), 0).is_contiguous()


def test_a_replicated_parameter_is_a_whole():
    value = rows_of(whole((3,)), 0)
    assert value.norm() == whole((3,)).norm()
    assert torch.equal(value[1:].softmax(0), whole((3,))[1:].softmax(0))
    with pytest.raises(UsageError, match="dropout of a sharded parameter's values"):
        nn.functional.dropout(value)


def test_a_gradient_is_not_changed_before_all_are_there():
    with pytest.raises(UsageError, match="mul_ on a gradient before finish_gradient_synchronization"):
        rows_of(whole(), 0, RankGradient, complete=False).mul_(2)
    assert rows_of(whole(), 0, RankGradient, complete=False).shape == (5, 4)


def test_what_is_saved_is_plain():
    rows = rows_of(whole(), 0)
    saved = pickle.loads(pickle.dumps(rows))
    assert type(saved) is torch.Tensor
    assert torch.equal(saved, whole()[:3])
