"""What a script sets itself, seen while it runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainstep.ladder.trial.settings import Settings


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_model_that_is_compiled_is_told_from_its_blocks(is_wrapped):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    settings = Settings()
    for compile_of in (lambda model: None, lambda model: model.blocks[0].compile(), lambda model: model.compile()):
        model = Blocks()
        compile_of(model)
        settings.see_model(Wrapper(model) if is_wrapped else model)
    settings.see_model(torch.compile(Blocks()))
    found = settings.found([])["models"]
    assert [each["is_compiled"] for each in found] == [False, True, True, True]
    assert [each["is_whole_compiled"] for each in found] == [False, False, True, True]


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_operators_are_those_of_the_graph_and_unknown_where_some_of_it_is_hidden():
    settings, x = Settings(), torch.randn(2, 4, 8, requires_grad=True)
    settings.see_loss(F.scaled_dot_product_attention(x, x, x).sum())
    settings.see_loss((F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum(), 3.0))
    found = settings.found([])["operators"]
    assert any("Softmax" in each or each.startswith("ScaledDotProduct") for each in found)
    assert "SumBackward0" in found
    settings.see_loss(Own.apply(x).sum())
    assert settings.found([])["operators"] is None
