"""The check of attention: its oracle is autograd's, right implementations pass, wrong ones are caught."""

import math

import pytest
import torch

from trainstep.attention.eager import attention_eager
from trainstep.bench.check.attention import NAMES, check, oracle

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("seq", [5, 1024, 1500])
def test_the_sliced_oracle_is_autograds(seq, is_causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(seq, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    o = attention_eager(*leaves, is_causal, 1 / math.sqrt(8))
    expected = (o.detach(), *torch.autograd.grad(o, leaves, do))
    for own, reference in zip(oracle(q, k, v, do, is_causal=is_causal), expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-10, atol=1e-12)


def eager(q, k, v):
    return attention_eager(q, k, v, True, 1 / math.sqrt(q.shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_right_implementation_is_within_budget(dtype):
    errors = check(eager, (2, 3, 100, 16), dtype, CPU, is_causal=True)
    assert errors.within_budget
    assert set(errors.found) == set(NAMES)


def wrong_scale(q, k, v):
    return attention_eager(q, k, v, True, 1.01 / math.sqrt(q.shape[-1]))


def not_causal(q, k, v):
    return attention_eager(q, k, v, False, 1 / math.sqrt(q.shape[-1]))


def wrong_last_head(q, k, v):
    o = eager(q, k, v)
    return torch.cat((o[:, :-1], o[:, -1:] * 1.01), dim=1)


def no_gradient_for_k(q, k, v):
    return eager(q, k * 1.02 - k.detach() * 0.02, v)


def not_a_number(q, k, v):
    return eager(q, k, v) * math.nan


@pytest.mark.parametrize("broken", [wrong_scale, not_causal, wrong_last_head, no_gradient_for_k, not_a_number])
def test_a_wrong_implementation_is_caught(broken):
    assert not check(broken, (2, 3, 100, 16), torch.float32, CPU, is_causal=True).within_budget
