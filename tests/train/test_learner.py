"""Continuing text with a model whose every next token is known."""

import torch
from torch import nn

from trainstep.train.learner import as_text, generate


class Successor(nn.Module):
    """The next token is the last one plus 1, and the model knows no more than `context` tokens; ids from 256 tempt."""

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.widths = set()

    def forward(self, tokens):
        assert tokens.shape[1] <= self.context
        self.widths.add(tokens.shape[1])
        logits = 50.0 * nn.functional.one_hot((tokens + 1) % 256, 300).float()
        logits[..., 280] = 100.0
        return logits


def test_tokens_follow_the_model_beyond_its_context():
    for temperature in (0.0, 0.5):
        model = Successor(6)
        prompts = torch.tensor([[97, 98, 99], [48, 49, 50]])
        tokens = generate(model, prompts, new_tokens=9, context=6, temperature=temperature, seed=0)
        assert [as_text(row) for row in tokens] == ["abcdefghijkl", "0123456789:;"]
        assert model.widths == {6}, "one length, so that nothing is compiled anew"


def test_draws_follow_the_seed():
    def text(seed):
        flat = lambda tokens: torch.zeros(*tokens.shape, 300)  # noqa: E731
        return generate(
            flat, torch.zeros(1, 1, dtype=torch.int64), new_tokens=20, context=8, temperature=1.0, seed=seed
        )

    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))
    assert text(1).max() < 256


def test_broken_characters_are_shown():
    assert as_text(torch.tensor([104, 105, 0xC3])) == "hi\ufffd"
