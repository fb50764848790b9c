"""Random roundings are as large as a format's own, in forward and backward, and change nothing else."""

import contextlib

import pytest
import torch

from trainstep.bench.check.rounding import RandomRounding


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_they_are_as_large_as_rounding_to_nearest(precision, dtype):
    exact = torch.rand(200_000, dtype=torch.float64) + 1  # one exponent: 1 to 2
    rounded = exact.to(dtype)
    with RandomRounding(precision, 0):
        moved = rounded * 1
    own = float((rounded.double() - exact).square().mean().sqrt())
    drawn = float((moved.double() - rounded.double()).square().mean().sqrt())
    assert drawn == pytest.approx(own, rel=0.05)
    assert abs(float((moved.double() - rounded.double()).mean())) < own / 100, "neither up nor down"


def test_products_in_tf32_are_off_by_what_their_inputs_are():
    a, b = torch.randn(256, 300), torch.randn(300, 256)
    unit = 2.0**-10  # spacing of numbers near 1

    def tf32(x):  # to 10 bits after the point
        mantissa, exponent = torch.frexp(x.double())
        return torch.ldexp(torch.round(mantissa * 2 / unit) * unit / 2, exponent)

    exact = a.double() @ b.double()
    own = float((tf32(a) @ tf32(b) - exact).norm())
    with RandomRounding("tf32", 0):
        drawn = float(((a @ b).double() - exact).norm())
        assert torch.equal(a + a, 2 * a), "products alone"
    assert drawn == pytest.approx(own, rel=0.3)


@pytest.mark.parametrize("terms", [64, 4096])
def test_products_in_float32_are_off_by_what_summing_one_by_one_costs(terms):
    a, b = torch.randn(40, terms), torch.randn(terms, 50)
    exact, one_by_one = a.double() @ b.double(), torch.zeros(40, 50)
    for k in range(terms):
        one_by_one += a[:, k : k + 1] * b[k]
    with RandomRounding("fp32", 0):
        drawn = a @ b
    own, random = (float((each.double() - exact).norm()) for each in (one_by_one, drawn))
    assert 0.7 * own < random < 2.5 * own, "no order of summation is worse than one by one"


@pytest.mark.parametrize("dim", [1, 2])
def test_convolutions_are_products_too(dim):
    make = (torch.nn.Conv1d, torch.nn.Conv2d)[dim - 1](3, 8, 3)
    x = torch.randn(4, 3, *[10] * dim)

    def gradients(context):
        with context:
            make(x).square().sum().backward()
        found = [parameter.grad for parameter in make.parameters()]
        make.zero_grad()
        return found

    plain = gradients(contextlib.nullcontext())
    for one, other in zip(plain, gradients(RandomRounding("fp32", 0)), strict=True):
        assert 1e-8 < float((one - other).norm() / one.norm()) < 1e-5


def test_backward_is_rounded_too_and_the_seed_decides():
    def gradient(seed):
        weight = torch.ones(64, 64, requires_grad=True)
        x = torch.linspace(-1, 1, 64 * 64).view(64, 64)
        with torch.autocast("cpu", torch.bfloat16), RandomRounding("bf16", seed):
            (x @ weight).float().square().sum().backward()
        return weight.grad

    weight = torch.ones(64, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        (torch.linspace(-1, 1, 64 * 64).view(64, 64) @ weight).float().square().sum().backward()
    assert torch.equal(gradient(0), gradient(0))
    assert not torch.equal(gradient(0), gradient(1))
    assert 0 < float((gradient(0) - weight.grad).norm() / weight.grad.norm()) < 0.02


def test_other_formats_views_and_copies_are_left_alone():
    x = torch.randn(1000)
    with RandomRounding("bf16", 0):
        assert torch.equal(x * 3, x.clone() * 3), "float32 is not this precision's format"
        narrow = x.to(torch.bfloat16).clone()
        assert torch.equal(narrow.view(10, 100).clone().flatten(), narrow)
    stored = torch.zeros(1000, dtype=torch.bfloat16)
    with RandomRounding("bf16", 0):
        stored.copy_(x)  # rounds
    assert not torch.equal(stored, x.to(torch.bfloat16))
