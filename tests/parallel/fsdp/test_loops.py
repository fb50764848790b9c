"""Loops that work on `parameters()` by hand: each trains as one process does, or says what is wrong."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.parallel.mistakes import check, told
from tests.parallel.nets import Block
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed

RATE = 0.05


class Boxed(Block):
    """Takes its input in an object, too, where autograd is not seen leaving it."""

    def forward(self, x):
        return super().forward(getattr(x, "hidden", x))


class Small(nn.Module):
    """Matrices whose rows two ranks cannot halve, one of a single row, and vectors; in float64."""

    boxed = False

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Boxed(5, 7) for _ in range(5))
        self.head = nn.Linear(5, 1)
        self.to(torch.float64)

    def forward(self, x):
        for block in self.blocks:
            x = block(SimpleNamespace(hidden=x) if self.boxed else x)
        return self.head(x)


class Loop:
    """Training of a wrapper on one rank, or of the plain module on all ranks' inputs."""

    def __init__(self, module, ranks, updates):
        self.module, self.ranks, self.updates = module, ranks, updates
        self.parameters = list(module.parameters())

    def backward(self, step):
        inputs = [torch.randn(3, 5, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in self.ranks]
        losses = [(self.module(x.double()) - 1).square().mean() for x in inputs]
        (sum(losses) / len(losses)).backward()
        if isinstance(self.module, FullyShardedDataParallel):
            self.module.finish_gradient_synchronization()

    def train(self, update):
        """`update(step)` under no_grad, after each backward."""
        for step in range(self.updates):
            self.backward(step)
            with torch.no_grad():
                update(step)
                for each in self.parameters:
                    each.grad = None

    def descend(self, step):
        for each in self.parameters:
            each.sub_(each.grad, alpha=RATE)

    def values(self):
        if isinstance(self.module, FullyShardedDataParallel):
            return self.module.gather_full_parameters()
        return {name: each.detach() for name, each in self.module.named_parameters()}


def initialisation_by_the_module(loop):
    def initialise(part):
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(std=part.weight.shape[0] ** -0.5)
            if part.bias is not None:
                part.bias.data.zero_()
        elif isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight)

    torch.manual_seed(3)
    loop.module.apply(initialise)
    loop.train(loop.descend)


def averages(loop):
    average = [each.detach().clone() for each in loop.parameters]
    first = copy.deepcopy(loop.parameters)

    def update(step):
        loop.descend(step)
        torch._foreach_lerp_(average, loop.parameters, 0.1)

    loop.train(update)
    with torch.no_grad():
        for each, mean, start in zip(loop.parameters, average, first, strict=True):
            each.copy_(0.9 * mean + 0.1 * start)


def optimizer_in_backward(loop):
    """As in PyTorch's tutorial: an optimizer for each parameter, stepped by a hook."""
    optimizers = {each: torch.optim.Adam([each], lr=0.01, foreach=False) for each in loop.parameters}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in loop.parameters:
        each.register_post_accumulate_grad_hook(step)
    loop.train(lambda step: None)


def optimizer_in_backward_of_the_module(loop):
    """The same with the parameters that the module itself has, and an update by hand."""
    if isinstance(loop.module, FullyShardedDataParallel):
        loop.parameters = list(loop.module.module.parameters())

    def step(parameter):
        parameter.data = parameter.data - RATE * parameter.grad
        parameter.grad = None

    for each in loop.parameters:
        each.register_post_accumulate_grad_hook(step)
    loop.train(lambda step: None)


def optimizer_of_copies(loop):
    """An optimizer that has copies of the parameters, as for mixed precision by hand."""
    copies = [nn.Parameter(each.detach().clone()) for each in loop.parameters]
    optimizer = torch.optim.AdamW(copies, lr=0.01)

    def update(step):
        for mine, each in zip(copies, loop.parameters, strict=True):
            mine.grad = each.grad
        optimizer.step()
        for mine, each in zip(copies, loop.parameters, strict=True):
            each.data.copy_(mine)

    loop.train(update)


def evaluation_that_one_rank_keeps(loop):
    """With its graph: whether that is alive differs between the ranks, and must not change the order of their calls."""
    kept = []

    def update(step):
        loop.descend(step)
        with torch.enable_grad():
            loss = loop.module(torch.ones(3, 5, dtype=torch.float64)).sum()
        if loop.ranks == [0]:
            kept.append(loss)
        getattr(loop.module, "module", loop.module).boxed = step >= 2

    loop.train(update)


TRAIN = {  # and how many updates
    averages: 200,
    optimizer_in_backward: 200,
    initialisation_by_the_module: 20,
    optimizer_in_backward_of_the_module: 20,
    optimizer_of_copies: 20,
    evaluation_that_one_rank_keeps: 6,
}


def _module():
    torch.manual_seed(0)
    return Small()


def _looped(process, name, updates):
    module = _module()
    torch.manual_seed(process.rank)  # the loops that draw set their own
    loop = Loop(FullyShardedDataParallel(module), [process.rank], updates)
    globals()[name](loop)
    return loop.values()


@pytest.mark.parametrize("loop", TRAIN, ids=lambda loop: loop.__name__)
def test_updates_are_those_of_one_process(two, loop):
    """`test_rows` has what raises, and each function that runs on rows."""
    updates = TRAIN[loop]
    alone = Loop(_module(), [0, 1], updates)
    before = copy.deepcopy(alone.values())
    loop(alone)
    for values in two.run(_looped, loop.__name__, updates):
        for name, value in alone.values().items():
            assert (value - before[name]).norm() > 1e-3, "it trains"
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-12)


def _unlike(process):
    """Ranks whose generators differ get rank 0's numbers."""
    sharded = FullyShardedDataParallel(_module())
    torch.manual_seed(process.rank)
    for each in sharded.parameters():
        nn.init.normal_(each)
        each.data.add_(torch.rand_like(each))
    return sharded.gather_full_parameters()


def test_random_numbers_are_rank_0s(two):
    module = _module()
    torch.manual_seed(0)
    for each in module.parameters():
        nn.init.normal_(each)
        each.data.add_(torch.rand_like(each))
    for values in two.run(_unlike):
        for name, value in module.named_parameters():
            assert torch.equal(values[name], value)


def _forgotten_hooks(sharded, process):
    for each in sharded.parameters():
        each.register_post_accumulate_grad_hook(lambda parameter: parameter.sub_(parameter.grad))
    _forward(sharded).backward()
    _forward(sharded)


def _in_a_closure(sharded, process):
    optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE)
    optimizer.step(lambda: _forward(sharded).backward())


def _by_a_gradient_hook(sharded, process):
    sharded.module.head.weight.register_hook(torch.sign)


def _averaged_by_hand(sharded, process):
    _forward(sharded).backward()
    sharded.finish_gradient_synchronization()
    torch.distributed.all_reduce(sharded.module.head.weight.grad)


def _filled_on_one_rank(sharded, process):
    if process.rank == 0:
        nn.init.normal_(next(sharded.parameters()))
    _forward(sharded)


def _forward(call):
    return call(torch.ones(2, 5, dtype=torch.float64)).sum()


MISTAKES = {
    "forward before gradients were synchronised over the ranks; call finish_gradient_synchronization": _forgotten_hooks,
    "SGD.step() before gradients were synchronised over the ranks": _in_a_closure,
    "head.weight is sharded, and its gradient does not pass here in backward": _by_a_gradient_hook,
    "all_reduce of a sharded parameter's gradient": _averaged_by_hand,
    "rank 0 comes to fill a parameter with random numbers, rank 1 comes to gather": _filled_on_one_rank,
}


def _mistaken(process):
    def of(mistake):
        return lambda: mistake(FullyShardedDataParallel(_module()), process)

    return told({expected: of(mistake) for expected, mistake in MISTAKES.items()})


def test_loops_that_would_train_nothing_raise(two):
    check(two.run(_mistaken))
