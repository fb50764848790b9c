"""Our Triton attention as PyTorch sees it, on a GPU: right, refused where it must be, traceable, deterministic.

Where results are held against each other bit for bit by default, there are at most 256 keys: so many are two tiles of
Hopper's single backward kernel, and a sum of two is the same in either order.
"""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.attention.budget import (
    Case,
    assert_one_nan_and_infinity_go_where_they_do_in_plain_attention,
    assert_within_budget,
    relative_error,
    value_and_gradients,
)
from trainstep.attention import FlashAttentionTriton, attention, flash_attention
from trainstep.attention import flash as flash_module
from trainstep.attention.flash import backward_op, forward_op, sums_dq_in_any_order
from trainstep.base.errors import UsageError
from trainstep.base.precision import PrecisionName
from trainstep.step.casting import matmul_precision

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = [
    *(Case(n, n, 64) for n in (1, 17, 63, 111, 128, 257)),
    *(Case(200, 200, head_dim) for head_dim in (8, 16, 20, 32, 40, 80, 96, 100, 128, 136, 192, 256)),
    Case(300, 111, 128),
    Case(111, 300, 128),
    Case(1000, 900, 64, heads=8, kv_heads=2, batch=2),
    Case(500, 600, 256, heads=4, kv_heads=1),
]


def flash(is_causal: bool, scale: float | None = None) -> partial[Tensor]:
    return partial(flash_attention, is_causal=is_causal, scale=scale)


def test_it_is_refused_without_a_gpu() -> None:
    q = torch.zeros(2, 3, 8)
    for call in (lambda: flash_attention(q, q, q), lambda: FlashAttentionTriton.apply(q, q, q, False)):
        with pytest.raises(UsageError, match=r"run on NVIDIA GPUs: got q \(2, 3, 8\)"):
            call()


@pytest.mark.parametrize(
    ("q", "error"),
    [
        (torch.zeros(4, 8, dtype=torch.float64), TypeError),
        (torch.zeros(4, 8, dtype=torch.int32), TypeError),
        (torch.zeros(4, 7), UsageError),
        (torch.zeros(4, 257), UsageError),
        (torch.zeros(0, 8), UsageError),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else "",
)
def test_bad_inputs(q: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="got"):
        flash_attention(q, q, q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case: Case, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v, do = case.inputs(dtype, "cuda")
    actual = value_and_gradients(flash(is_causal), q, k, v, do)
    actual["lse"] = forward_op(q, k, v, is_causal, case.head_dim**-0.5)[1]
    assert_within_budget(actual, q, k, v, do, is_causal, case.head_dim**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 64, 100, 511])
@pytest.mark.parametrize(
    "case",
    [Case(700, 700, 64, heads=4, kv_heads=2), Case(520, 520, 128), Case(600, 700, 32), Case(520, 600, 256)],
    ids=str,
)
def test_windows(case: Case, window: int, dtype: torch.dtype) -> None:
    q, k, v, do = case.inputs(dtype, "cuda")
    call = partial(flash_attention, is_causal=True, window=window)
    actual, again = (value_and_gradients(call, q, k, v, do) for _ in range(2))
    in_any_order = {"dq"} if case.n_queries == case.n_keys and sums_dq_in_any_order(q) else set()
    assert all(torch.equal(actual[name], again[name]) for name in actual.keys() - in_any_order)
    visible = (True, case.head_dim**-0.5, window)
    actual["lse"] = forward_op(q, k, v, *visible)[1]
    assert_within_budget(actual, q, k, v, do, *visible)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100, 1200])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_tiles_than_multiprocessors(head_dim: int, window: int | None) -> None:
    """On Hopper a program then works on several tiles, of two sections of heads and more."""
    q, k, v, do = Case(1500, 1500, head_dim, heads=32, kv_heads=8, batch=3).inputs(torch.bfloat16, "cuda")
    actual = value_and_gradients(partial(flash_attention, is_causal=True, window=window), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, True, head_dim**-0.5, window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_softcap(is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v, do = Case(600, 600, 96, heads=4, kv_heads=2).inputs(dtype, "cuda")
    actual = value_and_gradients(partial(flash_attention, is_causal=is_causal, softcap=2.0), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, is_causal, 96**-0.5, None, None, 2.0)


@pytest.mark.gpu
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n_queries=st.integers(1, 400),
    n_keys=st.integers(1, 400),
    head_dim=st.sampled_from([8, 33, 64, 100, 256]),  # each compiles its own kernels
    group=st.integers(1, 3),
    is_causal=st.booleans(),
    scale=st.sampled_from([-0.3, 0.0, 0.05, 0.5]),
)
def test_any_shape(n_queries: int, n_keys: int, head_dim: int, group: int, is_causal: bool, scale: float) -> None:
    q, k, v, do = Case(n_queries, n_keys, head_dim, heads=group, kv_heads=1).inputs(torch.bfloat16, "cuda")
    actual = value_and_gradients(flash(is_causal, scale), q, k, v, do)
    assert_within_budget({"o": actual["o"]}, q, k, v, do, is_causal, scale)
    assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_memory_that_was_nan_is_overwritten(head_dim: int) -> None:
    case = Case(333, 222, head_dim)
    q, k, v, do = case.inputs(torch.bfloat16, "cuda")
    poison = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del poison  # what the kernels now allocate is that memory
    assert_within_budget(value_and_gradients(flash(True), q, k, v, do), q, k, v, do, True, head_dim**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_ten_thousand_stay_finite(dtype: torch.dtype) -> None:
    q, k, v, do = Case(300, 300, 64, magnitude=1e4).inputs(dtype, "cuda")
    assert forward_op(q, k, v, True, 0.125)[1].abs().max() > 1e4
    assert all(x.isfinite().all() for x in value_and_gradients(flash(True), q, k, v, do).values())


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-5), ("tf32", 2e-3)])
def test_nan_and_infinity_in_float32(precision: PrecisionName, allowed: float) -> None:
    with matmul_precision(precision):
        assert_one_nan_and_infinity_go_where_they_do_in_plain_attention(flash(False, 0.2), allowed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_nan_reaches_no_other_querys_gradient(head_dim: int) -> None:
    q, k, v, do = Case(300, 300, head_dim).inputs(torch.bfloat16, "cuda")
    right = value_and_gradients(flash(True), q, k, v, do)
    q[:, :, 200, 3] = float("nan")
    actual = value_and_gradients(flash(True), q, k, v, do)
    others = torch.arange(300, device="cuda") != 200
    for name in ("o", "dq"):
        assert actual[name][:, :, 200].isnan().all()
        torch.testing.assert_close(actual[name][:, :, others], right[name][:, :, others])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1000, 4096])
def test_float32_stays_within_the_budget_of_long_sums(length: int, head_dim: int) -> None:
    q, k, v, do = Case(length, length, head_dim, heads=1, kv_heads=1).inputs(torch.float32, "cuda")
    actual = value_and_gradients(flash(True), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, True, head_dim**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])  # each has tiles of its own
def test_float32_on_tf32_units_stays_within_the_budget(head_dim: int, is_causal: bool) -> None:
    q, k, v, do = Case(1000, 1000, head_dim).inputs(torch.float32, "cuda")
    with matmul_precision("tf32"):
        actual = value_and_gradients(flash(is_causal), q, k, v, do)
        assert_within_budget(actual, q, k, v, do, is_causal, head_dim**-0.5)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_two_deterministic_runs_give_the_same_bits(head_dim: int) -> None:
    q, k, v, do = Case(1500, 1500, head_dim, heads=4, kv_heads=2).inputs(torch.bfloat16, "cuda")
    first = value_and_gradients(flash(True), q, k, v, do)
    for _ in range(3):
        again = value_and_gradients(flash(True), q, k, v, do)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_of_any_two_runs_only_dq_differs_and_only_on_hopper(head_dim: int) -> None:
    q, k, v, do = Case(1500, 1500, head_dim, heads=4, kv_heads=2).inputs(torch.bfloat16, "cuda")
    first = value_and_gradients(flash(True), q, k, v, do)
    for _ in range(20):
        again = value_and_gradients(flash(True), q, k, v, do)
        dq, first_dq = again["dq"], first["dq"]
        # Each rounds a sum in float32, whose order is lost in half a step of bfloat16.
        assert relative_error(dq, first_dq) <= torch.finfo(dq.dtype).eps
        assert sums_dq_in_any_order(q) or torch.equal(dq, first_dq)
        assert all(torch.equal(first[name], again[name]) for name in ("o", "dk", "dv"))


def test_who_asks_for_determinism_gets_the_backward_of_two_kernels(monkeypatch, request) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fused = [torch.empty(1, d, dtype=dtype) for d in (33, 64, 128) for dtype in (torch.float16, torch.bfloat16)]
    others = [torch.empty(1, 64), *(torch.empty(1, d, dtype=torch.bfloat16) for d in (32, 129, 256))]
    assert all(map(sums_dq_in_any_order, fused))
    assert not any(map(sums_dq_in_any_order, others))
    request.getfixturevalue("deterministic")
    assert not any(map(sums_dq_in_any_order, fused + others))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70, 64), (3, 70, 64), (2, 3, 70, 64), (2, 1, 2, 3, 70, 64)], ids=str)
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    o = FlashAttentionTriton.apply(q, k, v, True)
    assert [tuple(t.shape) for t in o.grad_fn.saved_tensors] == [shape, shape, shape, shape, shape[:-1]]
    o.sum().backward()  # the gradient of a sum is expanded: every stride of it is 0
    inputs = (t.detach().reshape(1, -1, *shape[-2:]) for t in (q, k, v))
    expected = value_and_gradients(flash(True), *inputs, torch.ones_like(q).reshape(1, -1, *shape[-2:]))
    assert torch.equal(o.reshape(expected["o"].shape), expected["o"])
    assert torch.equal(q.grad.reshape(expected["dq"].shape), expected["dq"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(dtype: torch.dtype) -> None:
    case = Case(100, 100, 64, heads=3, kv_heads=3, batch=2)
    q, k, v, do = case.inputs(dtype, "cuda")
    expected = value_and_gradients(flash(True), q, k, v, do)
    packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)  # (batch, length, 3, heads, head_dim)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    last_dim_not_contiguous = [t.mT.contiguous().mT for t in (q, k, v)]
    offset = torch.empty(q.numel() + 1, dtype=dtype, device="cuda")[1:].view(q.shape).copy_(q)  # not 16-byte aligned
    for inputs in (views, last_dim_not_contiguous, [offset, k, v]):
        actual = value_and_gradients(flash(True), *inputs, do.transpose(1, 2).contiguous().transpose(1, 2))
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    heads_last = flash_attention(*views, is_causal=True)
    assert heads_last.transpose(1, 2).is_contiguous()  # the output keeps the inputs' memory order
    expanded = k[:, :1].expand_as(k)
    assert torch.equal(flash_attention(q, expanded, expanded), flash_attention(q, k[:, :1], k[:, :1]))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    batch, heads, length, head_dim = 3, 3, 4_000_000, 64
    assert batch * heads * length * head_dim > 2**31
    q = torch.randn(batch, heads, 70, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    torch.cuda.synchronize()  # here and below: an illegal access fails on the line of its kernel
    o = flash_attention(q, k, v)
    torch.cuda.synchronize()
    (dq,) = torch.autograd.grad(o, q, torch.ones_like(o))
    torch.cuda.synchronize()
    last = (slice(2, 3), slice(2, 3))
    small = q[last].detach().requires_grad_()
    expected = flash_attention(small, k[last].clone(), v[last].clone())
    assert torch.equal(o[last], expected)
    (expected_dq,) = torch.autograd.grad(expected, small, torch.ones_like(expected))
    assert relative_error(dq[last], expected_dq) <= torch.finfo(dq.dtype).eps


@pytest.mark.gpu
def test_float32_follows_the_matmul_precision() -> None:
    q, k, v, _ = Case(300, 300, 64).inputs(torch.float32, "cuda")
    with matmul_precision("fp32"):
        exact = flash_attention(q, k, v)
    with matmul_precision("tf32"):
        rounded = flash_attention(q, k, v)
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-5 < error < 2e-3  # tf32 keeps 10 bits of each operand


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    q, k, v, do = Case(70, 60, 64, heads=4, kv_heads=2).inputs(dtype, "cuda")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(forward_op, (*leaves, True, 0.125))
    torch.library.opcheck(forward_op, (*leaves, True, 0.125, 20))
    transposed = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in leaves]
    torch.library.opcheck(forward_op, (*transposed, False, 0.125))
    o, lse = forward_op(q, k, v, True, 0.125)
    torch.library.opcheck(backward_op, (*(t.detach() for t in (q, k, v, o, lse)), do, True, 0.125))


@pytest.mark.gpu
def test_torch_compile_without_a_graph_break() -> None:
    q, k, v, do = Case(200, 200, 64).inputs(torch.bfloat16, "cuda")
    expected = value_and_gradients(flash(True), q, k, v, do)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 1.0, k, v, is_causal=True, impl="flash-triton") * 1.0

    actual = value_and_gradients(torch.compile(around, fullgraph=True), q, k, v, do)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_backward_reads_the_saved_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing computes them anew for the first reading, and refuses a second."""

    class Saved:
        is_causal, scale, window, softcap = True, 0.125, None, None
        readings = 0

        def __init__(self, count: int) -> None:
            self.tensors = tuple(torch.full((), float(place)) for place in range(count))

        @property
        def saved_tensors(self) -> tuple[Tensor, ...]:
            self.readings += 1
            return self.tensors

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flash_module, "backward_op", lambda *arguments: calls.append(arguments) or (None,) * 3)
    with torch.no_grad():
        for saved in (plain := Saved(5), with_bounds := Saved(6)):
            flash_module._backward(saved, torch.tensor(9.0))
    assert plain.readings == with_bounds.readings == 1
    assert [float(t) for t in calls[0][:6]] == [0, 1, 2, 3, 4, 9]
    assert calls[0][9] is None
    assert float(calls[1][9]) == 5


@pytest.mark.gpu
def test_activation_checkpointing() -> None:
    q, k, v, do = Case(200, 200, 64).inputs(torch.bfloat16, "cuda")
    expected = value_and_gradients(flash(True), q, k, v, do)
    actual = value_and_gradients(lambda *t: checkpoint(flash(True), *t, use_reentrant=False), q, k, v, do)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.gpu
def test_autocast() -> None:
    q, k, v, _ = Case(200, 200, 64).inputs(torch.float32, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        o = flash_attention(q, k.half(), v)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, flash_attention(q.bfloat16(), k.half().bfloat16(), v.bfloat16()))


@pytest.mark.gpu
def test_cuda_graph_capture() -> None:
    q, k, v, do = Case(200, 200, 128).inputs(torch.bfloat16, "cuda")
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def step() -> list[Tensor]:
        o = flash_attention(*leaves, is_causal=True)
        return [o, *torch.autograd.grad(o, leaves, do)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
