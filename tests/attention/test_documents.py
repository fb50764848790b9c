"""Packed documents: what they are, through every implementation that takes them, and which offsets are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.budget import Case, assert_within_budget, relative_error, value_and_gradients
from tests.attention.test_flex import needs_avx512
from trainstep.attention import FlashAttentionReference, attention, flash_attn, varlen
from trainstep.attention.documents import bounds, spans, token_first
from trainstep.attention.eager import attention_eager
from trainstep.attention.scoring import Scoring
from trainstep.base.errors import UnsupportedError, UsageError

OFFSETS = torch.tensor([0, 7, 7, 30, 40])
ON_CPU = ["auto", "eager", "flash-reference"]


def alone(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scoring: Scoring) -> Tensor:
    """Each document by itself, end to end."""
    parts = [attention_eager(q[..., i, :], k[..., i, :], v[..., i, :], scoring) for i in spans(offsets)]
    return torch.cat(parts, -2)


@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 5)])
def test_the_oracle_is_each_document_alone(is_causal: bool, window: int | None) -> None:
    q, k, v, do = Case(40, 40, 8, heads=4, kv_heads=2, batch=2).inputs(torch.float64)
    packed = Scoring(is_causal, 0.3, window, OFFSETS)
    actual = value_and_gradients(lambda *t: attention_eager(*t, packed), q, k, v, do)
    expected = value_and_gradients(lambda *t: alone(*t, OFFSETS, Scoring(is_causal, 0.3, window)), q, k, v, do)
    for name, x in actual.items():
        assert relative_error(x, expected[name]) < 1e-14, name


@pytest.mark.parametrize(
    ("is_causal", "window", "dtype"), [(False, None, torch.int32), (True, None, torch.int64), (True, 5, torch.int32)]
)
@pytest.mark.parametrize("impl", ON_CPU)
def test_output_and_gradients(impl: str, is_causal: bool, window: int | None, dtype: torch.dtype) -> None:
    q, k, v, do = Case(40, 40, 16, heads=4, kv_heads=2).inputs(torch.float32)
    offsets = OFFSETS.to(dtype)
    actual = value_and_gradients(
        lambda *t: attention(*t, is_causal=is_causal, window=window, cu_seqlens=offsets, impl=impl), q, k, v, do
    )
    assert_within_budget(actual, q, k, v, do, is_causal, 0.25, window, offsets)


def test_the_reference_across_tiles_is_exact_to_the_rounding_of_float64() -> None:
    q, k, v, do = Case(257, 257, 16, heads=4, kv_heads=2).inputs(torch.float64)
    offsets = torch.tensor([0, 100, 101, 101, 257])
    for band in ((None, offsets), (30, offsets)):
        actual = value_and_gradients(lambda *t, b=band: FlashAttentionReference.apply(*t, True, 0.25, *b), q, k, v, do)
        expected = value_and_gradients(lambda *t, b=band: attention_eager(*t, Scoring(True, 0.25, *b)), q, k, v, do)
        for name, x in actual.items():
            assert relative_error(x, expected[name]) < 1e-14, name


@pytest.mark.parametrize("impl", [pytest.param("flex", marks=[pytest.mark.thorough, needs_avx512]), "eager-compiled"])
def test_compiled(impl: str) -> None:
    q, k, v, do = Case(40, 40, 16).inputs(torch.float32)
    for offsets in (OFFSETS, torch.tensor([0, 20, 20, 20, 40])):  # which are not compiled into it
        o = attention(q, k, v, is_causal=True, cu_seqlens=offsets, impl=impl)
        assert_within_budget({"o": o}, q, k, v, do, True, 0.25, None, offsets)


@pytest.mark.parametrize("shape", [(40, 16), (3, 40, 16), (2, 4, 40, 16), (2, 3, 4, 40, 16)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0))
    expected = alone(q, k, v, OFFSETS, Scoring(True, 0.25))
    for impl in ("eager", "flash-reference"):
        torch.testing.assert_close(attention(q, k, v, is_causal=True, cu_seqlens=OFFSETS, impl=impl), expected)


@pytest.mark.parametrize("impl", ["auto", "eager", "flash-reference", "sdpa"])
def test_a_single_document_is_none(impl: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 16)
    expected = attention(q, k, v, is_causal=True, impl=impl)
    one = torch.tensor([0, 6])
    assert torch.equal(attention(q, k, v, is_causal=True, cu_seqlens=one, impl=impl), expected)


BAD: dict[str, tuple[type[Exception], Any, str]] = {
    "a list": (TypeError, [0, 40], "cu_seqlens is list; expected a tensor of int32 or int64, as"),
    "of float": (TypeError, OFFSETS.float(), "cu_seqlens is torch.float32; expected"),
    "in two dimensions": (UsageError, OFFSETS[None], r"cu_seqlens has shape \(1, 5\); expected one offset more"),
    "of no document": (UsageError, OFFSETS[:1], r"cu_seqlens has shape \(1,\); expected one offset more"),
    "lengths instead": (UsageError, torch.tensor([7, 23, 10]), "begins at 7 and ends at 10; expected .* end at 40"),
    "too short": (UsageError, torch.tensor([0, 7, 39]), "begins at 0 and ends at 39; expected .* end at 40"),
    "falling": (UsageError, torch.tensor([0, 9, 8, 40]), "falls from 9 to 8 at index 2; expected offsets that begin"),
    "on another device": (UsageError, OFFSETS.to("meta"), "cu_seqlens is on meta and q on cpu; move it there"),
}


@pytest.mark.parametrize("impl", ["auto", "eager", "flash-reference", "flash-triton", "sdpa"])
@pytest.mark.parametrize("what", BAD)
def test_bad_offsets(what: str, impl: str) -> None:
    error, offsets, match = BAD[what]
    q = torch.zeros(2, 40, 16)
    with pytest.raises(error, match=match):
        attention(q, q, q, is_causal=True, cu_seqlens=offsets, impl=impl)


def test_two_lengths_are_refused() -> None:
    q = torch.zeros(2, 40, 16)
    with pytest.raises(UsageError, match="q has 40 tokens and k 30; documents attend to themselves"):
        attention(q, q[:, :30], q[:, :30], cu_seqlens=OFFSETS)


def test_bad_offsets_in_compiled_code_are_asserted() -> None:
    def around(q: Tensor, offsets: Tensor) -> Tensor:
        return attention(q, q, q, is_causal=True, cu_seqlens=offsets, impl="eager") * 1.0

    q = torch.randn(2, 40, 16)
    compiled = torch.compile(around, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, OFFSETS), around(q, OFFSETS))
    with pytest.raises(RuntimeError, match="expected offsets that begin at 0, never fall and end at 40"):
        compiled(q, torch.tensor([0, 9, 8, 20, 40]))


@pytest.mark.parametrize("impl", ["sdpa", "sdpa-cudnn", "sdpa-efficient", "sdpa-math"])
def test_what_has_none_refuses(impl: str) -> None:
    q = torch.zeros(1, 2, 40, 16)
    with pytest.raises(UsageError, match=f"impl='{impl}' takes no cu_seqlens"):
        attention(q, q, q, cu_seqlens=OFFSETS, impl=impl)


def test_pytorchs_flash_attention_has_them_on_a_gpu_alone() -> None:
    q = torch.zeros(1, 2, 40, 16)
    for band in ({"cu_seqlens": OFFSETS}, {"window": 3, "is_causal": True}):
        with pytest.raises(UsageError, match="'sdpa-flash' has windows and documents on NVIDIA GPUs in float16"):
            attention(q, q, q, impl="sdpa-flash", **band)  # type: ignore[arg-type]


def test_any_offsets_at_all_stay_within_the_row() -> None:
    assert bounds(torch.tensor([0, 3, 3, 5]), 5).tolist() == [[0, 0, 0, 3, 3], [3, 3, 3, 5, 5]]
    for bad in ([3, 2, 9], [-4, 2, 1], [0, 0, 0], [2, 9, 3]):
        found = bounds(torch.tensor(bad), 5)
        assert found.shape == (2, 5)
        assert found.dtype == torch.int32
        assert ((found >= 0) & (found <= 5)).all()


def by_document(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scoring: Scoring) -> Tensor:
    """What a varlen function does with (tokens, heads, head_dim), by the oracle."""
    assert offsets.dtype == torch.int32
    return alone(*(each.transpose(0, 1)[None] for each in (q, k, v)), offsets, scoring)[0].transpose(0, 1)


def test_batch_rows_are_documents_of_their_own() -> None:
    q = torch.arange(2 * 3 * 4).reshape(2, 1, 3, 4).float()
    tokens, _, _, offsets, longest = token_first(q, q, q, torch.tensor([0, 1, 3]))
    assert longest == 2
    assert offsets.tolist() == [0, 1, 3, 4, 6]
    assert torch.equal(tokens, q.reshape(6, 1, 4))
    *_, offsets, longest = token_first(q, q, q, None)
    assert (offsets.tolist(), offsets.dtype, longest) == ([0, 3, 6], torch.int32, 3)


@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 5)])
@pytest.mark.parametrize("shape", [(2, 4, 40, 16), (4, 40, 16), (40, 16)], ids=str)
def test_flash_attn_is_handed_tokens_first(shape: tuple[int, ...], is_causal: bool, window: int | None) -> None:
    q, k, v, do = torch.randn((4, *shape), generator=torch.Generator().manual_seed(0))

    def varlen_function(
        *tensors: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        softmax_scale: float, causal: bool, window_size: tuple[int, int] = (-1, 0),
    ) -> Tensor:  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k
        assert max_seqlen_q == max_seqlen_k == 23
        own = None if window_size[0] < 0 else window_size[0] + 1
        return by_document(*tensors, cu_seqlens_q, Scoring(causal, softmax_scale, own))

    package = flash_attn.Functions(None, varlen_function)  # type: ignore[arg-type]
    scoring = Scoring(is_causal, 0.25, window, OFFSETS)
    actual = value_and_gradients(lambda *t: flash_attn.in_its_layout(package, *t, scoring), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, is_causal, 0.25, window, OFFSETS)


@pytest.mark.parametrize(
    ("is_causal", "window", "size"), [(False, None, (-1, -1)), (True, None, (-1, 0)), (True, 5, (4, 0))]
)
def test_pytorchs_varlen_is_handed_what_it_takes(is_causal, window, size, monkeypatch) -> None:
    seen: dict[str, Any] = {}

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        seen.update(window_size=window_size, longest=(max_q, max_k), dtype=cu_seq_q.dtype)
        return by_document(query.float(), key.float(), value.float(), cu_seq_q, Scoring(is_causal, scale, window))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen, "unsupported_here", lambda q, k: False)
    q, k, v, _ = Case(40, 40, 16, batch=2).inputs(torch.float16)
    scoring = Scoring(is_causal, 0.25, window, OFFSETS)
    o = varlen.attention_varlen(q, k, v, scoring)
    expected = attention_eager(q.float(), k.float(), v.float(), scoring)
    torch.testing.assert_close(o, expected)
    assert seen == {"window_size": size, "longest": (23, 23), "dtype": torch.int32}
    with pytest.raises(UsageError, match=r"varlen_attn takes no enable_gqa, which impl='sdpa-flash' needs"):
        varlen.attention_varlen(q, k[:, :1], v[:, :1], scoring)


@pytest.mark.gpu
@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 100)])
@pytest.mark.parametrize("impl", ["flash-triton", "flex", "sdpa-flash", "flash-attn"])
@pytest.mark.parametrize("case", [Case(900, 900, 64, batch=2), Case(900, 900, 128, heads=4, kv_heads=2)], ids=str)
def test_on_a_gpu(case: Case, impl: str, is_causal: bool, window: int | None) -> None:
    q, k, v, do = case.inputs(torch.bfloat16, "cuda")
    offsets = torch.tensor([0, 1, 1, 300, 555, 900])
    for given in (offsets, offsets.cuda().int()):
        settings = {"is_causal": is_causal, "window": window, "cu_seqlens": given, "impl": impl}
        try:
            actual = value_and_gradients(lambda *t, s=settings: attention(*t, **s), q, k, v, do)
        except UnsupportedError as error:
            if impl in ("flash-triton", "flex"):
                raise
            pytest.skip(str(error))  # this torch has none of grouped heads, or no flash-attn is installed
        assert_within_budget(actual, q, k, v, do, is_causal, case.head_dim**-0.5, window, offsets.cuda())
