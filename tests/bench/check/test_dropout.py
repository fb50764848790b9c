"""Dropout switched off: everywhere that PyTorch has it, compiled or not, and back on afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainstep.bench.check.dropout import eager_random, without_dropout

X = torch.linspace(0.5, 2, 64).view(1, 4, 16)

ATTENTION = nn.MultiheadAttention(16, 2, dropout=0.5)

CALLS = {
    "Dropout": nn.Dropout(0.5),
    "Dropout1d": nn.Dropout1d(0.5),
    "Dropout2d": lambda x: nn.Dropout2d(0.5)(x[None]),
    "Dropout3d": lambda x: nn.Dropout3d(0.5)(x[None, None]),
    "AlphaDropout": nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.5),
    "in place": lambda x: F.dropout(x.clone(), 0.5, True, True),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "MultiheadAttention": lambda x: ATTENTION(x, x, x)[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_it_drops_nothing_and_afterwards_does_again(name):
    def draw(seed):
        torch.manual_seed(seed)
        return CALLS[name](X)

    with without_dropout() as seen:
        assert torch.equal(draw(1), draw(2))
    assert seen.calls == 2
    assert not torch.equal(draw(1), draw(2))


def test_what_would_drop_nothing_is_not_counted():
    with without_dropout() as seen:
        assert torch.equal(nn.Dropout(0.5).eval()(X), X)
        assert torch.equal(nn.Dropout(0.0)(X), X)
        assert torch.equal(F.alpha_dropout(X), X), "not training, by default"
        F.scaled_dot_product_attention(X, X, X)
    assert seen.calls == 0


class Compiled(nn.Module):
    """Dropout alone would not be compiled: a frame of torch.nn is left as it is."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.compile()

    def forward(self, x):
        return self.dropout(x) + 0.0


def draw(dropout):
    torch.manual_seed(0)
    return dropout(X)


def test_what_is_compiled_inside_has_none_and_outside_has():
    compiled = Compiled()
    assert not torch.equal(draw(compiled), X)
    with without_dropout() as seen:
        assert torch.equal(draw(compiled), X)
        assert torch.equal(draw(compiled), X)
    assert seen.calls
    assert not torch.equal(draw(compiled), X)


def test_what_is_compiled_inside_draws_as_eager_code_does():
    compiled, eager = Compiled(), draw(nn.Dropout(0.5))
    own = draw(compiled)
    assert not torch.equal(own, eager), "or else nothing is shown here"
    with eager_random():
        assert torch.equal(draw(compiled), eager)
    assert torch.equal(draw(compiled), own)
