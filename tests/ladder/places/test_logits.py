"""Logits that are not computed say so where they would be others by now."""

import pytest
import torch

from tests.ladder.places.heads import IDS, WORDS, finder_in, model_of, plain
from trainstep.base.errors import UnsupportedError
from trainstep.ladder.places.logits import Logits

TOO_LATE = "looks at logits that were not computed, .* after it has changed"


@pytest.fixture
def model(monkeypatch):
    """A model whose head's logits are not computed."""
    own = model_of()
    finder_in(monkeypatch).see_model(own)
    return own


class PastVersions(torch.optim.Optimizer):
    """Somebody's own, whose updates raise no version."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data.sub_(each.grad, alpha=group["lr"])


OPTIMIZERS = {
    "plain": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "p.data": lambda parameters: PastVersions(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_logits_that_are_looked_at_after_an_update_are_refused(name, model):
    optimizer = OPTIMIZERS[name](model.parameters())
    logits = model(IDS)
    plain(model, logits).backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match=TOO_LATE):
        logits.argmax(-1)
    assert model(IDS).argmax(-1).shape == IDS.shape, "those of the next step are looked at as ever"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_backward_after_an_update_that_computes_logits_again_is_refused(name, model):
    """Autograd has no weight to watch where the hidden states want no gradient, and sees no fused update at all."""
    for part in (model.embed, model.body):
        part.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.head.parameters())
    first, second = plain(model, model(IDS)), plain(model, model(IDS.flip(0)))
    first.backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match=TOO_LATE):
        second.backward()


def test_a_view_from_before_a_change_in_place_is_refused(model):
    logits = model(IDS)
    view = logits.view(-1, WORDS)
    logits.mul_(2)
    with pytest.raises(UnsupportedError, match="changes logits in place"):
        view.sum()


def test_an_index_is_as_it_was_when_it_was_used(model):
    expected = model_of()(IDS)[IDS > 4].sum()
    chosen = IDS > 4
    part = model(IDS)[chosen]
    chosen.logical_not_()
    assert isinstance(part, Logits)
    torch.testing.assert_close(part.sum(), expected)


def past_functions(logits):
    """As C++ code uses tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return (logits * 2).square().mean()


@pytest.mark.parametrize("name", ["hidden", "weight", "storage"])
def test_what_logits_come_of_is_as_it_was_where_their_loss_is_computed(name, model):
    hidden = torch.tanh(model.body(model.embed(IDS)))
    logits = model.head(hidden)
    with torch.no_grad():
        if name == "storage":
            model.head.weight.untyped_storage().resize_(0)  # as wrappers free what they have gathered
        else:
            {"hidden": hidden, "weight": model.head.weight}[name].mul_(2)
    with pytest.raises(UnsupportedError, match=TOO_LATE):
        plain(model, logits)
    with pytest.raises(UnsupportedError, match=TOO_LATE):
        logits.sum()


def test_gradients_past_functions_are_of_the_weights_that_there_were(model):
    loss = past_functions(model(IDS))
    plain(model, model(IDS)).backward()
    OPTIMIZERS["fused"](model.parameters()).step()
    with pytest.raises(UnsupportedError, match=TOO_LATE):
        loss.backward()


def test_gradients_past_functions_of_logits_that_were_changed_in_place_are_refused(model):
    """The node behind them has the gradients of what they were."""
    logits = model(IDS)
    logits.mul_(2)
    loss = past_functions(logits)
    with pytest.raises(UnsupportedError, match="changes logits in place"):
        loss.backward()


def test_a_change_in_place_past_functions_is_refused(model):
    logits = model(IDS)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(UnsupportedError, match="is to change logits in place"):
        logits.mul_(2)


def test_gradients_of_gradients_past_functions_are_refused(model):
    loss = past_functions(model(IDS))
    with pytest.raises(UnsupportedError, match="no gradients of their gradients"):
        torch.autograd.grad(loss, model.head.weight, create_graph=True)
