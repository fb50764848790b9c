"""What is done to a sharded module between steps: gradients thrown away, weights and modules exchanged, norms taken."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.parallel.fsdp.training import descend
from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel, load_checkpoint, save_checkpoint
from trainstep.parallel.fsdp.schedule import Agreement, Schedule

pytestmark = pytest.mark.distributed

WIDTH = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def _net():
    torch.manual_seed(0)
    return Net()


def _input(number=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def _backward(sharded, number=0):
    sharded(_input(number)).square().mean().backward()


def _step(sharded, optimizer, number=0):
    return descend(sharded, (sharded(_input(each)).square().mean() for each in [number]), optimizer)


def _leave(sharded, how):
    """Gradients of a batch that is to be skipped: sent, added up, or of a backward that failed half way."""
    failing = sharded.module.blocks[2].register_full_backward_hook(lambda *_: 1 / 0) if how == "failed" else None
    with sharded.no_sync() if how == "added up" else contextlib.nullcontext():
        if failing is None:
            _backward(sharded, 1)
            return
        with pytest.raises(ZeroDivisionError):
            _backward(sharded, 1)
        failing.remove()


def _skipped(process, folder):
    """A step is skipped: the optimizer's zero_grad() does not reach what is on its way, the wrapper's does."""
    weights = []
    for how in (None, "sent", "added up", "failed"):
        sharded = FullyShardedDataParallel(_net())
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        if how is not None:
            _leave(sharded, how)
            with pytest.raises(UsageError, match=r"before finish_gradient_synchronization.*as for a step that is skip"):
                optimizer.zero_grad()
            sharded.zero_grad()
        weights.append(_step(sharded, optimizer, 2))
        sharded.finish_gradient_synchronization()  # nothing has come since
    for name, weight in weights[0].items():
        assert all(torch.equal(weight, skipped[name]) for skipped in weights[1:])


class Towers(nn.Module):
    """Blocks whose inputs need no gradient, so that backward is not seen leaving them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x):
        return sum(torch.tanh(block(x)) for block in self.blocks)


def _unseen(process):
    """How many blocks are gathered at once, and how many have gradients that are not sent, when backward comes to one
    more."""
    sharded = FullyShardedDataParallel(Towers())
    groups, most = sharded._schedule.groups, [0, 0]
    reach = Schedule.before_backward

    def counted(schedule, call):
        reach(schedule, call)
        held = (sum(group.is_gathered for group in groups), sum(group.is_unsent for group in groups))
        most[:] = map(max, most, held)

    with mock.patch.object(Schedule, "before_backward", counted):
        for number in range(3):
            _backward(sharded, number)
            sharded.finish_gradient_synchronization()
    return most


def test_blocks_that_backward_is_not_seen_leaving_are_freed_and_sent_on_the_way(two):
    assert two.run(_unseen) == 2 * [[3, 1]]


def _of_inputs(process):
    """Acts that are announced for gradients of inputs alone."""
    sharded = FullyShardedDataParallel(_net())
    with mock.patch.object(Agreement, "announce", autospec=True, side_effect=Agreement.announce) as announced:
        for number in range(3):
            x = _input(number).requires_grad_()
            torch.autograd.grad(sharded(x).sum(), x)
    return {call.args[1] for call in announced.call_args_list}


def test_gradients_of_inputs_alone_send_nothing(two):
    assert two.run(_of_inputs) == 2 * [{"gather"}]


class OwnState(nn.Linear):
    """Saves its data itself."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"], destination[f"{prefix}bias"] = self.weight.data, self.bias.data


def _saved_otherwise(process, folder):
    """Names that a module's own hooks write differently than its parameters are called, and data."""
    module = _net()
    expected = set(module.state_dict())
    module.blocks[1], module.head = checkpoint_wrapper(module.blocks[1]), OwnState(WIDTH, 2)
    sharded = FullyShardedDataParallel(module)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    weights = _step(sharded, optimizer)
    assert set(sharded.state_dict()) == expected
    save_checkpoint(folder, sharded, optimizer)
    _step(sharded, optimizer)
    load_checkpoint(folder, sharded, optimizer)
    for name, weight in sharded.gather_full_parameters().items():
        assert torch.equal(weight, weights[name])


def _before_its_first_step(process, folder):
    """An optimizer of the module's own parameters(), which are placeholders, is saved and resumed before it steps."""
    module = _net()
    sharded = FullyShardedDataParallel(module)
    momentum = {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(module.parameters(), **momentum)

    def closure():
        optimizer.zero_grad()
        _backward(sharded)
        sharded.finish_gradient_synchronization()

    optimizer.step(closure)
    optimizer.zero_grad()
    save_checkpoint(folder, sharded, optimizer)
    other = FullyShardedDataParallel(_net())
    resumed = torch.optim.SGD(other.module.parameters(), **momentum)
    load_checkpoint(folder, other, resumed)
    expected = _step(sharded, optimizer, 1)
    for name, weight in _step(other, resumed, 1).items():
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize(
    "check", [_skipped, _saved_otherwise, _before_its_first_step], ids=lambda check: check.__name__
)
def test_what_is_skipped_saved_or_resumed(two, tmp_path, check):
    two.run(check, tmp_path)
