"""RMSNorm, alone and of a sum: results and gradients within the budget, at odd sizes and strides."""

from functools import partial

import pytest
import torch

from tests.fused.places import DEVICE, DTYPES, HERE, draw
from trainstep.bench.check.fused import check
from trainstep.errors import UsageError
from trainstep.fused import add_rms_norm, eager, rms_norm

pytestmark = HERE
NORM, ADD = ("y", "dx", "dweight"), ("sum", "y", "dx", "dresidual", "dweight")
SHAPES = [(1, 7), (3, 5, 33), (2, 7, 128), (19, 1000), (5, 2, 3, 24)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(shape, dtype) -> None:
    x, residual = (draw(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = draw(shape[-1], dtype=dtype, seed=3)
    norm = check(partial(rms_norm, eps=1e-5), partial(eager.rms_norm, eps=1e-5), (x, weight), NORM)
    assert norm.within, str(norm)
    whole = partial(add_rms_norm, eps=1e-5), partial(eager.add_rms_norm, eps=1e-5)
    added = check(*whole, (x, residual, weight), ADD)
    assert added.within, str(added)


def test_one_feature_whose_gradient_is_what_two_equal_terms_leave() -> None:
    x, weight = draw(5, 1), draw(1, seed=1)
    (found,) = torch.autograd.grad(rms_norm(x, weight, 1e-5).sum(), x)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(eager.rms_norm(wide, weight.detach().double(), 1e-5).sum(), wide)
    term = (weight / x).abs()  # each has four roundings: two of the statistic, two of its products
    assert ((found - exact).abs() <= 8 * 2**-24 * term).all()


def test_a_float32_stream_takes_a_16_bit_residual_under_autocast() -> None:
    x, residual = draw(4, 40, seed=1), draw(4, 40, dtype=torch.float16, seed=2)
    weight = draw(40, seed=3)
    budget = check(partial(add_rms_norm, eps=1e-5), partial(eager.add_rms_norm, eps=1e-5), (x, residual, weight), ADD)
    assert budget.within, str(budget)
    total, y = add_rms_norm(x, residual, weight, 1e-5)
    assert total.dtype == y.dtype == torch.float32
    assert torch.autograd.grad(y.sum(), residual)[0].dtype == torch.float16


def test_strides() -> None:
    wide = draw(6, 80, seed=1, grad=False)
    weight = draw(40, seed=3)
    for x in (wide[:, 40:], wide[:, ::2], wide[:3].reshape(3, 2, 40).transpose(0, 1), wide[:1, :40].expand(6, 40)):
        budget = check(partial(rms_norm, eps=1e-5), partial(eager.rms_norm, eps=1e-5), (x, weight), ("y", "dweight"))
        assert budget.within, str(budget)
        y = rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(y, eager.rms_norm(x, weight, 1e-5))
    (dx,) = torch.autograd.grad(rms_norm(x := draw(3, 40), weight, 1e-5).sum(), x)  # a gradient of stride 0
    assert dx.abs().sum() > 0


def test_only_the_sum_is_used() -> None:
    x, residual, weight = draw(3, 8, seed=1), draw(3, 8, seed=2), draw(8, seed=3)
    total, _ = add_rms_norm(x, residual, weight, 1e-5)
    dx, dr, dw = torch.autograd.grad(total.sum(), (x, residual, weight))
    assert torch.equal(dx, torch.ones_like(dx))
    assert torch.equal(dr, dx)
    assert not dw.any()


def test_two_runs_give_the_same_bits() -> None:
    x, weight = draw(50, 30), draw(30, seed=1)
    first, again = (torch.autograd.grad(rms_norm(x, weight, 1e-5).sum(), (x, weight)) for _ in range(2))
    assert all(map(torch.equal, first, again))


def test_squares_that_overflow_float16_and_a_row_of_nan() -> None:
    x = torch.full((3, 16), 3e3, dtype=torch.float16, device=DEVICE)
    x[1, 4] = float("nan")
    y = rms_norm(x, torch.ones(16, dtype=torch.float16, device=DEVICE), 1e-5)
    assert y[1].isnan().all()
    assert torch.equal(y[0], torch.ones_like(y[0]))


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        ((4, 8), (7,), "got x"),
        ((4, 0), (0,), "none empty"),
        ((0, 8), (8,), "none empty"),
        ((2, 40_000), (40_000,), "up to 32768"),
    ],
)
def test_bad_shapes(x, weight, error) -> None:
    with pytest.raises(UsageError, match=error):
        rms_norm(torch.zeros(x, device=DEVICE), torch.zeros(weight, device=DEVICE), 1e-5)


def test_bad_dtypes_and_residuals() -> None:
    x, weight = draw(4, 8), draw(8)
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16: got x .* float64"):
        rms_norm(x.double(), weight, 1e-5)
    with pytest.raises(UsageError, match="one shape"):
        add_rms_norm(x, x[:2], weight, 1e-5)
