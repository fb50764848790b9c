"""The portable kernels in Triton's interpreter, which must be chosen before they are imported: `test_interpreter` runs
this file in a process of its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.attention.budget import (
    Case,
    assert_one_nan_and_infinity_go_where_they_do_in_plain_attention,
    assert_within_budget,
)
from trainstep.attention.triton.backward import launch_dkdv, launch_dq
from trainstep.attention.triton.forward import launch_forward
from trainstep.attention.tuned import Tile
from trainstep.casting import matmul_precision
from trainstep.precision import PrecisionName

SQUARE, WIDE, TALL = Tile(32, 32, 4, 2), Tile(16, 64, 4, 2), Tile(64, 16, 4, 2)
CASES = [
    *(Case(n, n, 16, heads=1, kv_heads=1) for n in (1, 17, 63, 111, 128, 257)),
    Case(70, 40, 32),
    Case(40, 70, 32),
    Case(40, 40, 8),
    Case(40, 40, 20),
    Case(20, 30, 128, heads=1, kv_heads=1),
    Case(20, 30, 200, heads=1, kv_heads=1),
    Case(50, 50, 16, heads=4, kv_heads=2, batch=2),
]


def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool, scale: float, tile: Tile) -> dict[str, Tensor]:
    """All three kernels, writing into memory that was NaN."""
    o, dq, dk, dv = (torch.full_like(t, float("nan")) for t in (q, q, k, v))
    lse = torch.full(q.shape[:-1], float("nan"))
    launch_forward((q, k, v, o, lse), is_causal, scale, tile)
    delta = torch.full_like(lse, float("nan"))
    launch_dq((q, k, v, o, do, lse, delta, dq), is_causal, scale, tile)
    launch_dkdv((q, k, v, do, lse, delta, dk, dv), is_causal, scale, tile)
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
