"""Groups are there where they are needed again: by a call around another, a second backward, a pass in between."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.fsdp.recorder import halves, recorded
from tests.parallel.fsdp.training import descend, gradients_beside
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed

WIDTH = 6


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, other=torch.tanh):
        """What is `other` is called inside of this call."""
        return self.down(torch.tanh(other(torch.tanh(self.up(x)))))


class Around(nn.Module):
    """Calls `inner` inside of the call of `outer`; with it in one list, backward is through with `inner` first."""

    def __init__(self, embedded):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH) if embedded else None
        self.inner, self.outer, self.head = Residual(), Residual(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.outer(x if self.embedding is None else self.embedding(x), self.inner))

    def lists(self):
        return [[self.inner, self.outer]]


@dataclasses.dataclass
class State:
    hidden: Tensor


class HalfFrozen(nn.Module):
    """Blocks whose frozen weights come before the trained ones, and whose tensors are hidden in an object."""

    class Block(Residual):
        def __init__(self):
            super().__init__()
            self.up.requires_grad_(False)

        def forward(self, state):
            return State(super().forward(state.hidden))

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        state = State(self.embedding(x))
        for block in self.blocks:
            state = block(state)
        return self.head(state.hidden)

    def lists(self):
        return [list(self.blocks)]


class Edged(nn.Module):
    """The first module of a list is the model's, so that no gradient leaves its call."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def lists(self):
        return [[self.embedding, self.blocks[0]], [self.blocks[1], self.head]]


MODELS = {
    "around": lambda: Around(embedded=True),
    "around first": lambda: Around(embedded=False),
    "half frozen": HalfFrozen,
    "edged": Edged,
}


def _build(name):
    torch.manual_seed(0)
    return MODELS[name]()


def _input(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(module, rank, step):
    return module(_input(rank, step)).tanh().mean()


def _gradients(process, name, in_lists, how):
    """Gradients of three steps, or rather of this rank's rows, beside those of one process; and what is gathered after
    each backward."""
    module, plain, found, gathered = _build(name), _build(name), [], []
    sharded = FullyShardedDataParallel(module, groups=module.lists() if in_lists else None)
    for step in range(3):
        losses = [_loss(sharded, process.rank, step)]
        expected = sum(_loss(plain, rank, step) for rank in range(2)) / 2
        if how == "validated":
            with torch.no_grad():
                _loss(sharded, process.rank, 50)
        if how == "two graphs":
            losses.append(_loss(sharded, process.rank, step + 20))
            expected = expected + sum(_loss(plain, rank, step + 20) for rank in range(2)) / 2
        if how == "twice":
            losses[0].backward(retain_graph=True)
            expected = 2 * expected
        sum(losses).backward()
        expected.backward()
        gathered.append(sum(group.is_gathered for group in sharded._schedule.groups))
        sharded.finish_gradient_synchronization()
        found += gradients_beside(sharded, plain)
        sharded.zero_grad()
        plain.zero_grad()
    return found, gathered


@pytest.mark.parametrize("how", ["once", "validated", "two graphs", "twice"])
@pytest.mark.parametrize("name", MODELS)
def test_backward_finds_its_weights(two, name, how):
    for in_lists in (False, True):
        for found, gathered in two.run(_gradients, name, in_lists, how):
            assert len(found) >= 3 * 4
            for own, expected in found:
                torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
            if name != "half frozen" and (name, how) != ("edged", "twice"):
                assert gathered == [0, 0, 0], "nothing stays beyond backward"


class Tied(Edged):
    """A block of each list has the weight of the other's."""

    def __init__(self):
        super().__init__()
        self.blocks.extend(Residual() for _ in range(2))
        self.blocks[3].down.weight = self.blocks[0].down.weight

    def lists(self):
        return [self.blocks[:2], self.blocks[2:]]


class Alternating(Edged):
    """Two blocks, called in turns."""

    def forward(self, x):
        x = self.embedding(x)
        for number in (0, 1, 0, 1, 0, 1):
            x = self.blocks[number](x)
        return self.head(x)

    def lists(self):
        return None


def _raised(process):
    """What is gathered once a forward has raised, and its graph is gone."""
    torch.manual_seed(0)
    module = Edged()
    sharded = FullyShardedDataParallel(module)
    descend(sharded, (_loss(sharded, process.rank, step) for step in range(2)))
    handle = module.blocks[0].up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _loss(sharded, process.rank, 2)
    handle.remove()
    gathered = [group.name for group in sharded._schedule.groups if group.is_gathered]
    descend(sharded, (_loss(sharded, process.rank, step) for step in [3]))
    return gathered


def test_what_was_gathered_ahead_is_freed_where_forward_raises(two):
    for gathered in two.run(_raised):
        assert set(gathered) <= {"blocks.0"}, "the call that raised"


def _gathers(process, kind):
    """Groups as they are gathered in the forward of a third step."""
    torch.manual_seed(0)
    module = kind()
    sharded = FullyShardedDataParallel(module, groups=module.lists())
    for step in range(3):
        recorder = recorded(sharded, lambda net, step=step: _loss(net, process.rank, step))
    forward, _ = halves(recorder.events)
    return [number for what, number in forward if what == "gather"], len(sharded._schedule.groups)


@pytest.mark.parametrize("kind", [Tied, Alternating])
def test_what_a_call_soon_needs_again_is_not_gathered_again(two, kind):
    for gathered, count in two.run(_gathers, kind):
        assert sorted(gathered) == list(range(count))
