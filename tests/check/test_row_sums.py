"""Row sums of softmax's backward are off as fused attention's are: by roundings of its output."""

import functools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import trainstep.check.rounding as module
from trainstep.check.rounding import RandomRounding
from trainstep.check.row_sums import RowSums
from trainstep.step.casting import in_tf32

HEADS, QUERIES, HEAD_DIM = 256, 128, 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def drawn(alike: float = 0.0):
    """Queries with a direction in common, keys, values and the output's gradient, exact in 8 bits.

    Args:
        alike: 1 for tokens whose outputs, and gradients of them, are all alike in a head; 0 for none.
    """
    torch.manual_seed(0)
    q, k, v, gradient = torch.randn(4, 1, HEADS, QUERIES, HEAD_DIM)
    common = torch.randn(1, HEADS, 1, HEAD_DIM)
    return [
        each.bfloat16().double()
        for each in (2 + q / 4, (1 - alike) * k / 8, v + 1, ((1 - alike) * gradient + alike * common) / 8)
    ]


@pytest.fixture
def inputs():
    return drawn()


def gradient_of_keys(inputs, dtype, drop=0.0):
    """Of attention as it is written, its softmax in float32 as under autocast."""
    q, k, v, gradient = (each.to(dtype).requires_grad_() for each in inputs)
    scores = (q @ k.mT) / math.sqrt(HEAD_DIM)
    p = scores.softmax(-1, dtype=max(dtype, torch.float32, key=lambda each: each.itemsize)).to(dtype)
    output = torch.dropout(p, drop, train=True) @ v
    return torch.autograd.grad(output, k, gradient)[0].double()


def from_the_output(inputs, dtype):
    """The same, exact, but for the row sums: those of an output that was rounded."""
    q, k, v, gradient = inputs
    p = ((q @ k.mT) / math.sqrt(HEAD_DIM)).softmax(-1)
    row = (gradient * (p @ v).to(dtype).double()).sum(-1, keepdim=True)
    return (p * (gradient @ v.mT - row)).mT @ q / math.sqrt(HEAD_DIM)


def over_keys(gradient):
    """Summed over a head's keys, along the direction that queries have in common: nothing, where rows of dS sum to
    nothing."""
    return gradient.sum(-2).mean(-1).square().mean().sqrt()


@pytest.mark.parametrize("alike", [0.0, 1.0])
@pytest.mark.parametrize("precision", DTYPES)
def test_what_keys_have_in_common_is_off_by_as_much_as_fused_attention_is(precision, alike):
    dtype, inputs = DTYPES[precision], drawn(alike)
    fused = float(over_keys(from_the_output(inputs, dtype)))
    plain = gradient_of_keys(inputs, dtype)
    assert float(over_keys(gradient_of_keys(inputs, torch.float64))) < 1e-9 * fused
    assert float(over_keys(plain)) < fused / 3, "the formula's own rows sum to nothing"
    with RandomRounding(precision, 0):
        found = gradient_of_keys(inputs, dtype)
    assert float(over_keys(found - plain)) == pytest.approx(fused, rel=0.1)


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_in_tf32_they_are_off_by_what_its_inputs_are_rounded_by(alike):
    """TF32 holds v and the output's gradient here: P in the output, and then dS, are rounded."""
    q, k, v, gradient = inputs = drawn(alike)
    p = ((q @ k.mT) / math.sqrt(HEAD_DIM)).softmax(-1)
    row = (gradient * (in_tf32(p.float()).double() @ v)).sum(-1, keepdim=True)
    ds = in_tf32((p * (gradient @ v.mT - row)).float()).double()
    fused = float(over_keys(ds.mT @ q / math.sqrt(HEAD_DIM)))
    plain = gradient_of_keys(inputs, torch.float32)
    found = []
    for seed in range(6):
        with RandomRounding("tf32", seed):
            found.append(float(over_keys(gradient_of_keys(inputs, torch.float32) - plain)))
    assert math.sqrt(sum(each**2 for each in found) / 6) == pytest.approx(fused, rel=0.3)


def test_the_outputs_gradient_rounded_to_tf32_is_part_of_it():
    torch.manual_seed(0)
    p, v, gradient = torch.rand(2, 6, 8).softmax(-1), torch.randn(2, 8, 4).bfloat16().float(), torch.randn(2, 6, 4)
    sums = RowSums(torch.float32)
    output = p @ v
    sums.see(torch.ops.aten._softmax, (), p)
    sums.see(torch.ops.aten.bmm, (p, v), output)
    sums.see(torch.ops.aten.bmm, (gradient, v.mT), gradient @ v.mT)
    rounded_p, rounded = in_tf32(p), in_tf32(gradient)
    row = (gradient * (rounded_p @ v)).sum(-1) - (p * (rounded @ v.mT)).sum(-1)
    torch.testing.assert_close(sums.row_errors(p, -1)[..., 0], row, rtol=1e-2, atol=1e-7)


def test_tokens_that_are_alike_are_off_alike():
    """Over as many queries random roundings would cancel to a part of it."""
    apart, alike = (float(over_keys(from_the_output(drawn(each), torch.bfloat16))) for each in (0.0, 1.0))
    assert alike > 5 * apart


def test_other_precisions_draw_none(inputs):
    fused = float(over_keys(from_the_output(inputs, torch.bfloat16)))
    plain = gradient_of_keys(inputs, torch.float32)
    for precision in ("fp32", "bf16"):  # the last has nothing in bf16 to round here
        with RandomRounding(precision, 0):
            found = gradient_of_keys(inputs, torch.float32)
        assert float(over_keys(found - plain)) < fused / 20


def test_every_layer_has_its_own_and_a_block_that_is_computed_again_the_same(inputs, monkeypatch):
    seen = []
    errors = module.RowSums.row_errors

    def spy(self, output, dim):
        found = errors(self, output, dim)
        seen.append(found.clone())
        return found

    monkeypatch.setattr(module.RowSums, "row_errors", spy)
    q, k, v, gradient = (each.bfloat16().requires_grad_() for each in inputs)

    def layer(x, v):
        return (((x @ k.mT) / math.sqrt(HEAD_DIM)).softmax(-1, dtype=torch.float32).bfloat16()) @ v

    def twice(call):
        seen.clear()
        with RandomRounding("bf16", 0):
            torch.autograd.grad(call(call(q, v), v * 1), q, gradient)
        return list(seen)

    once = twice(layer)
    again = twice(functools.partial(checkpoint, layer, use_reentrant=False))
    assert len(once) == len(again) == 2
    assert float((once[0] - once[1]).norm()) > float(once[1].norm()) / 2
    for own, other in zip(once, again, strict=True):
        assert own.shape == (1, HEADS, QUERIES, 1)
        assert float((own - other).norm()) < 0.05 * float(own.norm())


def test_a_softmax_over_a_vocabulary_has_none(inputs):
    logits = inputs[0].bfloat16().requires_grad_()
    plain = torch.autograd.grad(logits.softmax(-1).square().sum(), logits)[0]
    with RandomRounding("bf16", 0):
        found = torch.autograd.grad(logits.softmax(-1).square().sum(), logits)[0]
    torch.testing.assert_close(found, plain, rtol=0.1, atol=1e-3)
    assert not torch.equal(found, plain)


def test_what_else_is_multiplied_by_the_values_has_none():
    p, v = torch.rand(2, 6, 8).softmax(-1), torch.randn(2, 8, 4)
    sums = RowSums(torch.float32)
    sums.see(torch.ops.aten._softmax, (), p)
    sums.see(torch.ops.aten.bmm, (p, v), p @ v)
    other = torch.randn(2, 3, 4)
    sums.see(torch.ops.aten.bmm, (other, v.mT), other @ v.mT)
    assert sums.row_errors(p, -1) is None


def test_outputs_are_let_go_when_their_gradient_has_come(inputs):
    with RandomRounding("bf16", 0) as rounding:
        gradient_of_keys(inputs, torch.bfloat16, drop=0.1)
        assert rounding._row_sums is not None
        assert not rounding._row_sums._outputs
