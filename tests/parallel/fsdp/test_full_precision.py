"""Modules that are left out of `compute_dtype`: norms, routers."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.parallel.fsdp.training import descend
from tests.parallel.mistakes import check, told
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
    shares = (_tokens(step).chunk(process.world_size)[process.rank] for step in range(STEPS))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE)
    return descend(sharded, (sharded(share).square().mean() for share in shares), optimizer), net.seen


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
    net = _build()

    def made(**how):
        return lambda: FullyShardedDataParallel(net, **{"compute_dtype": LOW, "full_precision": [net.norm]} | how)

    def tied():
        net.down.weight = net.router.inner.weight
        made(full_precision=[net.router])()

    expected = "expected modules that are parts of the wrapped one, in a list"
    return told(
        {
            "full_precision has a RMSNorm of another module; expected": made(full_precision=[nn.RMSNorm(16)]),
            "full_precision has a type; expected modules": made(full_precision=[nn.RMSNorm]),
            "compute_dtype is None; give both": made(compute_dtype=None),
            f"full_precision is a RMSNorm; {expected}": made(full_precision=net.norm),
            "has full_precision": made(full_precision=[net.norm if process.rank else net.router]),
            "router.inner.weight and down.weight are one parameter": tied,
        }
    )


def test_what_cannot_be_kept_is_said(two):
    check(two.run(_refused))
