"""Random roundings are as large as a format's own, in forward and backward, and change nothing else."""

import contextlib
import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

import trainstep.check.rounding as module
from tools.trust.planted.step import BASE, PLAIN
from trainstep.check.reference import gradients_at
from trainstep.check.rounding import RandomRounding
from trainstep.step.casting import in_tf32
from trainstep.step.randomness import DRAWING
from trainstep.step.training_step import build_step


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


def one_rounding():
    """The root mean square of its error, in units of u, where leading digits are spread as they usually are."""
    exact = 2 ** torch.rand(10**6, dtype=torch.float64)
    return rms((exact.float().double() - exact) / exact) * 2**24


def rms(values):
    return float(values.double().square().mean().sqrt())


TERMS = 2048
SIGNS = torch.ones(TERMS).index_fill(0, torch.arange(1, TERMS, 2), -1.0)
PRODUCTS = {
    "mm": lambda a, b: a @ b,
    "addmm": lambda a, b: torch.addmm(torch.zeros(len(a), b.shape[1]), a, b),
    "bmm": lambda a, b: torch.bmm(a.view(4, -1, TERMS), b.expand(4, -1, -1)).view(len(a), -1),
    "baddbmm": lambda a, b: torch.baddbmm(
        torch.zeros(4, len(a) // 4, b.shape[1]), a.view(4, -1, TERMS), b.expand(4, -1, -1)
    ).view(len(a), -1),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("precision", "signs", "expected"),
    [
        ("fp32", SIGNS, 2**-24 * math.sqrt(TERMS / 2) * math.sqrt(TERMS)),  # partial sums of √k, that cancel in the end
        ("fp32", SIGNS.abs(), 2**-24 * math.sqrt(TERMS / 2) * TERMS),
    ],
    ids=["cancelling in float32", "adding up in float32"],
)
def test_sums_of_ones_err_by_what_their_roundings_add_up_to(name, precision, signs, expected):
    a, b = torch.ones(128, TERMS), signs[:, None].expand(TERMS, 128).contiguous()
    with RandomRounding(precision, 0):
        drawn = PRODUCTS[name](a, b)
    assert rms(drawn.double() - signs.sum()) == pytest.approx(one_rounding() * expected, rel=0.03)


def tf32(x):
    """To 10 bits after the point, by another way than the code's."""
    unit = 2.0**-10  # spacing of numbers near 1
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp(torch.round(mantissa * 2 / unit) * unit / 2, exponent)


def test_numbers_are_rounded_to_tf32_as_to_the_nearest_of_11_bits():
    values = torch.randn(10**5) * 2 ** torch.randint(-60, 60, (10**5,)).float()
    ties = 1 + torch.arange(8) * 2.0**-11
    for each in (values, -values, ties, torch.zeros(2)):
        assert torch.equal(in_tf32(each).double(), tf32(each))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_tf32_are_off_by_what_their_inputs_are(name):
    torch.manual_seed(0)
    a, b = torch.randn(128, TERMS), torch.randn(TERMS, 128)
    exact = a.double() @ b.double()
    own = rms(tf32(a) @ tf32(b) - exact)
    with RandomRounding("tf32", 0):
        drawn = rms(PRODUCTS[name](a, b).double() - exact)
        assert torch.equal(a + a, 2 * a), "products alone"
    assert drawn == pytest.approx(own, rel=0.05)


def test_rows_that_are_alike_are_off_alike_in_tf32():
    torch.manual_seed(0)
    row, b = torch.randn(1, TERMS), torch.randn(TERMS, 128)
    exact = row.double() @ b.double()
    with RandomRounding("tf32", 0):
        drawn = (row.expand(1000, -1).contiguous() @ b).double()
    assert rms((drawn - exact).mean(0)) == pytest.approx(rms(tf32(row) @ tf32(b) - exact), rel=0.2)


def test_either_input_of_a_product_in_tf32_errs_by_itself_up_or_down():
    a, b = torch.full((1, 1), 1 + 2.0**-12), torch.full((1, 1), 1 + 2.0**-13)
    found = set()
    for seed in range(40):
        with RandomRounding("tf32", seed):
            found.add(round(float((a @ b - a * b) * 2**13)))
    assert found == {-3, -1, 1, 3}


def test_what_tf32_holds_is_not_rounded_to_it():
    a, b = torch.randn(64, 64).bfloat16().float(), torch.randn(64, 64).bfloat16().float()
    exact = a @ b
    with RandomRounding("tf32", 0):
        assert torch.equal(a @ b, exact)


def test_products_in_narrow_formats_are_rounded_as_results_and_those_of_other_formats_are_not():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    narrow = a.bfloat16(), b.bfloat16()
    exact = narrow[0] @ narrow[1]
    with RandomRounding("bf16", 0):
        assert torch.equal(a @ b, torch.mm(a, b))
        moved = narrow[0] @ narrow[1]
    assert float((moved != exact).float().mean()) == pytest.approx(1 / 12, rel=0.2)
    with RandomRounding("fp32", 0):
        assert torch.equal(narrow[0] @ narrow[1], exact)


def test_one_result_in_twelve_moves_as_often_up_as_down():
    ones = torch.full((2 * 10**6,), 1.5)
    with RandomRounding("fp32", 0):
        moved = ones * 1
    moved = (moved - ones) / 2**-23
    assert set(moved.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert float(moved.square().mean()) == pytest.approx(1 / 12, rel=0.01)
    assert abs(float(moved.mean())) < 1e-3


def test_zeros_and_what_is_not_finite_stay():
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan]).repeat_interleave(1000)
    with RandomRounding("fp32", 0):
        moved = values * 1
        assert not torch.equal(torch.ones(1000) * 1, torch.ones(1000))
        assert not torch.equal(torch.ones(1000) * -1, -torch.ones(1000))
    assert torch.equal(moved.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("pool", [1000, module._POOL])
def test_every_tensor_moves_by_its_own_numbers_also_the_largest(monkeypatch, pool):
    monkeypatch.setattr(module, "_POOL", pool)
    with RandomRounding("fp32", 0):
        for count in (100, 1400, 30_000, 29_990, 30_000):
            ones = torch.full((count,), 1.5)
            drawn = [ones * 1 for _ in range(4)]
            for index, one in enumerate(drawn):
                assert all(not torch.equal(one, other) for other in drawn[:index]), (count, index)


def test_moves_are_taken_from_anywhere_in_the_pool_and_from_nowhere_else(monkeypatch):
    monkeypatch.setattr(module, "_POOL", 2)
    ones = torch.full((50,), 1.5)
    with RandomRounding("fp32", 1):
        drawn = {tuple((ones * 1).tolist()) for _ in range(100)}
    assert len(drawn) == 3, "two places more than the tensor needs"


def test_the_sum_in_backward_of_softmax_is_off_by_one_error_for_the_row():
    """Two large terms, which cancel, set the error; it is seen in the others, which are alike."""
    rows, terms = 2000, 512
    p, gradient = torch.full((rows, terms), 1.5 / terms), torch.ones(rows, terms)
    gradient[:, 0], gradient[:, 1] = terms, -2 * terms + 2

    def backward(context):
        with context:
            return torch.ops.aten._softmax_backward_data(gradient, p, -1, torch.float32)[:, 2:]

    exact, drawn = backward(contextlib.nullcontext()), backward(RandomRounding("fp32", 0))
    by_row = drawn.median(-1, keepdim=True).values
    size = math.hypot(terms, 2 * terms - 2, math.sqrt(terms - 2)) * 1.5 / terms
    expected = 2**-24 * one_rounding() * math.sqrt(terms / 2) * size
    assert rms((by_row - exact).double() / 1.5 * terms) == pytest.approx(expected, rel=0.06)
    assert float((drawn != by_row).float().mean()) == pytest.approx(1 / 12, rel=0.05), "and each by its own rounding"
    for precision in ("tf32", "bf16"):
        assert torch.equal(backward(RandomRounding(precision, 0)), exact)


QUERIES, KEYS, HEAD_DIM = 96, 2048, 16


def gradient_of_queries(form, values, context):
    """Of attention whose scores are all alike and whose values are alike for all keys: zero but for rounding."""
    q, k, v = torch.zeros(2, 3, QUERIES, HEAD_DIM), torch.ones(2, 3, KEYS, HEAD_DIM), values.expand(2, 3, KEYS, -1)
    q.requires_grad_()
    with context:
        if form == "fused":
            output = F.scaled_dot_product_attention(q, k, v)
        else:
            output = ((q @ k.mT) / math.sqrt(HEAD_DIM)).softmax(-1) @ v
        return torch.autograd.grad(output.sum(), q)[0].double()


@pytest.mark.parametrize("form", ["the formula", "fused"])
def test_sums_of_rows_are_cut_off_for_all_rows_alike(form, monkeypatch):
    values = torch.full((HEAD_DIM,), 3.0)
    by_rounding = rms(gradient_of_queries(form, values, contextlib.nullcontext()))
    none = gradient_of_queries(form, values, RandomRounding("fp32", 0))
    monkeypatch.setattr(module, "CUTTING", ("cpu",))
    drawn = gradient_of_queries(form, values, RandomRounding("fp32", 0))
    expected = KEYS * module.CUT_OFF * 3.0 * HEAD_DIM / math.sqrt(HEAD_DIM)
    assert max(by_rounding, abs(float(none.mean()))) < expected / 10, "a CPU has no matrix units"
    assert float(drawn.mean()) == pytest.approx(expected, rel=0.1)
    for precision in ("tf32", "bf16"):
        others = gradient_of_queries(form, values, RandomRounding(precision, 0))
        assert rms(others) < expected / 10, "they sum in float32, which is not theirs"
    drawn_of_512 = 2 * module.CUT_OFF * 512
    assert drawn_of_512 == pytest.approx(9e-7, rel=0.1), "as measured"


def test_a_sum_over_a_vocabulary_is_not_cut_off(monkeypatch):
    monkeypatch.setattr(module, "CUTTING", ("cpu",))
    monkeypatch.setattr(module, "CUT_OFF", 1.0)
    p = torch.full((4, 3, 512), 1 / 512)
    with RandomRounding("fp32", 0):
        drawn = torch.ops.aten._softmax_backward_data(torch.ones_like(p), p, -1, torch.float32)
    assert rms(drawn) < 1e-6 / 512


def test_a_causal_row_is_cut_off_by_the_keys_that_it_sees(monkeypatch):
    monkeypatch.setattr(module, "CUTTING", ("cpu",))
    monkeypatch.setattr(module, "CUT_OFF", 1e-3)
    p = torch.ones(2, 3, 64, 64).tril()
    p /= p.sum(-1, keepdim=True)
    with RandomRounding("fp32", 0):
        drawn = torch.ops.aten._softmax_backward_data(torch.ones_like(p), p, -1, torch.float32)
    assert torch.allclose(drawn.sum(-1), 1e-3 * torch.arange(1.0, 65), rtol=1e-3)


@pytest.mark.parametrize("backward", module.FUSED_BACKWARD)
def test_the_backward_of_fused_attention_has_what_is_moved(backward):
    names = {argument.name.rstrip("_") for argument in backward.default._schema.arguments}
    assert {"grad_out", "key", "out"} <= names


def test_a_row_that_has_no_gradient_has_no_error():
    q, k, v = (torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3))
    with RandomRounding("fp32", 0):
        F.scaled_dot_product_attention(q, k, v)[:, :, 3:].sum().backward()
    assert torch.equal(q.grad[:, :, :3], torch.zeros(1, 1, 3, 4))
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fused_attention_of_other_types_is_left_to_its_results(dtype):
    q, k, v = (torch.randn(1, 1, 8, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    plain = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q)[0]
    with RandomRounding("fp32", 0):
        drawn = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q)[0]
    assert torch.equal(plain, drawn)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_that_is_computed_again_is_rounded_as_before(precision):
    """A router that sends a token elsewhere the second time would have other shapes in backward."""

    def gradients(checkpointing):
        step = build_step(PLAIN, dataclasses.replace(BASE, precision=precision, checkpointing=checkpointing))
        with RandomRounding(precision, 3):
            return gradients_at(step, step.next_batch()).by_name

    expected, found = gradients("none"), gradients("every-1")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_fused_attention_has_one_error_for_each_row():
    """As in softmax's backward, from the terms that it takes the sum of: here they cancel."""
    values = torch.full((HEAD_DIM,), 3.0)
    values[1::2] *= -1
    drawn = gradient_of_queries("fused", values, RandomRounding("fp32", 0))
    expected = 2**-24 * one_rounding() * math.sqrt(KEYS / 2) * 3.0 * math.sqrt(HEAD_DIM) / math.sqrt(HEAD_DIM)
    by_row = drawn.mean(-1)
    assert rms(by_row) == pytest.approx(expected, rel=0.1)
    assert rms(drawn - by_row[..., None]) < expected / 10
    assert not gradient_of_queries("fused", values, RandomRounding("tf32", 0)).any()


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


@pytest.mark.parametrize(("make", "size"), [(torch.nn.Conv1d, (400,)), (torch.nn.Conv2d, (5, 400))])
def test_convolutions_err_by_their_multiplications(make, size):
    """Outputs, gradients of inputs and of weights; two inputs of different size, of which neither sets the other's."""
    x = (torch.randn(2, 3, *size) * torch.tensor([1.0, 1000.0]).view(2, *[1] * (1 + len(size)))).requires_grad_()
    layer = make(3, 8, 5, bias=False)
    do = torch.randn(2, 8, *(each - 4 for each in size))

    def results():
        out = layer(x)
        return out.detach(), *torch.autograd.grad(out, (x, layer.weight), do)

    plain, noise = results(), []
    for seed in range(12):
        with RandomRounding("fp32", seed):
            noise.append([a.double() - b for a, b in zip(results(), plain, strict=True)])
    for index, each in enumerate(plain):
        typical = torch.maximum(each.square().mean(-1, keepdim=True).sqrt(), each.abs())
        expected = (
            2**-24 * one_rounding() * math.sqrt(do.numel() * layer.weight[0].numel() / each.numel() / 2) * typical
        )
        for part in range(2):
            found = rms(torch.stack([own[index][part] for own in noise]) / expected[part])
            assert found == pytest.approx(1, rel=0.12), (index, part)


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
        narrow.copy_(stored)  # moves
    assert not torch.equal(stored, x.to(torch.bfloat16))
    assert torch.equal(narrow, stored)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_numbers_stay_whole(precision):
    """As where experts are counted in floating point: one token less and a grouped product leaves out its row."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    chosen = torch.arange(4).repeat_interleave(50)
    with RandomRounding(precision, 0):
        cast, copied = chosen.to(dtype), torch.empty(200, dtype=dtype).copy_(chosen)
        counts = torch.histc(chosen.float(), bins=4, min=0, max=3)
        whole = [round(torch.rand(200, dtype=dtype) * 100) for round in (torch.floor, torch.ceil, torch.round)]
    assert torch.equal(cast.long(), chosen)
    assert torch.equal(copied.long(), chosen)
    assert counts.tolist() == [50] * 4
    assert all(torch.equal(each, each.round()) for each in whole)


def test_a_model_can_be_built_inside_without_values_at_first():
    with RandomRounding("fp32", 0):
        empty = torch.empty(3, device="meta")
        assert (empty * 2).is_meta


def test_convolutions_in_tf32_are_off_by_what_their_inputs_are():
    torch.manual_seed(0)
    x, weight = torch.randn(8, 32, 100), torch.randn(64, 32, 5)
    exact = F.conv1d(x.double(), weight.double())
    own = rms(F.conv1d(tf32(x), tf32(weight)) - exact)
    with RandomRounding("tf32", 0):
        drawn = rms(F.conv1d(x, weight).double() - exact)
    assert drawn == pytest.approx(own, rel=0.05)


@pytest.mark.parametrize("seed", [0, 5])
def test_a_single_number_moves_in_every_twelfth_drawing_down_and_up_in_turns(seed):
    one = torch.tensor(1.5)
    with RandomRounding("fp32", seed):
        drawn = [one * 1 for _ in range(3 * 12 - seed)]
    moves = {number: round(float((each - one) * 2**23)) for number, each in enumerate(drawn, 1) if each != one}
    assert moves == {12 - seed: -1, 24 - seed: 1, 36 - seed: -1}


def test_a_mode_that_was_left_draws_for_nobody():
    with RandomRounding("fp32", 0) as rounding:
        assert rounding in DRAWING
    assert rounding not in DRAWING
