"""The portable kernels, and those around Hopper's single backward kernel, in Triton's interpreter, which must be chosen
before they are imported: `test_interpreter` runs this file in a process of its own."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.budget import (
    Case,
    assert_one_nan_and_infinity_go_where_they_do_in_plain_attention,
    assert_within_budget,
    value_and_gradients,
)
from trainstep.attention import FlashAttentionTriton, attention, flash
from trainstep.attention.documents import bounds
from trainstep.attention.hopper.dq_sum import empty_statistic, launch_finish, launch_prepare
from trainstep.attention.triton.backward import launch_dkdv, launch_dq
from trainstep.attention.triton.forward import launch_forward
from trainstep.attention.tuned import Tile
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.base.precision import PrecisionName
from trainstep.bench.attention import AttentionTurns
from trainstep.bench.cases import AttentionCase
from trainstep.commands.cli import parse
from trainstep.measure.step import BatchedStep
from trainstep.report.page import render
from trainstep.rows.records import Row
from trainstep.step.casting import matmul_precision
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

SQUARE, WIDE, TALL = Tile(32, 32, 4, 2), Tile(16, 64, 4, 2), Tile(64, 16, 4, 2)
CASES = [
    *(Case(n, n, 16, heads=1, kv_heads=1) for n in (1, 17, 63, 111, 128, 257)),
    Case(70, 40, 32),
    Case(40, 70, 32),
    Case(40, 40, 8),
    Case(40, 40, 20),
    Case(20, 30, 128, heads=1, kv_heads=1),
    Case(20, 30, 96, heads=1, kv_heads=1),
    Case(20, 30, 192, heads=1, kv_heads=1),
    Case(20, 30, 200, heads=1, kv_heads=1),
    Case(50, 50, 16, heads=4, kv_heads=2, batch=2),
]


def run(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool, scale: float, tile: Tile, window: int | None = None,
    cu_seqlens: Tensor | None = None, softcap: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """All three kernels, writing into memory that was NaN."""
    o, dq, dk, dv = (torch.full_like(t, float("nan")) for t in (q, q, k, v))
    lse = torch.full(q.shape[:-1], float("nan"))
    settings = (is_causal, scale, tile, window, softcap)
    documents = () if cu_seqlens is None else (bounds(cu_seqlens, q.shape[-2]),)
    launch_forward((q, k, v, o, lse, *documents), *settings)
    delta = torch.full_like(lse, float("nan"))
    launch_dq((q, k, v, o, do, lse, delta, dq, *documents), *settings)
    launch_dkdv((q, k, v, do, lse, delta, dk, dv, *documents), *settings)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case: Case, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v, do = case.inputs(dtype)
    scale = case.head_dim**-0.5
    assert_within_budget(run(q, k, v, do, is_causal, scale, SQUARE), q, k, v, do, is_causal, scale)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tile", [WIDE, TALL], ids=str)
def test_tiles_that_are_not_square(tile: Tile, is_causal: bool) -> None:
    q, k, v, do = Case(100, 90, 16).inputs(torch.float32)
    assert_within_budget(run(q, k, v, do, is_causal, 0.25, tile), q, k, v, do, is_causal, 0.25)


@pytest.mark.parametrize(
    ("window", "tile"),
    [
        (1, SQUARE),
        (31, SQUARE),
        (32, SQUARE),
        (33, SQUARE),
        (129, SQUARE),
        (2, WIDE),
        (70, WIDE),
        (2, TALL),
        (70, TALL),
    ],
    ids=str,
)
def test_windows(window: int, tile: Tile) -> None:
    q, k, v, do = Case(130, 130, 16, heads=1, kv_heads=1).inputs(torch.float32)
    assert_within_budget(run(q, k, v, do, True, 0.25, tile, window), q, k, v, do, True, 0.25, window)


@pytest.mark.parametrize("case", [Case(100, 70, 20), Case(60, 100, 16), Case(80, 80, 8, heads=4, kv_heads=2, batch=2)])
def test_windows_of_grouped_heads_and_of_two_lengths(case: Case) -> None:
    q, k, v, do = case.inputs(torch.float16)
    assert_within_budget(run(q, k, v, do, True, 0.25, SQUARE, 37), q, k, v, do, True, 0.25, 37)


@pytest.mark.parametrize("window", [33, *(pytest.param(each, marks=pytest.mark.thorough) for each in (1, 50))])
def test_tiles_outside_of_the_window_are_not_visited(window: int) -> None:
    """What is NaN there would be in a sum, if with a factor of 0."""
    nan = float("nan")
    q, k, v, do = Case(256, 256, 16, heads=1, kv_heads=1).inputs(torch.float32)
    before = (128 - window + 1) // 32 * 32  # the first tile of keys that the fifth tile of queries sees any of
    visible = [tensor.clone() for tensor in (k, v)]
    for tensor in visible:
        tensor[..., :before, :] = tensor[..., 160:, :] = nan
    o, lse, delta, dq = (torch.full_like(t, nan) for t in (q, q[..., 0], q[..., 0], q))
    launch_forward((q, *visible, o, lse), True, 0.25, SQUARE, window)
    launch_dq((q, *visible, o, do, lse, delta, dq), True, 0.25, SQUARE, window)
    expected = run(q, k, v, do, True, 0.25, SQUARE, window)
    assert torch.equal(o[..., 128:160, :], expected["o"][..., 128:160, :])
    assert torch.equal(dq[..., 128:160, :], expected["dq"][..., 128:160, :])

    after = -(-(159 + window) // 32) * 32  # past the last tile of queries that sees any of the fifth tile's keys
    q, do = q.clone(), do.clone()
    for tensor in (q, do):
        tensor[..., :128, :] = tensor[..., after:, :] = nan
    dk, dv = torch.full_like(k, nan), torch.full_like(v, nan)
    delta = (expected["o"] * do).sum(-1)
    launch_dkdv((q, k, v, do, expected["lse"], delta, dk, dv), True, 0.25, SQUARE, window)
    torch.testing.assert_close(dk[..., 128:160, :], expected["dk"][..., 128:160, :])
    torch.testing.assert_close(dv[..., 128:160, :], expected["dv"][..., 128:160, :])


PACKED = {
    "like tiles": [0, 32, 64, 130],
    "across tiles": [0, 37, 70, 130],
    "within one tile": [0, 3, 4, 20, 130],
    "empty ones": [0, 0, 50, 50, 50, 130, 130],
    "each a token": list(range(131)),
}


@pytest.mark.parametrize(
    ("packed", "tile"), [*((each, SQUARE) for each in PACKED), ("across tiles", WIDE), ("across tiles", TALL)], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_documents(packed: str, is_causal: bool, tile: Tile) -> None:
    q, k, v, do = Case(130, 130, 16, heads=1, kv_heads=1).inputs(torch.float32)
    band = (None, torch.tensor(PACKED[packed]))
    assert_within_budget(run(q, k, v, do, is_causal, 0.25, tile, *band), q, k, v, do, is_causal, 0.25, *band)


def test_documents_in_windows_of_grouped_heads() -> None:
    q, k, v, do = Case(70, 70, 20, heads=4, kv_heads=2, batch=2).inputs(torch.float16)
    band = (23, torch.tensor([0, 37, 70], dtype=torch.int32))
    assert_within_budget(run(q, k, v, do, True, 0.25, SQUARE, *band), q, k, v, do, True, 0.25, *band)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=2, max_size=4).filter(any),
    is_causal=st.booleans(),
    window=st.sampled_from([None, 1, 20]),
)
def test_any_documents(lengths: list[int], is_causal: bool, window: int | None) -> None:
    total = sum(lengths)
    q, k, v, do = Case(total, total, 8, heads=1, kv_heads=1).inputs(torch.float32)
    band = (window if is_causal else None, torch.tensor([0, *lengths]).cumsum(0))
    actual = run(q, k, v, do, is_causal, 0.3, SQUARE, *band)
    assert_within_budget({"o": actual["o"]}, q, k, v, do, is_causal, 0.3, *band)
    whole, expected = torch.stack([actual["dk"], actual["dv"], actual["dq"]]), []
    for first, length in zip(band[1].tolist(), lengths, strict=False):
        if length:
            one = slice(first, first + length)
            alone = run(*(t[..., one, :] for t in (q, k, v, do)), is_causal, 0.3, SQUARE, band[0])
            expected.append(torch.stack([alone["dk"], alone["dv"], alone["dq"]]))
    torch.testing.assert_close(whole, torch.cat(expected, -2))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_tiles_of_other_documents_are_not_visited(is_causal: bool) -> None:
    """What is NaN there would be in a sum, if with a factor of 0."""
    nan, band = float("nan"), (None, torch.tensor([0, 64, 160, 256]))
    inputs = Case(256, 256, 16, heads=1, kv_heads=1).inputs(torch.float32)
    expected = run(*inputs, is_causal, 0.25, SQUARE, *band)
    for tensor in inputs:
        tensor[..., :64, :] = tensor[..., 160:, :] = nan
    actual = run(*inputs, is_causal, 0.25, SQUARE, *band)
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(actual[name][..., 64:160, :], expected[name][..., 64:160, :]), name


@pytest.mark.parametrize("magnitude", [0.02, 1.0, 100.0])  # of q: in the series, beyond it, where tanh is 1
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_softcap(dtype: torch.dtype, magnitude: float) -> None:
    q, k, v, do = Case(70, 70, 20, heads=2, kv_heads=1, magnitude=magnitude).inputs(dtype)
    band = (33, torch.tensor([0, 10, 70]), 2.0)
    assert_within_budget(run(q, k, v, do, True, 0.25, SQUARE, *band), q, k, v, do, True, 0.25, *band)


def test_softcap_without_a_mask() -> None:
    q, k, v, do = Case(70, 40, 16).inputs(torch.float32)
    band = (None, None, 1.5)
    assert_within_budget(run(q, k, v, do, False, 0.25, TALL, *band), q, k, v, do, False, 0.25, *band)


@pytest.mark.parametrize(
    ("is_causal", "scale", "window", "offsets", "softcap"),
    [
        (False, 0.25, None, None, None),
        pytest.param(True, 0.25, 9, None, None, marks=pytest.mark.thorough),
        pytest.param(False, 0.25, None, [0, 20, 40], None, marks=pytest.mark.thorough),
        (True, -0.3, 9, [0, 3, 3, 40], 1.5),
        (True, 0.0, None, None, None),
        (True, -1e-50, 9, [0, 20, 40], 1.5),
    ],
)
def test_operators_with_gradients(
    is_causal: bool, scale: float, window: int | None, offsets: list[int] | None, softcap: float | None
) -> None:
    q, k, v, do = Case(40, 40, 16, heads=4, kv_heads=2).inputs(torch.float32)
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    band = (window, cu_seqlens, softcap)
    named = {"is_causal": is_causal, "scale": scale, "window": window, "cu_seqlens": cu_seqlens, "softcap": softcap}
    for call in (
        lambda *t: attention(*t, **named, impl="flash-triton"),
        lambda *t: FlashAttentionTriton.apply(*t, is_causal, scale, *band),
    ):
        actual = value_and_gradients(call, q, k, v, do)
        assert_within_budget(actual, q, k, v, do, is_causal, scale, *band)
    limits = None if cu_seqlens is None else bounds(cu_seqlens, 40)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(flash.forward_op, (*leaves, is_causal, scale, window, limits, softcap), test_utils=tests)


def test_gradients_of_gradients_are_an_error() -> None:
    q = torch.randn(1, 1, 16, 16, requires_grad=True)
    for call in (lambda: attention(q, q, q, impl="flash-triton"), lambda: FlashAttentionTriton.apply(q, q, q)):
        with pytest.raises(UnsupportedError, match="our FlashAttention has no gradients of its gradients"):
            torch.autograd.grad(call().sum(), q, create_graph=True)


def test_strides() -> None:
    q, k, v, do = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in Case(40, 40, 16).inputs(torch.float32))
    assert not q.is_contiguous()
    assert_within_budget(run(q, k, v, do, True, 0.25, SQUARE), q, k, v, do, True, 0.25)


def test_scores_of_ten_thousand_stay_finite() -> None:
    q, k, v, do = Case(70, 70, 16, magnitude=1e4).inputs(torch.float32)
    actual = run(q, k, v, do, True, 0.25, SQUARE)
    assert actual["lse"].abs().max() > 1e4
    assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-5), ("tf32", 2e-3)])
def test_nan_and_infinity(precision: PrecisionName, allowed: float) -> None:
    with matmul_precision(precision):
        assert_one_nan_and_infinity_go_where_they_do_in_plain_attention(
            lambda q, k, v: run(q, k, v, q, False, 0.2, SQUARE)["o"], allowed
        )


@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_what_comes_before_hoppers_single_backward_kernel(head_dim: int) -> None:
    o, do = torch.randn(2, 2, 3, 200, head_dim).half()
    lse, scale, rows = torch.randn(2, 3, 200), 0.3, 256
    block_d = 64 if head_dim <= 64 else 128
    acc = torch.full((6 * rows * block_d,), float("nan"))
    lse_out, delta = (empty_statistic(6 * rows, block_d, acc.device).fill_(float("nan")) for _ in range(2))
    launch_prepare((o, do, lse, lse_out, delta, acc), scale)
    lse_out, delta = (t.double().view(2, 3, rows, -1).sum(-1) for t in (lse_out, delta))
    torch.testing.assert_close(lse_out[..., :200], -lse.double() / scale, rtol=2**-22, atol=0)
    torch.testing.assert_close(delta[..., :200], -(o.double() * do.double()).sum(-1), rtol=2**-22, atol=1e-5)
    assert (lse_out[..., 200:] == -float("inf")).all()
    assert not delta[..., 200:].any()
    assert not acc.any()


def test_summands_add_up_to_any_number() -> None:
    lse = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30, -1e-30, 0.0, 12345.678]).view(1, 1, 7)
    rows = torch.randn(1, 1, 7, 64)
    lse_out, delta = (empty_statistic(128, 64, lse.device) for _ in range(2))
    launch_prepare((rows, rows, lse, lse_out, delta, torch.empty(128 * 64)), 1.0)
    added = lse_out[:7].double().sum(-1)
    torch.testing.assert_close(added, -lse.double().flatten(), rtol=2**-22, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_what_comes_after_hoppers_single_backward_kernel(head_dim: int) -> None:
    block_d = 64 if head_dim <= 64 else 128
    sums = torch.randn(2, 3, 256, block_d)
    blocks = sums.reshape(6, 4, 64, block_d // 64, 64).transpose(2, 3)  # of 64 queries and 64 columns
    # A warp has 16 rows, a thread two neighbours of row r and of row r + 8 in each chunk of eight columns.
    parts = blocks.reshape(-1, 4, 2, 8, 8, 4, 2)  # block; warp, half, row; chunk, column pair, column
    acc = parts.permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, 256)  # block, chunk, warp, lane (row, pair), register
    dq = torch.full((2, 3, 200, head_dim), float("nan"), dtype=torch.float16)
    launch_finish((dq, acc), 0.3)
    assert torch.equal(dq, (sums[:, :, :200, :head_dim] * 0.3).half())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    n_queries=st.integers(1, 80),
    n_keys=st.integers(1, 80),
    head_dim=st.integers(8, 40),
    group=st.integers(1, 2),
    is_causal=st.booleans(),
)
def test_any_shape(n_queries: int, n_keys: int, head_dim: int, group: int, is_causal: bool) -> None:
    q, k, v, do = Case(n_queries, n_keys, head_dim, heads=group, kv_heads=1).inputs(torch.float32)
    actual = run(q, k, v, do, is_causal, 0.3, SQUARE)
    assert_within_budget({"o": actual["o"]}, q, k, v, do, is_causal, 0.3)
    assert all(x.isfinite().all() for x in actual.values())


OURS = AttentionCase("flash-triton", heads=2, seq=40, head_dim=16, dtype="fp32")


def measured(*cases: AttentionCase) -> list[Row]:
    return list(AttentionTurns("cpu").run(cases, warmup=1, passes=2))


@pytest.mark.parametrize("changes", [{}, {"dtype": "fp16"}, {"causal": "no", "heads": 0}, {"window": 9, "batch": 2}])
def test_the_command_checks_our_kernels_and_gives_no_time(changes: dict[str, Any]) -> None:
    case = dataclasses.replace(OURS, **changes)
    ours, eager = measured(case, dataclasses.replace(case, impl="eager"))
    assert (ours.status, ours.not_timed) == ("ok", "checked in Triton's interpreter, no time"), ours.reason
    assert 0 < ours.error_share <= 1
    assert not ours.samples
    assert not ours.times
    assert eager.not_timed is None
    assert set(eager.samples) == {"forward", "backward", "both"}
    assert "interpreter, no time" in render([ours])


def test_no_pass_is_begun_that_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainstep.bench.attention.check", None)
    large = ({"seq": 4096}, {"seq": 65536, "heads": 16}, {"batch": 64, "heads": 64})
    rows = measured(*(dataclasses.replace(OURS, **changes) for changes in (*large, {"dtype": "bf16"})))
    told = ["6 minutes", "191 hours", "3 minutes", "rounds to bfloat16 as no GPU does; choose --dtype fp32,fp16"]
    for row, reason in zip(rows, told, strict=True):
        assert row.status == "unsupported"
        assert reason in row.reason


def test_without_sizes_the_command_takes_tiny_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[AttentionCase]] = []
    monkeypatch.setattr(AttentionTurns, "run", lambda turns, cases, **_: seen.append(cases) or [])
    for words in ([], ["--seq", "4096"], ["--impl", "sdpa"], ["--grid", "flash"]):
        parse(["bench", "attention", *words, "--device", "cpu", "--out", str(tmp_path)]).run()
    usual, given, other, named = seen
    assert {(case.heads, case.seq, case.dtype) for case in usual} == {
        (2, n, d) for n in (100, 128) for d in ("fp32", "fp16")
    }
    assert {(case.heads, case.seq) for case in given} == {(2, 4096)}, "what is given stays"
    assert [(case.heads, case.seq, case.dtype) for case in other] == [(16, 4096, "bf16")], "ours is not among them"
    assert max(case.seq for case in named) == 65536


@pytest.mark.parametrize("changes", [{"attention": "flash-triton"}, {"loss": "fused"}, {"fused": "rope"}])
def test_no_step_of_our_kernels_is_timed(changes: dict[str, Any]) -> None:
    source = builtin_source("toy", ModelConfig(vocab_size=256, d_model=32, d_ff=32, num_layers=1, num_heads=1))
    step = build_step(source, StepConfig(batch=1, context=8, device="cpu", **changes))
    assert step.gradients(step.next_batch()).isfinite(), "it runs"
    with pytest.raises(UnsupportedError, match="its times say nothing of a step's"):
        BatchedStep(step)
