"""RoPE of queries and keys: results and gradients within the budget, grouped heads, strides, and in place."""

import pytest
import torch

from tests.fused.places import DEVICE, DTYPES, HERE, draw
from trainstep.base.errors import UsageError
from trainstep.check.fused import check
from trainstep.fused import eager, rope
from trainstep.step.model.transformer import RotaryEmbedding

pytestmark = HERE
NAMES = ("q", "k", "dq", "dk")


def tables(head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = RotaryEmbedding(head_dim, 100.0, positions)
    rotary.init_weights()
    return rotary.cos.to(DEVICE), rotary.sin.to(DEVICE)


def inputs(batch=2, heads=4, kv_heads=4, positions=9, head_dim=16, dtype=torch.float32, **more):
    q = draw(batch, heads, positions, head_dim, dtype=dtype, seed=1, **more)
    k = draw(batch, kv_heads, positions, head_dim, dtype=dtype, seed=2, **more)
    return q, k, *tables(head_dim, positions + 3)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 1, "heads": 1, "kv_heads": 1, "positions": 1, "head_dim": 2},
        {"heads": 20, "kv_heads": 5, "head_dim": 6},
        {"head_dim": 80},
        {"heads": 3, "kv_heads": 1, "positions": 17},
        {"batch": 1, "heads": 33, "kv_heads": 3, "positions": 2, "head_dim": 130},  # three blocks of queries
    ],
    ids=str,
)
def test_results_and_gradients(shape, dtype) -> None:
    budget = check(rope, eager.rope, inputs(dtype=dtype, **shape), NAMES)
    assert budget.is_right, str(budget)


def second_gradients(turn, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    fourth = sum(each.square().square().sum() for each in turn(*given))
    first = torch.autograd.grad(fourth, given[:2], create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), given[:2])


def test_gradients_of_gradients() -> None:
    """Held against float64: twice what plain float32 is off by, and a rounding of the largest."""
    given = inputs()
    exact = second_gradients(eager.rope, *(each.detach().double().requires_grad_() for each in given))
    every = zip(second_gradients(rope, *given), second_gradients(eager.rope, *given), exact, strict=True)
    for own, plain, expected in every:
        assert expected.abs().max() > 1
        allowed = 2 * (plain - expected).abs().max() + 2**-24 * expected.abs().max()
        assert (own - expected).abs().max() <= allowed


def test_it_turns_as_the_model_does() -> None:
    q, k, *_ = inputs(grad=False)
    rotary = RotaryEmbedding(16, 100.0, 12)
    rotary.init_weights()
    rotary = rotary.to(DEVICE)
    for found, x in zip(rope(q, k, rotary.cos, rotary.sin), (q, k), strict=True):
        torch.testing.assert_close(found, rotary(x))


def test_strides_are_kept() -> None:
    q, k, cos, sin = inputs(grad=False)
    heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k)]
    found = rope(*heads_last, cos, sin)
    assert [each.stride() for each in found] == [each.stride() for each in heads_last]
    for own, expected in zip(found, eager.rope(q, k, cos, sin), strict=True):
        torch.testing.assert_close(own, expected)
    copied = rope(q.mT.contiguous().mT, k[:, :1].expand_as(k), cos, sin)  # neighbours apart; heads that share memory
    torch.testing.assert_close(copied, eager.rope(q, k[:, :1].expand_as(k), cos, sin))
    dq, dk = torch.autograd.grad([each.sum() for each in found], heads_last)  # gradients of stride 0
    assert (dq.shape, dk.shape) == (q.shape, k.shape)


@pytest.mark.parametrize(
    "shape",
    [{}, {"heads": 33, "kv_heads": 3, "head_dim": 130}, {"heads": 2, "kv_heads": 18, "head_dim": 130}],
    ids=["one block", "more blocks of queries", "more blocks of keys"],
)
def test_in_place(shape) -> None:
    q, k, cos, sin = inputs(**shape)
    moved = [(x * 1.0).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    found = rope(*moved, cos, sin, in_place=True)
    expected = eager.rope(q, k, cos, sin)
    for own, before, other in zip(found, moved, expected, strict=True):
        assert own.data_ptr() == before.data_ptr()
        torch.testing.assert_close(own, other)
    given = [draw(*each.shape, seed=5, grad=False) for each in expected]
    for own, other in zip(
        torch.autograd.grad(found, (q, k), given), torch.autograd.grad(expected, (q, k), given), strict=True
    ):
        torch.testing.assert_close(own, other)


def test_in_place_what_was_saved_before_is_an_error() -> None:
    q, k, cos, sin = inputs()
    needs_its_result = q.exp()
    turned, _ = rope(needs_its_result, k * 1.0, cos, sin, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned.sum().backward()


def test_in_place_refuses_leaves_and_shared_memory() -> None:
    q, k, cos, sin = inputs()
    with pytest.raises(UsageError, match="cannot write over q, a leaf"):
        rope(q, k, cos, sin, in_place=True)
    q, k = q.detach(), k.detach()
    with pytest.raises(UsageError, match="write over k with strides"):
        rope(q, k[:, :1].expand_as(k), cos, sin, in_place=True)
    with pytest.raises(UsageError, match="same memory"):
        rope(q, q, cos, sin, in_place=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q[0], k[0], cos, sin),
        lambda q, k, cos, sin: (q[..., :15], k[..., :15], cos, sin),
        lambda q, k, cos, sin: (q, k[:, :, :4], cos, sin),
        lambda q, k, cos, sin: (q, k.half(), cos, sin),
        lambda q, k, cos, sin: (q, k, cos[:5], sin[:5]),
        lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin),
        lambda q, k, cos, sin: (q[:1].expand(70_000, -1, -1, -1), k[:1].expand(70_000, -1, -1, -1), cos, sin),
    ],
)
def test_bad_inputs(change) -> None:
    with pytest.raises(UsageError, match=r"fused RoPE takes .*got q"):
        rope(*change(*inputs()))
