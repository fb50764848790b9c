"""FlashAttention-2 in plain PyTorch: within the budget, right to the last digit in float64, linear in what it saves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.budget import Case, assert_within_budget, relative_error, value_and_gradients
from trainstep.attention import FlashAttentionReference
from trainstep.attention.eager import attention_eager
from trainstep.attention.reference import flash_forward
from trainstep.attention.scoring import Scoring
from trainstep.base.errors import UnsupportedError, UsageError

CASES = [
    *(Case(n, n, 16) for n in (1, 17, 63, 111, 128, 257)),
    Case(100, 40, 24),
    Case(40, 100, 24),
    Case(70, 70, 16, heads=6, kv_heads=2, batch=2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case: Case, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v, do = case.inputs(dtype)
    actual = value_and_gradients(lambda *t: FlashAttentionReference.apply(*t, is_causal), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, is_causal, case.head_dim**-0.5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_float64_is_exact_to_its_own_rounding(is_causal: bool) -> None:
    q, k, v, do = Case(150, 130, 16).inputs(torch.float64)
    actual = value_and_gradients(lambda *t: FlashAttentionReference.apply(*t, is_causal), q, k, v, do)
    expected = value_and_gradients(lambda *t: attention_eager(*t, Scoring(is_causal, 0.25)), q, k, v, do)
    for name, x in actual.items():
        assert relative_error(x, expected[name]) < 1e-14, name


@pytest.mark.parametrize("window", [17, 64, 65, 200])
def test_windows_are_exact_to_the_rounding_of_float64(window: int) -> None:
    q, k, v, do = Case(257, 250, 16, heads=4, kv_heads=2).inputs(torch.float64)
    actual = value_and_gradients(lambda *t: FlashAttentionReference.apply(*t, True, 0.25, window), q, k, v, do)
    expected = value_and_gradients(lambda *t: attention_eager(*t, Scoring(True, 0.25, window)), q, k, v, do)
    for name, x in actual.items():
        assert relative_error(x, expected[name]) < 1e-14, name


@pytest.mark.parametrize("window", [None, 70])
def test_softcaps_are_exact_to_the_rounding_of_float64(window: int | None) -> None:
    q, k, v, do = Case(130, 130, 16, heads=4, kv_heads=2).inputs(torch.float64)
    band = (True, 0.25, window, None, 1.5)
    actual = value_and_gradients(lambda *t: FlashAttentionReference.apply(*t, *band), q, k, v, do)
    expected = value_and_gradients(lambda *t: attention_eager(*t, Scoring(*band)), q, k, v, do)
    for name, x in actual.items():
        assert relative_error(x, expected[name]) < 1e-14, name


@pytest.mark.parametrize("window", [1, 2])
def test_narrow_windows(window: int) -> None:
    q, k, v, do = Case(130, 130, 16).inputs(torch.float32)
    actual = value_and_gradients(lambda *t: FlashAttentionReference.apply(*t, True, 0.25, window), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, True, 0.25, window)


def test_a_query_without_a_key_is_refused() -> None:
    q, k, v, _ = Case(150, 130, 16).inputs(torch.float32)
    with pytest.raises(UsageError, match=r"query 149 sees none of 130 keys .*at least 21"):
        FlashAttentionReference.apply(q, k, v, True, 0.25, 20)
    assert FlashAttentionReference.apply(q, k, v, True, 0.25, 21).isfinite().all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    n_queries=st.integers(1, 150),
    n_keys=st.integers(1, 150),
    head_dim=st.integers(1, 40),
    group=st.integers(1, 3),
    is_causal=st.booleans(),
    scale=st.floats(-1.0, 1.0),
)
def test_any_shape(n_queries: int, n_keys: int, head_dim: int, group: int, is_causal: bool, scale: float) -> None:
    case = Case(n_queries, n_keys, head_dim, heads=2 * group)
    q, k, v, do = case.inputs(torch.float32)
    actual = value_and_gradients(lambda *t: FlashAttentionReference.apply(*t, is_causal, scale), q, k, v, do)
    assert_within_budget({"o": actual["o"]}, q, k, v, do, is_causal, scale)


def test_scores_of_ten_thousand_stay_finite() -> None:
    case = Case(130, 130, 16, magnitude=1e4)
    q, k, v, do = case.inputs(torch.float32)
    o, lse = flash_forward(q, k, v, Scoring(True, 0.25))
    assert lse.abs().max() > 1e4
    actual = value_and_gradients(lambda *t: FlashAttentionReference.apply(*t, True), q, k, v, do)
    assert all(x.isfinite().all() for x in (o, lse, *actual.values()))


def test_gradients_of_gradients_are_an_error() -> None:
    """They would lack what comes through the log-sum-exp, without a word."""
    q = torch.randn(2, 5, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no gradients of its gradients"):
        torch.autograd.grad(FlashAttentionReference.apply(q, q, q).sum(), q, create_graph=True)


@pytest.mark.parametrize("shape", [(2, 2, 20, 8), (3, 20, 8), (20, 8)], ids=str)
def test_it_saves_five_tensors_linear_in_length(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    o = FlashAttentionReference.apply(q, k, v, True)
    saved = o.grad_fn.saved_tensors
    assert [tuple(t.shape) for t in saved] == [shape, shape, shape, shape, shape[:-1]]
