"""The oracle against its formula written out in Python floats, and against PyTorch's own float64 attention."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.attention.budget import Case, log_sum_exp
from trainstep.attention.eager import attention_eager
from trainstep.attention.scoring import Scoring


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_the_formula(is_causal: bool) -> None:
    q, k, v, _ = Case(n_queries=3, n_keys=4, head_dim=2, heads=1, kv_heads=1).inputs(torch.float64)
    scoring = Scoring(is_causal, 0.7)
    o, lse = attention_eager(q, k, v, scoring), log_sum_exp(q, k, scoring)
    for i in range(3):
        seen = range(min(4, i + 1)) if is_causal else range(4)
        weights = [math.exp(0.7 * sum(float(q[0, 0, i, d] * k[0, 0, j, d]) for d in range(2))) for j in seen]
        assert float(lse[0, 0, i]) == pytest.approx(math.log(sum(weights)), rel=1e-14)
        for d in range(2):
            expected = sum(w * float(v[0, 0, j, d]) for w, j in zip(weights, seen, strict=True)) / sum(weights)
            assert float(o[0, 0, i, d]) == pytest.approx(expected, rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_holds_so_many_keys_up_to_the_own(window: int) -> None:
    q, k, v, _ = Case(5, 6, 4).inputs(torch.float64)
    visible = torch.tensor([[i - window < j <= i for j in range(6)] for i in range(5)])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.3)
    torch.testing.assert_close(attention_eager(q, k, v, Scoring(True, 0.3, window)), expected, rtol=1e-12, atol=1e-14)


def test_a_softcap_comes_before_the_mask() -> None:
    q, k, v, _ = Case(5, 5, 4).inputs(torch.float64)
    capped = 0.5 * torch.tanh(q @ k.mT * 0.3 / 0.5) + torch.full((5, 5), float("-inf")).triu(1)
    torch.testing.assert_close(attention_eager(q, k, v, Scoring(True, 0.3, softcap=0.5)), capped.softmax(-1) @ v)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", [Case(5, 5, 8), Case(7, 3, 8), Case(3, 7, 8), Case(6, 6, 8, heads=4, kv_heads=2)])
def test_it_agrees_with_pytorch(case: Case, is_causal: bool) -> None:
    q, k, v, _ = case.inputs(torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attention_eager(q, k, v, Scoring(is_causal, 0.3)), expected, rtol=1e-12, atol=1e-14)
