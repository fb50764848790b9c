"""Lazy conjugates and negatives, tensors whose memory is not their value: their values are what ranks exchange."""

import pytest
import torch
from torch import nn

from tests.parallel.test_ddp import SCHEMES
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer
from trainstep.parallel.collectives import (
    all_gather_slices,
    all_reduce_mean,
    all_reduce_sum,
    broadcast_from_first,
    reduce_scatter_mean,
)
from trainstep.parallel.slices import slice_of

pytestmark = pytest.mark.distributed

WIDTH, RANKS, STEPS = 8, 2, 3


def is_lazy(tensor):
    return tensor.is_conj() or tensor.is_neg()


class LazilyNegative(torch.autograd.Function):
    """-x, whose gradient is a lazy negative."""

    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, gradient):
        return torch._neg_view(gradient.clone())


class Net(nn.Module):
    """A layer of real numbers, and weights that stand on a lazy view."""

    def __init__(self):
        super().__init__()
        self.rank = 0
        self.first = nn.Linear(WIDTH, WIDTH)
        self.build(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def build(self, weight):
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.turned(self.first(x).to(torch.complex64)).abs()


class Conjugate(Net):
    def turned(self, x):
        return x @ self.weight.conj()


class Adjoint(Net):
    def turned(self, x):
        return x @ self.weight.mH


class OnOneRank(Net):
    def turned(self, x):
        return x @ (self.weight.conj() if self.rank else self.weight.conj().resolve_conj())


class NegativeGradient(Net):
    def build(self, weight):
        self.weight, self.shift = nn.Parameter(weight.real.clone()), nn.Parameter(torch.randn(1))

    def turned(self, x):
        return x @ LazilyNegative.apply(self.weight).to(x.dtype) + LazilyNegative.apply(self.shift)


class NegativeParameters(Net):
    def build(self, weight):
        self.weight = nn.Parameter(torch._neg_view(weight.real.clone()))
        self.shift = nn.Parameter(torch._neg_view(torch.randn(3)))

    def turned(self, x):
        return x @ self.weight.to(x.dtype) + self.shift.sum()


class ConjugateParameters(Net):
    def build(self, weight):
        self.weight, self.shift = nn.Parameter(weight.conj()), nn.Parameter(weight[0].clone().conj())
        self.other = nn.Parameter(weight[:3].clone().mH)

    def turned(self, x):
        return x @ self.weight + self.shift + self.other.sum()


class Buffers(Net):
    def build(self, weight):
        self.weight = nn.Parameter(weight)
        self.register_buffer("turn", weight.mH)
        self.register_buffer("shift", torch._neg_view(torch.randn(WIDTH)))

    def turned(self, x):
        return x @ self.weight @ self.turn + self.shift


KINDS = {each.__name__: each for each in Net.__subclasses__()}
REAL = ("NegativeGradient", "NegativeParameters")


def build(kind):
    torch.manual_seed(0)
    return KINDS[kind]()


def loss_of(module, step, rank):
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return (module(x) - x).pow(2).mean()


def values(module):
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().resolve_conj().resolve_neg().clone() for name, tensor in tensors}


def alone(kind):
    """One process that takes the ranks' shares in turn; and whether a tensor or gradient was lazy."""
    net = build(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    was_lazy = any(map(is_lazy, [*net.parameters(), *net.buffers()]))
    for step in range(STEPS):
        optimizer.zero_grad()
        for net.rank in range(RANKS):
            (loss_of(net, step, net.rank) / RANKS).backward()
            was_lazy |= any(is_lazy(parameter.grad) for parameter in net.parameters())
        optimizer.step()
    return values(net), was_lazy


def train(process, kinds, wrap):
    found = {}
    for kind in kinds:
        net = build(kind)
        net.rank = process.rank
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                tensor.mul_(1 + process.rank)  # the first rank's go to all
        wrapper, optimizer = wrap(net)
        for step in range(STEPS):
            if wrap is scattered:  # half of a gradient each, the first kept apart
                with wrapper.no_sync():
                    (loss_of(wrapper, step, process.rank) / 2).backward()
                (loss_of(wrapper, step, process.rank) / 2).backward()
            else:
                loss_of(wrapper, step, process.rank).backward()
            wrapper.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad(set_to_none=wrap is not scattered)
        getattr(optimizer, "wait_for_parameters", lambda: None)()
        found[kind] = wrapper.gather_full_parameters() if wrap is fsdp else values(net)
    return found


class Ddp:
    def __init__(self, settings):
        self.settings = settings

    def __call__(self, net):
        wrapper = DistributedDataParallel(net, **self.settings)
        return wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1)


def whole(net):
    wrapper = DistributedDataParallel(net)
    return wrapper, ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)


def scattered(net, **more):
    wrapper = DistributedDataParallel(net)
    return wrapper, ShardedOptimizer(net.parameters(), torch.optim.SGD, ddp=wrapper, lr=0.1, **more)


def gathered_beside(net):
    return scattered(net, overlap_gather=True)


def fsdp(net):
    wrapper = FullyShardedDataParallel(net)
    return wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1)


WRAPS = {name: Ddp(settings) for name, settings in SCHEMES.items()}
WRAPS |= {"bfloat16": Ddp({"reduce_dtype": torch.bfloat16})}
WRAPS |= {each.__name__: each for each in (whole, scattered, gathered_beside, fsdp)}


@pytest.mark.parametrize("wrap", WRAPS)
def test_lazy_tensors_train_as_in_one_process(two, wrap):
    kinds = REAL if wrap == "fsdp" else tuple(KINDS)  # it refuses complex parameters
    for found in two.run(train, kinds, WRAPS[wrap]):
        for kind, tensors in found.items():
            expected, was_lazy = alone(kind)
            assert was_lazy, f"{kind} has nothing lazy"
            for name, tensor in tensors.items():
                allowed = 2e-3 if wrap == "bfloat16" else 1e-6
                torch.testing.assert_close(tensor, expected[name], rtol=allowed, atol=allowed, msg=f"{kind} {name}")


def _inputs(rank):
    """Complex and real numbers, lazy on the second rank alone and on both."""
    turned, flipped = (torch.arange(4) + rank + 1j, torch.arange(8.0) - rank)
    turned, flipped = turned.to(torch.complex64), flipped.view(2, 4)
    return [turned.conj() if rank else turned.conj().resolve_conj()], [torch._neg_view(flipped), flipped.t().neg()]


def _exchanged(process):
    group, found = process.group, {}
    for number in range(2):
        for call in (all_reduce_mean, all_reduce_sum, reduce_scatter_mean, all_gather_slices, broadcast_from_first):
            tensors = _inputs(process.rank)[number]
            if number == 0 and call in (reduce_scatter_mean, all_gather_slices):
                continue  # complex parameters are not cut
            work = call(tensors, group)
            if work is not None:
                work.wait()
            if call is reduce_scatter_mean:
                tensors = [slice_of(tensor, process.rank, RANKS) for tensor in tensors]
            found[number, call.__name__] = [tensor.clone().resolve_conj().resolve_neg() for tensor in tensors]
    return found


def test_every_collective_exchanges_values(two):
    (complex_0, real_0), (complex_1, real_1) = _inputs(0), _inputs(1)
    for rank, found in enumerate(two.run(_exchanged)):
        for number, first, second in ((0, complex_0, complex_1), (1, real_0, real_1)):
            for i, (one, other) in enumerate(zip(first, second, strict=True)):
                assert torch.equal(found[number, "all_reduce_sum"][i], one + other)
                assert torch.equal(found[number, "all_reduce_mean"][i], (one + other) / 2)
                assert torch.equal(found[number, "broadcast_from_first"][i], one)
                if number:
                    mean = slice_of(((one + other) / 2), rank, RANKS)
                    assert torch.equal(found[number, "reduce_scatter_mean"][i], mean)
                    slices = [slice_of(one, 0, RANKS), slice_of(other, 1, RANKS)]
                    gathered = found[number, "all_gather_slices"][i]
                    assert torch.equal(
                        torch.cat([slice_of(gathered, r, RANKS) for r in range(RANKS)]), torch.cat(slices)
                    )
