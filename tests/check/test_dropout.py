"""Dropout switched off: everywhere that PyTorch has it, compiled or not, and back on afterwards."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.check.dropout import drops_otherwise, eager_random, without_dropout

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


def test_elements_are_counted_by_probability():
    with without_dropout() as seen:
        nn.Dropout(0.5)(X)
        nn.Dropout(0.25)(X)
        F.dropout(X[..., :4], 0.5)
    assert seen.elements == {0.5: 64 + 16, 0.25: 64}


@pytest.mark.parametrize("batch", [(), (2,)])
def test_of_attention_scores_are_counted(batch):
    q, k = torch.ones(*batch, 3, 5, 4), torch.ones(*batch, 3, 7, 4)
    with without_dropout() as seen:
        F.scaled_dot_product_attention(q, k, k, dropout_p=0.1)
    assert seen.elements == {0.1: math.prod(batch) * 3 * 5 * 7}


@pytest.mark.parametrize("task", [0, 7])
def test_what_backward_computes_again_is_counted_once(monkeypatch, task):
    x = X.clone().requires_grad_()
    with without_dropout() as seen:
        checkpoint(lambda x: nn.Dropout(0.5)(x).sin(), x, use_reentrant=False).sum().backward()
        assert seen.calls == 2, "it was computed again"
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: task)
        nn.Dropout(0.5)(X)
    assert seen.elements == {0.5: 64}


HALF, QUARTER = {0.5: 64}, {0.25: 64}


@pytest.mark.parametrize(
    ("own", "plain", "are_counted", "said"),
    [
        (HALF, dict(HALF), True, ""),
        ({0.5: 0}, HALF, False, ""),
        ({}, {}, True, ""),
        ({0.5: 1024}, HALF, True, "drops from 1,024 elements with p = 0.5 in a pass, and the plain step from 64 ele"),
        (QUARTER, HALF, False, "drops from 64 elements with p = 0.25 in a pass, and the plain step from 64 elements w"),
        ({}, HALF, False, "drops from nothing in a pass, and the plain step from 64 elements with p = 0.5"),
        (HALF | QUARTER, HALF, True, "drops from 64 elements with p = 0.25 and 64 elements with p = 0.5 in a pass,"),
    ],
)
def test_a_step_that_drops_otherwise_is_told_from_one_that_does_not(own, plain, are_counted, said):
    found = drops_otherwise(own, plain, are_counted=are_counted)
    assert found.startswith(said)
    assert bool(found) == bool(said)


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
    assert seen.elements == {0.5: 0}, "calls of compiled code are not counted"
    assert not torch.equal(draw(compiled), X)


def test_what_is_compiled_inside_draws_as_eager_code_does():
    compiled, eager = Compiled(), draw(nn.Dropout(0.5))
    own = draw(compiled)
    assert not torch.equal(own, eager), "or else nothing is shown here"
    with eager_random():
        assert torch.equal(draw(compiled), eager)
    assert torch.equal(draw(compiled), own)
