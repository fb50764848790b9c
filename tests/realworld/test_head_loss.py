"""Heads of libraries' models, found by the ladder of scripts and joined with their losses, or left alone."""

import pytest
import torch
import torch.nn.functional as F

from tests.realworld import models
from trainstep.ladder.places.head_loss import HeadLoss
from trainstep.step.model.transformer import chunked_cross_entropy

pytestmark = pytest.mark.realworld


def trained(name, see=lambda model: None):
    torch.manual_seed(0)
    made = getattr(models, name)()
    see(made.module)
    batch = next(iter(made.batches))
    loss = made.loss(made.forward(made.module, batch), batch)
    loss.backward()
    return [loss.detach(), *(each.grad for each in made.module.parameters() if each.grad is not None)]


@pytest.mark.parametrize(
    ("name", "package", "is_joined"),
    [
        *(("llama", "transformers", True), ("bert", "transformers", True), ("t5", "transformers", True)),
        *(("lora", "peft", True), ("nanogpt", "torch", True)),
        ("gemma2", "transformers", False),  # caps its logits
        ("vit", "transformers", False),  # has a class for each picture
        ("x_transformers", "x_transformers", False),  # has a loss of its own
    ],
)
def test_losses_and_gradients_are_the_models_own(name, package, is_joined, monkeypatch):
    pytest.importorskip(package)
    expected, notes = trained(name), []
    monkeypatch.setattr(F, "linear", F.linear)
    monkeypatch.setitem(chunked_cross_entropy.__kwdefaults__, "chunk_tokens", 9)
    own = trained(name, HeadLoss(lambda line, how: notes.append(line)).see_model)
    assert len(notes) == is_joined
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
