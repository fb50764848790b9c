"""What a run shows beside gradients, losses and trained weights."""

import copy

import pytest
import torch
from torch import nn

from trainstep.ladder.trial import shown
from trainstep.ladder.trial.outermost import Outermost
from trainstep.ladder.trial.shown import Shown


def test_calls_are_told_by_their_mode_and_outputs_of_those_in_evaluation_are_kept(monkeypatch):
    monkeypatch.setattr(shown, "MOST_CALLS", 2)
    monkeypatch.setattr(shown, "MOST_ELEMENTS", 4)
    model, found = nn.Linear(2, 3), Shown()
    calls = [(True, True, 9), (True, True, 9), (True, False, 1), (False, True, 3), (False, False, 2)]
    for training, has_gradients, size in calls:
        model.train(training)
        with torch.set_grad_enabled(has_gradients):
            found.see_call(model, {"logits": model(torch.ones(size, 2)), "ids": torch.arange(3)})
    found.see_call(nn.MSELoss(), torch.ones(1))
    modes = "2 in training, 1 in training without gradients, 1 in evaluation, 1 in evaluation without gradients"
    assert found.modes == modes
    kept = found.found([], {}, [])
    own = model(torch.ones(1, 2)).detach()[0]
    assert list(kept.after) == ["output 1 of evaluation call 1", "output 1 of evaluation call 2"]
    assert torch.equal(kept.after["output 1 of evaluation call 1"], own)
    assert torch.equal(kept.after["output 1 of evaluation call 2"], own.repeat(3)[::3]), "evenly spaced"
    assert not any(map(torch.any, kept.before.values()))


class Owner:
    def __init__(self, model):
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters()}


def a_dict(model):
    owner = Owner(model)
    return owner, lambda: setattr(owner, "weights", {name: each + 1 for name, each in owner.weights.items()})


def a_list(model):
    weights = [each.detach().clone() for each in model.parameters()]
    return weights, lambda: torch._foreach_add_(weights, 1.0)


def a_module(model):
    other = copy.deepcopy(model).requires_grad_(False)
    return other, lambda: torch._foreach_add_(list(other.parameters()), 1.0)


@pytest.mark.parametrize("make", [a_dict, a_list, a_module])
def test_copies_of_the_weights_are_found_though_nothing_else_holds_them_any_more(make):
    model, found = nn.Sequential(nn.Linear(37, 11), nn.BatchNorm1d(11)), Shown()
    initial = {name: (each, each.detach().clone()) for name, each in model.named_parameters()}
    gradients = {name: torch.ones_like(each) for name, each in model.named_parameters()}
    own = [*gradients.values(), *model.parameters(), *(each for _, each in initial.values())]
    _, update = make(model)
    found.hold([model], initial, own)
    update()
    del _, update
    kept = found.found([model], initial, own)
    assert [name for name in kept.after if name.startswith("0.weight")] == ["0.weight in copy 1 of the weights"]
    assert len(kept.after) == 4
    for name, value in kept.after.items():
        assert torch.allclose(value - kept.before[name], torch.tensor(1.0), atol=1e-5)


def test_calls_after_the_first_updates_are_seen_from_evaluation_on_until_the_next(monkeypatch):
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)
    model, seen = nn.Linear(2, 2), []
    outermost = Outermost(lambda module, results: seen.append(module.training))
    outermost.install()
    for switch in (lambda: None, outermost.remove, model.eval, model.train, outermost.remove):
        switch()
        model(torch.ones(2))
    assert seen == [True, False, True]
