"""FlexAttention, with its defaults and tuned: the same numbers, and what it is asked for."""

from typing import Any

import pytest
import torch

from tests.attention.budget import Case, assert_within_budget, value_and_gradients
from trainstep.attention import attention, flex
from trainstep.base.errors import UnsupportedError, UsageError

BOTH = ["flex", "flex-max-autotune"]
UNIT = torch.backends.cpu.get_cpu_capability()
needs_avx512 = pytest.mark.skipif(
    UNIT != "AVX512", reason=f"FlexAttention is right on CPUs with AVX512, here is {UNIT}"
)


@needs_avx512
@pytest.mark.parametrize("impl", BOTH)
def test_without_gradients(impl: str) -> None:
    q, k, v, do = Case(40, 40, 16).inputs(torch.float32)
    o = attention(q, k, v, is_causal=True, impl=impl)
    assert_within_budget({"o": o}, q, k, v, do, True, 0.25)


@needs_avx512
@pytest.mark.thorough
def test_softcaps_without_gradients() -> None:
    q, k, v, do = Case(40, 40, 16).inputs(torch.float32)
    for softcap in (0.5, 2.0):
        o = attention(q, k, v, is_causal=True, softcap=softcap, impl="flex")
        assert_within_budget({"o": o}, q, k, v, do, True, 0.25, None, None, softcap)


@needs_avx512
@pytest.mark.parametrize("impl", BOTH)
def test_windows_without_gradients(impl: str) -> None:
    q, k, v, do = Case(40, 40, 16).inputs(torch.float32)
    for window in (1, 7):
        o = attention(q, k, v, is_causal=True, window=window, impl=impl)
        assert_within_budget({"o": o}, q, k, v, do, True, 0.25, window)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", BOTH)
def test_windows_on_a_gpu(impl: str) -> None:
    q, k, v, do = (each.cuda() for each in Case(512, 512, 64).inputs(torch.bfloat16))
    actual = value_and_gradients(lambda *t: attention(*t, is_causal=True, window=130, impl=impl), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, True, 0.125, 130)


@pytest.mark.parametrize("impl", BOTH)
def test_it_has_no_backward_on_the_cpu(impl: str) -> None:
    q, k, v, _ = Case(40, 40, 16).inputs(torch.float32)
    with pytest.raises(UsageError, match=f"{impl}.*no backward on the CPU"):
        attention(q.requires_grad_(), k, v, impl=impl)


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("unit", ["AVX2", "DEFAULT", "SVE256"])
def test_a_cpu_without_avx512_is_refused(monkeypatch: pytest.MonkeyPatch, unit: str, impl: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: unit)
    q, k, v, _ = Case(40, 40, 16).inputs(torch.float32)
    with pytest.raises(UnsupportedError, match=f"{impl}.*wrong rows on CPUs without AVX-512.*{unit}; use impl='eager'"):
        attention(q, k, v, impl=impl)


def test_tuned_is_compiled_with_the_settings_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call_compiled(function: Any, q: torch.Tensor, *_: Any, **settings: Any) -> torch.Tensor:
        calls.append(settings)
        return q

    monkeypatch.setattr(flex, "call_compiled", call_compiled)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    q = torch.zeros(1, 2, 256, 16)
    for impl in BOTH:
        attention(q, q, q, is_causal=True, impl=impl)
    plain, tuned = calls
    assert "mode" not in plain
    assert "kernel_options" not in plain
    assert tuned["mode"] == "max-autotune-no-cudagraphs"
    assert tuned["kernel_options"] == {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
    assert plain["block_mask"] is tuned["block_mask"], "made once"
    calls.clear()
    attention(q, q, q, is_causal=True, window=30, impl="flex-max-autotune")
    attention(q, q, q, is_causal=True, cu_seqlens=torch.tensor([0, 100, 256]), impl="flex-max-autotune")
    assert [("mode" in each, "kernel_options" in each) for each in calls] == [(True, False)] * 2, "not true of these"


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_tuned_on_a_gpu(is_causal: bool) -> None:
    q, k, v, do = (each.cuda() for each in Case(512, 512, 64).inputs(torch.bfloat16))
    actual = value_and_gradients(lambda *t: attention(*t, is_causal=is_causal, impl="flex-max-autotune"), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, is_causal, 0.125)
