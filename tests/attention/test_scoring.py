"""The scale: of any sign, in every implementation; a number alone; and never so large or small that kernels lose it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.attention.budget import Case, assert_within_budget, references, relative_error, value_and_gradients
from trainstep.attention import (
    IMPLEMENTATIONS,
    FlashAttentionReference,
    FlashAttentionTriton,
    api,
    attention,
    flash,
    flash_attention,
)
from trainstep.attention.eager import attention_scores
from trainstep.attention.scoring import Scoring
from trainstep.base.errors import UsageError

ODD_SCALES = [-0.3, 0.0, -1e-50, 1e-300]
Q = torch.zeros(2, 4, 6, 16)


@pytest.mark.parametrize("scale", ODD_SCALES)
@pytest.mark.parametrize("impl", ["auto", "eager", "flash-reference", "sdpa", "sdpa-flash", "sdpa-math"])
def test_scales_that_are_not_above_zero(impl: str, scale: float) -> None:
    for case in (Case(40, 40, 16, heads=4, kv_heads=2), Case(30, 50, 8)):
        q, k, v, do = case.inputs(torch.float32)
        actual = value_and_gradients(lambda *t: attention(*t, is_causal=True, scale=scale, impl=impl), q, k, v, do)
        assert_within_budget(actual, q, k, v, do, True, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_that_are_not_above_zero_in_other_dtypes(dtype: torch.dtype) -> None:
    q, k, v, do = Case(40, 40, 16).inputs(dtype)
    for scale in ODD_SCALES:
        actual = value_and_gradients(lambda *t, s=scale: attention(*t, is_causal=True, scale=s), q, k, v, do)
        assert_within_budget(actual, q, k, v, do, True, scale)


@pytest.mark.parametrize("scale", ODD_SCALES)
@pytest.mark.parametrize("band", [(None, None, None), (7, None, None), (5, torch.tensor([0, 13, 30]), 1.5)], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_implementation_is_left_to_scale_behind_the_mask(
    impl: str, band: tuple[Any, ...], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as a kernel that hides scores first and multiplies them then, which only a scale above 0 survives."""

    def behind(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        scores = (q @ k.mT).masked_fill(hidden(scoring, 30), -torch.inf) * np.float32(scoring.scale)
        capped = scores if scoring.softcap is None else scoring.softcap * (scores / scoring.softcap).tanh()
        return capped.masked_fill(scores.isneginf(), -torch.inf).softmax(-1) @ v

    monkeypatch.setattr(api, "_BY_NAME", dict.fromkeys(api._BY_NAME, behind))
    monkeypatch.setattr(api, "_ONLY_PLAIN", frozenset())
    q, k, v, do = Case(30, 30, 8).inputs(torch.float32)
    named = dict(zip(("window", "cu_seqlens", "softcap"), band, strict=True))
    actual = value_and_gradients(lambda *t: attention(*t, is_causal=True, scale=scale, impl=impl, **named), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, True, scale, *band)


def hidden(scoring: Scoring, length: int) -> Tensor:
    return attention_scores(*torch.zeros(2, length, 1), replace(scoring, scale=1.0)).isneginf()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="FlexAttention is wrong on this CPU")
def test_flex() -> None:
    q, k, v, do = Case(40, 40, 16).inputs(torch.float32)
    exact, allowed = references(q, k, v, do, True, -0.3)
    o = attention(q, k, v, is_causal=True, scale=-0.3, impl="flex")
    assert relative_error(o, exact["o"]) <= allowed["o"]


ENTRIES: dict[str, Callable[..., Tensor]] = {
    **{impl: lambda *t, scale, impl=impl: attention(*t, scale=scale, impl=impl) for impl in IMPLEMENTATIONS},
    "flash_attention": flash_attention,
    "FlashAttentionReference": lambda *t, scale: FlashAttentionReference.apply(*t, True, scale),
    "FlashAttentionTriton": lambda *t, scale: FlashAttentionTriton.apply(*t, True, scale),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_learned_scale_is_refused(name: str) -> None:
    learned = torch.nn.Parameter(torch.tensor(0.3))

    def with_scale(scale: Tensor) -> Tensor:
        with pytest.raises(UsageError, match=r"requires a gradient.*attention\(q \* scale, k, v, scale=1\)"):
            ENTRIES[name](Q, Q, Q, scale=scale)
        return scale.sum()

    for scale in (learned, learned.exp(), learned[None], torch.nn.Linear(1, 1).weight):
        with_scale(scale)
    with torch.no_grad():
        with_scale(learned)
    if "Flash" not in name:  # torch refuses these itself there
        torch.func.grad(with_scale)(torch.tensor(0.3))


def test_how_a_learned_scale_is_written() -> None:
    q, k, v, _ = Case(9, 9, 8).inputs(torch.float64)
    learned = torch.tensor(-0.3, dtype=torch.float64, requires_grad=True)
    for impl in ("auto", "flash-reference"):
        assert torch.autograd.gradcheck(
            lambda s, impl=impl: attention(q * s, k, v, is_causal=True, scale=1, impl=impl), learned
        )


def test_numbers_of_any_type_are_scales() -> None:
    q, k, v, _ = Case(20, 20, 8).inputs(torch.float32)
    for impl in ("auto", "flash-reference"):
        for scale in (np.float32(-0.3), np.float64(0.25), np.array(0.25), torch.tensor(-0.3), 3, 0):
            expected = attention(q, k, v, is_causal=True, scale=float(scale), impl=impl)
            assert torch.equal(attention(q, k, v, is_causal=True, scale=scale, impl=impl), expected)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 1e39, -1e300, torch.tensor(torch.nan)])
@pytest.mark.parametrize("name", ENTRIES)
def test_scales_that_no_kernel_can_hold(name: str, scale: Any) -> None:
    with pytest.raises(UsageError, match=r"scale is .*expected a finite number"):
        ENTRIES[name](Q, Q, Q, scale=scale)


def test_the_registered_operator_refuses_what_is_not_finite() -> None:
    with torch.library._scoped_library("trainstep", "IMPL") as library:
        library.impl("flash_attention_forward", flash._forward, "CPU")
        for scale in (float("nan"), -float("inf")):
            with pytest.raises(UsageError, match=r"scale is .*expected a finite number"):
                flash.forward_op(Q, Q, Q, True, scale)


def test_what_is_plain_is_handed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setitem(api._BY_NAME, "sdpa", lambda q, k, v, scoring: seen.append((q, scoring.scale)) or q)
    attention(Q, Q, Q, impl="sdpa")
    attention(Q, Q, Q, scale=1e-20, impl="sdpa")
    assert all(q is Q for q, _ in seen), "nothing is copied or multiplied"
    assert [scale for _, scale in seen] == [0.25, 1e-20]
