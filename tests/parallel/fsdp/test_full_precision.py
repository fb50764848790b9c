"""Modules that are left out of `compute_dtype`: norms, routers."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed
LOW, STEPS, RATE = torch.bfloat16, 3, 0.5
KEPT = ("norm.weight", "router.inner.weight", "router.inner.bias")


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 3)

    def forward(self, x):
        return self.inner(x.float()).softmax(-1)


class Net(nn.Module):
    """A norm and a router that compute in float32, whatever comes in, between layers that do not."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.up = nn.Embedding(32, 16), nn.RMSNorm(16), nn.Linear(16, 24)
        self.router, self.down = Router(), nn.Linear(24, 3)
        self.seen = {}

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norm(x.float()).to(x.dtype)
        weights = self.router(x)
        self.seen = {name: parameter.dtype for name, parameter in self.named_parameters()}
        return (self.down(self.up(x).relu()).float() * weights).sum(-1)


def _build():
    torch.manual_seed(3)
    return Net()


def _tokens(step):
    return torch.randint(0, 32, (8, 5), generator=torch.Generator().manual_seed(step))


def _train(process, transport):
    net = _build()
    sharded = FullyShardedDataParallel(
        net, compute_dtype=LOW, full_precision=[net.norm, net.router], transport=transport
    )
    optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE)
    for step in range(STEPS):
        sharded(_tokens(step).chunk(process.world_size)[process.rank]).square().mean().backward()
        sharded.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return sharded.gather_full_parameters(), net.seen


@pytest.mark.parametrize("transport", ["collectives", "peer-copies"])
def test_what_is_kept_is_computed_with_as_it_is_trained(two, transport):
    net = _build()
    weights = {name: value.detach() for name, value in net.named_parameters()}
    for step in range(STEPS):
        gradients = []
        for part in _tokens(step).chunk(2):
            leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
            computed = {name: value if name in KEPT else value.to(LOW) for name, value in leaves.items()}
            functional_call(net, computed, part).square().mean().backward()
            gradients.append([leaf.grad for leaf in leaves.values()])
        for value, one, other in zip(weights.values(), *gradients, strict=True):
            value -= RATE * (one + other) / 2
    for found, seen in two.run(_train, transport):
        assert seen == {name: torch.float32 if name in KEPT else LOW for name in weights}
        for name, value in weights.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], value), name


def _refused(process):
    net, said = _build(), []
    wrongs = [{"full_precision": [nn.RMSNorm(16)]}, {"full_precision": [nn.RMSNorm]}, {"compute_dtype": None}]
    for wrong in [*wrongs, {"full_precision": net.norm}]:
        with pytest.raises(UsageError) as refused:
            FullyShardedDataParallel(net, **{"compute_dtype": LOW, "full_precision": [net.norm]} | wrong)
        said.append(str(refused.value))
    kept = [net.norm] if process.rank else [net.router]
    with pytest.raises(UsageError) as refused:
        FullyShardedDataParallel(net, compute_dtype=LOW, full_precision=kept)
    said.append(str(refused.value))
    net.down.weight = net.router.inner.weight
    with pytest.raises(UsageError) as refused:
        FullyShardedDataParallel(net, compute_dtype=LOW, full_precision=[net.router])
    return [*said, str(refused.value)]


def test_what_cannot_be_kept_is_said(two):
    for foreign, kind, alone, single, unlike, tied in two.run(_refused):
        assert "full_precision has a RMSNorm of another module; expected modules that are parts" in foreign
        assert "full_precision has a type; expected modules" in kind
        assert "full_precision is a RMSNorm; expected modules that are parts of the wrapped one, in a list" in single
        assert "router.inner.weight and down.weight are one parameter" in tied
        assert "compute_dtype is None; give both" in alone
        assert "full_precision" in unlike, "ranks that keep other modules"
