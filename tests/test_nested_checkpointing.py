"""Nested checkpointing takes the memory and the recomputation of notebook/theory.md, by the number of blocks."""

import math

import pytest
import torch

from examples.nested_checkpointing import BATCH, CONTEXT, MODEL, STRATEGIES, measure
from trainstep.measure.memory import residuals
from trainstep.step.model.transformer import build_transformer

INPUT = BATCH * CONTEXT * MODEL.d_model * 4


@pytest.fixture(scope="module")
def block_keeps():
    """Bytes that autograd holds of one block, its input included."""
    model, x = build_transformer(MODEL), torch.randn(BATCH, CONTEXT, MODEL.d_model, requires_grad=True)
    return residuals(lambda: model.blocks[0](x, model.rotary), model)[0].bytes


@pytest.mark.parametrize(
    ("strategy", "peak", "repeated"),
    [
        ("none", lambda n, r, a: n * r, lambda n: 0),
        ("every block", lambda n, r, a: n * a, lambda n: n),
        ("every √L blocks", lambda n, r, a: math.isqrt(n) * (r + a), lambda n: n),
        ("halves of halves", lambda n, r, a: math.log2(n) * a, lambda n: n // 2 * (math.log2(n) + 1)),
        ("prefixes", lambda n, r, a: 0, lambda n: n * (n + 1) // 2),
    ],
)
def test_memory_and_recomputation_grow_as_derived(strategy, peak, repeated, block_keeps):
    """To the byte: what is the same for every number of blocks, as weights' gradients, cancels."""
    small, large = 4, 16
    found = {blocks: measure(strategy, blocks) for blocks in (small, large)}
    expected = [peak(blocks, block_keeps, INPUT) for blocks in (small, large)]
    assert found[large][0] - found[small][0] == expected[1] - expected[0]
    assert {blocks: count for blocks, (_, count) in found.items()} == {n: repeated(n) for n in (small, large)}


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_gradients_are_those_without_checkpointing(strategy):
    def gradients(name):
        torch.manual_seed(0)
        model, x = build_transformer(MODEL), torch.randn(BATCH, CONTEXT, MODEL.d_model, requires_grad=True)
        STRATEGIES[name](lambda x: model.blocks[0](x, model.rotary), 5, x).sum().backward()
        return [x.grad, *(each.grad for each in model.blocks[0].parameters())]

    for own, plain in zip(gradients(strategy), gradients("none"), strict=True):
        torch.testing.assert_close(own, plain, rtol=0, atol=0)
