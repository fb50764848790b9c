"""The products of the joined loss, for vocabularies of any size."""

import pytest
import torch

from tests.fused.places import HERE, Products, draw
from trainstep.fused.logits import add_by_weight, by_states, by_weight, logits_of

pytestmark = HERE


@pytest.mark.parametrize(("n_vocab", "apart"), [(1, 16), (16, 16), (17, 32), (50_257, 50_272)])
def test_rows_of_logits_are_aligned_and_what_follows_the_last_is_theirs(n_vocab, apart) -> None:
    states, weight = draw(3, 8, grad=False), draw(n_vocab, 8, seed=1, grad=False)
    logits = logits_of(states, weight)
    assert logits.stride() == (apart, 1)
    assert logits.untyped_storage().nbytes() == 3 * apart * 4
    torch.testing.assert_close(logits, states @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_vocab", [1, 7, 8, 9, 50])
def test_products_of_any_vocabulary_have_a_multiple_of_eight_words_and_the_rest(n_vocab, dtype) -> None:
    states, weight = (
        draw(*shape, seed=seed, grad=False).to(dtype) for seed, shape in enumerate([(32, 6), (n_vocab, 6)])
    )
    d_logits, before = draw(32, n_vocab, seed=2, grad=False).to(dtype), draw(n_vocab, 6, seed=3, grad=False)
    nan = float("nan")  # what is written over is not read
    with Products() as products:
        logits, d_states = logits_of(states, weight), by_states(d_logits, weight, torch.full_like(states, nan))
        d_weight, in_float32 = by_weight(d_logits, states, dtype), by_weight(d_logits, states, torch.float32)
        add_by_weight(total := before.clone(), d_logits, states)
    _assert_near(logits, states, weight.T)
    few = n_vocab % 8 if n_vocab > 8 else 0
    _assert_near(
        d_states, d_logits, weight, rounded=d_logits[:, n_vocab - few :].double() @ weight[n_vocab - few :].double()
    )
    _assert_near(d_weight, d_logits.T, states)
    _assert_near(in_float32, d_logits.T, states)
    _assert_near(total, d_logits.T, states, before)
    assert logits.dtype == d_states.dtype == d_weight.dtype == dtype
    assert in_float32.dtype == torch.float32
    words = {size for shape in products.shapes for size in shape} - {32, 6}
    assert words == {n_vocab // 8 * 8, n_vocab % 8} - {0}


def _assert_near(
    actual: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    before: torch.Tensor | float = 0.0,
    rounded: torch.Tensor | float = 0.0,
) -> None:
    """actual = before + a b to the roundings of a float32 sum, one of its own, and one of `rounded`, a part of it."""
    exact = a.double() @ b.double() + before
    sizes = a.double().abs() @ b.double().abs() + abs(before)
    allowed = (a.shape[1] + 1) * torch.finfo(torch.float32).eps * sizes
    allowed += torch.finfo(actual.dtype).eps * (exact.abs() + abs(rounded))
    assert ((actual.double() - exact).abs() <= allowed).all()
