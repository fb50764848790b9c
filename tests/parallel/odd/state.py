"""Weights and state that are changed, saved or loaded by hand."""

import copy

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.parallel.odd.nets import Net, net, plain
from tests.parallel.odd.runs import STEPS, WIDTH, Scenario, steps, three_steps


def own_update(run):
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        with torch.no_grad():
            for each in run.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad
        for each in run.parameters():
            each.grad = None


@torch.no_grad()
def own_decay(run):
    for each in run.parameters():
        each.mul_(0.99).clamp_(-0.2, 0.2)


@torch.no_grad()
def own_norms(run):
    """Weights kept at norm 1 per row by hand."""
    for name, each in run.inner.named_parameters():
        if name.endswith("weight") and each.dim() > 1:
            each.div_(each.norm())


def added_parameter(run):
    run.inner.late = nn.Parameter(torch.ones(WIDTH, WIDTH) / 9)
    three_steps(run)


def freeze_later(run, step):
    if step == 1:
        run.inner.head.weight.requires_grad_(False)
    run.backward(step)


def replaced_later(run):
    assert run.optimizer is not None
    run.inner.head.weight = nn.Parameter(torch.eye(WIDTH))
    run._optimizer = None
    three_steps(run)


def state_round_trip(run):
    three_steps(run)
    state = {name: value.clone() for name, value in run.module.state_dict().items()}
    run.backward(0)
    run.finish()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.module.load_state_dict(state)


def plain_state(run, inner=False):
    """Takes over the whole state of the plain module."""
    torch.manual_seed(5)
    target = run.module if run.scheme == "fsdp" and not inner else run.inner
    target.load_state_dict(run.scenario.model().state_dict())
    three_steps(run)


def state_by_torch(run):
    three_steps(run)
    get_state_dict(run.module, run.optimizer)


def foreign_state(run):
    """The optimizer's state of one process, which has whole tensors."""
    three_steps(run)
    torch.manual_seed(0)
    plain = run.scenario.model()
    optimizer = run.scenario.optimizer(plain.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    run.optimizer.load_state_dict(optimizer.state_dict())
    three_steps(run)


def averaged_copy(run):
    """A copy of the module for an average of the weights."""
    twin = copy.deepcopy(run.module)

    @torch.no_grad()
    def average(run):
        run.optimizer.zero_grad()
        for mine, its in zip(run.module.parameters(), twin.parameters(), strict=True):
            its.lerp_(mine, 0.5)

    steps(zero=average)(run)
    with torch.no_grad():
        for mine, its in zip(run.module.parameters(), twin.parameters(), strict=True):
            mine.copy_(its)


def averaged_elementwise(run):
    """An average of the weights, kept beside them."""
    averages = [each.detach().clone() for each in run.parameters()]
    steps(lambda run: torch._foreach_lerp_(averages, [each.detach() for each in run.parameters()], 0.5))(run)
    with torch.no_grad():
        for mine, average in zip(run.parameters(), averages, strict=True):
            mine.copy_(average)


SCENARIOS = {
    "own update": Scenario("`p -= lr * p.grad`", Net, train=own_update),
    "own decay": Scenario("`p.mul_(0.99).clamp_(-0.2, 0.2)`", Net, train=steps(own_decay)),
    "own norms": Scenario("the module's weights divided by their norms", Net, train=steps(own_norms)),
    "average": Scenario("an elementwise average of the weights", Net, train=averaged_elementwise),
    "copied": Scenario("copy.deepcopy of the wrapper", Net, train=averaged_copy),
    "added parameter": Scenario(
        "a parameter added after wrapping",
        net(forward=lambda net, x: plain(net, x @ net.late if hasattr(net, "late") else x)),
        train=added_parameter,
    ),
    "frozen later": Scenario("a parameter frozen after wrapping", Net, train=steps(backward=freeze_later)),
    "replaced later": Scenario("a parameter replaced after wrapping", Net, train=replaced_later),
    "state round trip": Scenario("load_state_dict of an earlier state_dict", Net, train=state_round_trip),
    "plain state": Scenario("load_state_dict of the plain module's state", Net, train=plain_state),
    "plain state, inner": Scenario(
        "the module's load_state_dict of the plain module's state", Net, train=lambda run: plain_state(run, inner=True)
    ),
    "get_state_dict": Scenario("torch.distributed.checkpoint's get_state_dict", Net, train=state_by_torch),
    "plain optimizer's state": Scenario("load_state_dict of the plain optimizer's state", Net, train=foreign_state),
}
