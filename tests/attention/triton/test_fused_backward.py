"""The gradients of Hopper's single backward kernel; what it compiles to is looked at in test_tiles.py."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.attention.budget import Case, assert_within_budget, relative_error, value_and_gradients
from trainstep.attention import flash_attention
from trainstep.attention.flash import backward_op, forward_op, runs_hopper_kernels, sums_dq_in_any_order
from trainstep.attention.hopper.backward import launch_backward
from trainstep.attention.hopper.dkdv import launch_dkdv
from trainstep.attention.hopper.dq import empty_statistics, launch_dq
from trainstep.attention.tuned import hopper_tile_for

CASES = [
    *(Case(n, n, 64) for n in (1, 63, 64, 65, 128, 129, 257)),
    *(Case(200, 200, head_dim) for head_dim in (40, 80, 96, 128)),
    Case(300, 111, 128),
    Case(64, 4000, 64),
    Case(4000, 65, 128),
    Case(1024, 1024, 64, magnitude=8.0),
    Case(1000, 777, 64, heads=8, kv_heads=2, batch=2),
    Case(129, 65, 128, heads=6, kv_heads=1),
]


@pytest.fixture
def hopper() -> None:
    if not runs_hopper_kernels(torch.empty(1, 64, dtype=torch.bfloat16, device="cuda")):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v, do = case.inputs(dtype, "cuda")
    scale = case.head_dim**-0.5
    o, lse = forward_op(q, k, v, is_causal, scale)
    gradients = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    launch_backward((q, k, v, o, do, lse, *gradients), is_causal, scale)
    assert_within_budget(dict(zip(("dq", "dk", "dv"), gradients, strict=True)), q, k, v, do, is_causal, scale)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("scale", [-0.2, 0.2])
@pytest.mark.parametrize("head_dim", [40, 64, 100, 128])  # rows of 100 elements are copied to others of 16-byte strides
def test_strides_and_signs_through_the_public_function(head_dim: int, scale: float) -> None:
    q, k, v, do = Case(500, 500, head_dim, heads=3, kv_heads=3, batch=2).inputs(torch.bfloat16, "cuda")
    packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)  # (batch, length, 3, heads, head_dim)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    assert sums_dq_in_any_order(views[0])
    do = do.transpose(1, 2).contiguous().transpose(1, 2)
    function = partial(flash_attention, is_causal=True, scale=scale)
    assert_within_budget(value_and_gradients(function, *views, do), q, k, v, do, True, scale)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_only_dq_differs_from_run_to_run(head_dim: int, is_causal: bool) -> None:
    q, k, v, do, o, lse = _long(head_dim, is_causal)
    pair = _pair(q, k, v, do, o, lse, is_causal)
    first = backward_op(q, k, v, o, lse, do, is_causal, 0.1)
    for _ in range(20):
        dq, dk, dv = backward_op(q, k, v, o, lse, do, is_causal, 0.1)
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        # Each rounds a sum in float32, whose order is lost in half a step of bfloat16.
        assert relative_error(dq, first[0]) <= torch.finfo(dq.dtype).eps
    assert max(map(relative_error, first, pair)) <= torch.finfo(q.dtype).eps


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper", "deterministic")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_who_asks_for_determinism_gets_the_pair(head_dim: int, is_causal: bool) -> None:
    q, k, v, do, o, lse = _long(head_dim, is_causal)
    pair = _pair(q, k, v, do, o, lse, is_causal)
    for _ in range(20):
        assert all(map(torch.equal, backward_op(q, k, v, o, lse, do, is_causal, 0.1), pair))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_holds_what_it_says(head_dim: int) -> None:
    is_causal, heads, length = True, 16, 2048 - 5  # rounded up to 2048
    q, k, v, do, o, lse = _long(head_dim, is_causal, length)
    backward_op(q, k, v, o, lse, do, is_causal, 0.1)  # compiled
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    gradients = backward_op(q, k, v, o, lse, do, is_causal, 0.1)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before == sum(t.nbytes for t in gradients) + heads * 2048 * (
        4 * head_dim + (64 if head_dim == 64 else 8)
    )


def _long(head_dim: int, is_causal: bool, length: int = 2048) -> tuple[Tensor, ...]:
    q, k, v, do = Case(length, length, head_dim, heads=8, kv_heads=8, batch=2).inputs(torch.bfloat16, "cuda")
    return q, k, v, do, *forward_op(q, k, v, is_causal, 0.1)


def _pair(q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, lse: Tensor, is_causal: bool) -> list[Tensor]:
    """dq, dk and dv from the kernels that each own what they sum, scale 0.1."""
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    dq_tile, dkdv_tile = (hopper_tile_for(kernel, q.shape[-1], is_causal) for kernel in ("dq", "dkdv"))
    stat = empty_statistics(q, dq_tile)
    launch_dq((q, k, v, do, o, lse, stat, gradients[0]), is_causal, 0.1, dq_tile)
    launch_dkdv((q, k, v, do, stat, *gradients[1:]), is_causal, 0.1, dkdv_tile)
    return gradients
