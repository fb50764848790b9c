"""The outermost training calls of models."""

import torch
from torch import nn

from trainstep.ladder.trial.outermost import Outermost
from trainstep.ladder.trial.settings import Settings


def test_models_are_seen_once_before_their_first_training_call():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x)

    model, seen, call = Outer(), [], nn.Module.__call__
    outermost = Outermost()
    outermost.on_first.append(seen.append)
    outermost.install()
    try:
        with torch.no_grad():
            model(torch.ones(2))
        assert seen == []
        nn.MSELoss()(model(torch.ones(2)), torch.ones(2))
        model(torch.ones(2))
        assert seen == [model], "neither its parts, nor what has no parameters, nor a second time"
    finally:
        outermost.remove()
    assert nn.Module.__call__ is call


def test_parts_whose_class_has_a_call_of_its_own_are_no_models(monkeypatch):
    """As the watch gives one to the class of another model, made of the call that it found."""
    model, other, seen = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), []
    outermost = Outermost()
    outermost.on_first.append(seen.append)
    outermost.install()
    try:
        call = nn.Linear.__call__
        monkeypatch.setattr(nn.Linear, "__call__", lambda self, *args: call(self, *args), raising=False)
        other(model(torch.ones(2)))
        assert seen == [model, other]
    finally:
        outermost.remove()


def test_a_first_call_that_is_compiled_has_no_code_of_ours_in_it():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, settings, outermost = Twice(2, 3), Settings(), Outermost()
    outermost.on_first += [settings.see_model, lambda module: module.compile(backend="eager", fullgraph=True)]
    outermost.on_first_over = settings.see_results
    outermost.install()
    try:
        model(torch.ones(2))
    finally:
        outermost.remove()
    assert settings._models[0]["floats"] == [True]
