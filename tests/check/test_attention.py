"""The check of attention: its oracle is autograd's, what is wrong anywhere is caught, right ones of any form pass."""

import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainstep.check.attention as module
from tools.trust.planted.attention import PRECISIONS, RIGHT, SHAPE, WRONG, causal
from trainstep.attention.eager import attention_eager
from trainstep.attention.scoring import Scoring
from trainstep.base.tolerance import one_rounding
from trainstep.check.attention import MOVED, NAMES, STATISTICS, _has_same_bits, check, deterministic, oracle

CPU = torch.device("cpu")
LARGE = (2, 16, 128, 16)
"""So many heads that the plain formula is run on the same inputs, 4,096 rows."""


def grouped_inputs(heads, group, seq, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, 1 if name in "kv" else group, seq, head_dim) for name in ("q", "k", "v", "do")]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def test_the_same_bits_are_asked_of_every_result_and_only_where_they_are_asked_for():
    calls = []

    def drifting(name):
        def implementation(q, k, v):
            calls.append(torch.are_deterministic_algorithms_enabled())
            o = attention_eager(q, k, v, Scoring(True, 1 / math.sqrt(q.shape[-1])))
            if name == "o":
                return o + (o * 1e-7 * (len(calls) % 2)).detach()
            if name is not None:
                {"dq": q, "dk": k, "dv": v}[name].register_hook(
                    lambda gradient: gradient * (1 + 1e-7 * (len(calls) % 2))
                )
            return o

        return implementation

    for name in (*NAMES, None):
        errors = check(drifting(name), SHAPE, torch.float32, CPU, is_causal=True, is_deterministic=True)
        assert errors.faults == (() if name is None else (f"{name} {MOVED}",))
        assert errors.is_right is (name is None)
    assert all(calls)
    calls.clear()
    assert check(drifting("dq"), SHAPE, torch.float32, CPU, is_causal=True).is_right
    assert calls == [False], "once, and nothing asked"


def test_nan_has_bits_too():
    x = torch.tensor([[1.0, math.nan], [0.0, 2.0]])
    assert _has_same_bits(x, x.clone())
    assert _has_same_bits(x.t(), x.t().clone())
    assert not _has_same_bits(x, x.abs().neg())
    assert not _has_same_bits(torch.zeros(2), -torch.zeros(2))


@pytest.mark.parametrize("before", [(False, False, True), (True, False, True), (True, True, False)], ids=str)
@pytest.mark.parametrize("is_asked", [False, True])
def test_what_was_asked_of_pytorch_before_is_asked_again_afterwards(is_asked, before, request):
    memory = torch.utils.deterministic

    def put(is_on, only_warns, fills):
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
        memory.fill_uninitialized_memory = fills

    def found():
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), only_warns, memory.fill_uninitialized_memory

    request.addfinalizer(functools.partial(put, *found()))
    put(*before)
    with deterministic(is_asked):
        assert found() == (is_asked, False, False)
    assert found() == before
    with pytest.raises(ZeroDivisionError), deterministic(is_asked):
        raise ZeroDivisionError
    assert found() == before


@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (False, None), (True, 3)])
@pytest.mark.parametrize(("heads", "group", "seq"), [(1, 1, 5), (3, 2, 129), (1, 1, 1500)])
def test_the_sliced_oracle_is_autograds(heads, group, seq, is_causal, window, monkeypatch):
    monkeypatch.setattr(module, "SCORES", 1000 * seq)
    q, k, v, do = grouped_inputs(heads, group, seq)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    o = attention_eager(*leaves, Scoring(is_causal, 1 / math.sqrt(8), window))
    expected = (o.detach(), *torch.autograd.grad(o, leaves, do))
    own, _ = oracle(q, k, v, do, is_causal=is_causal, window=window)
    for result, reference in zip(own, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_size_of_a_row_is_that_of_the_terms_it_sums(is_causal):
    q, k, v, do = grouped_inputs(2, 3, 20)
    _, sizes = oracle(q, k, v, do, is_causal=is_causal)
    scores = q @ k.mT / math.sqrt(8)
    p = (scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf) if is_causal else scores).softmax(-1)
    norm = {name: tensor.norm(dim=-1) for name, tensor in zip(("q", "k", "v", "do"), (q, k, v, do), strict=True)}
    of_o = (p * norm["v"][..., None, :]).norm(dim=-1)  # the root of Σ_j (p_ij |v_j|)²
    dp, delta = norm["v"][..., None, :] * norm["do"][..., None], (of_o * norm["do"])[..., None]
    ds = p * torch.hypot(*torch.broadcast_tensors(dp, delta)) / 8  # two dot products over √8, and the scale 1/√8
    expected = (
        of_o,
        (ds * norm["k"][..., None, :]).norm(dim=-1),
        (ds * norm["q"][..., None]).norm(dim=(1, 3 - 1))[:, None],
        (p * norm["do"][..., None]).norm(dim=(1, 2))[:, None],
    )
    for own, reference in zip(sizes, expected, strict=True):
        torch.testing.assert_close(own.sqrt(), reference, rtol=1e-10, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements that a float64 tensor had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // 8)
        return result


def test_the_oracle_slices_the_rows_of_all_its_heads(monkeypatch):
    inputs = grouped_inputs(12, 2, 64)
    scores = 12 * 2 * 64 * 16  # sixteen rows of every head; the inputs have half as many elements
    whole = oracle(*inputs, is_causal=False)
    for at_once in (scores, 1):
        monkeypatch.setattr(module, "SCORES", at_once)
        with Largest() as largest:
            sliced = oracle(*inputs, is_causal=False)
        assert largest.elements == max(at_once, inputs[0].numel())
        for own, reference in zip((*sliced[0], *sliced[1]), (*whole[0], *whole[1]), strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-12, atol=1e-14)


@pytest.fixture
def plain_runs(monkeypatch):
    """Shapes of q that the plain formula is run on, which it is anew."""
    shapes = []
    monkeypatch.setattr(module, "attention_eager", lambda q, *rest: shapes.append(q.shape) or attention_eager(q, *rest))
    module._plain_errors.cache_clear()
    yield shapes
    module._plain_errors.cache_clear()


@pytest.mark.parametrize(("scores", "at_once"), [(64 * 64 * 8, 8), (64 * 64 * 4, 4), (64 * 64, 4)])
def test_the_plain_formula_has_as_many_scores_at_once_as_the_heads_of_one_group_at_least(
    monkeypatch, plain_runs, scores, at_once
):
    monkeypatch.setattr(module, "SCORES", scores)
    check(causal, (1, 8, 64, 4), torch.float32, CPU, is_causal=True, kv_heads=2)
    assert {shape[:-2].numel() for shape in plain_runs} == {at_once}


@pytest.mark.parametrize("is_causal", [True, False])
def test_memory_is_bounded_and_what_is_found_does_not_depend_on_it(is_causal, monkeypatch):
    shape = (2, 4, 96, 8)
    whole = check(RIGHT["sdpa, causal"].implementation, shape, torch.bfloat16, CPU, is_causal=is_causal)
    for scores in (96 * 96 * 3, 96 * 40):  # three heads at once; forty rows of one head
        monkeypatch.setattr(module, "SCORES", scores)
        with Largest() as largest:
            sliced = check(RIGHT["sdpa, causal"].implementation, shape, torch.bfloat16, CPU, is_causal=is_causal)
        assert errors_of(sliced) == pytest.approx(errors_of(whole), rel=1e-6, abs=1e-12)
        assert largest.elements <= max(scores, 3 * 96 * 8)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(name, precision):
    errors = WRONG[name].check(PRECISIONS[precision])
    assert not errors.is_right
    assert errors.nearest.share > 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name, precision):
    errors = RIGHT[name].check(PRECISIONS[precision])
    assert errors.is_right, errors.nearest
    assert set(errors.parts) == {f"{name} {each}" for name in NAMES for each in STATISTICS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_window_is_held_to_the_window(dtype):
    def through(window):
        return lambda q, k, v: attention_eager(q, k, v, Scoring(True, 1 / math.sqrt(q.shape[-1]), window))

    assert check(through(20), SHAPE, dtype, CPU, is_causal=True, window=20).is_right
    for wrong in (None, 19, 21):
        assert not check(through(wrong), SHAPE, dtype, CPU, is_causal=True, window=20).is_right


def test_float16_is_held_to_float16():
    assert check(causal, SHAPE, torch.float16, CPU, is_causal=True).is_right
    assert not check(lambda q, k, v: 1.003 * causal(q, k, v), SHAPE, torch.float16, CPU, is_causal=True).is_right


@pytest.mark.parametrize("shape", [(4, 32, 8), (2, 2, 32, 8), (1, 2, 2, 32, 8)])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_all_leading_dimensions_are_heads(shape, kv_heads):
    """The same numbers are drawn for each."""
    found = check(causal, shape, torch.float32, CPU, is_causal=True, kv_heads=kv_heads)
    assert found.is_right
    if kv_heads is None:
        flat = check(causal, (1, 4, 32, 8), torch.float32, CPU, is_causal=True)
        assert found == flat


def errors_of(found):
    """Key → error."""
    return {key: part.error for key, part in found.parts.items()}


def test_where_terms_cancel_an_error_is_relative_to_the_terms():
    """Rows of norm 0.1 that sum terms of size 1: of 2 heads, 3 heads each, of 5 rows."""
    size, reference = torch.ones(2, 3, 5), torch.zeros(2, 3, 5, 4)
    reference[..., 0] = 0.1
    found = dict(module._statistics(module._sums(1.2 * reference, reference, size)))
    assert found["row"] == pytest.approx(0.02)
    assert found["all"] == found["head"] == pytest.approx(0.02 / 0.5), "by no less than half of it, all together"
    assert found["scale"] == pytest.approx(0.2 * 0.01 / 0.25)
    found = dict(module._statistics(module._sums(1.2 * reference, reference, size / 10**4)))
    assert list(found.values()) == pytest.approx([0.2] * 4), "else to the norm"


def test_a_single_token_has_no_gradient_but_of_its_value():
    assert check(causal, (2, 1, 8), torch.float32, CPU, is_causal=True).is_right


@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, 4)])
def test_allowed_is_twice_the_plain_error_and_one_rounding(dtype, kv_heads):
    errors = check(causal, LARGE, dtype, CPU, is_causal=True, kv_heads=kv_heads)  # the plain formula, the same inputs
    u = one_rounding(dtype) / 2
    floors = {"all": 128**0.5, "scale": 128**0.5}  # float32 roundings, of 128 keys and of 16 features
    floors |= {"row": 160**0.5 * (1 + math.sqrt(math.log(4096) / 8))}
    floors |= {"head": 160**0.5 * (1 + math.sqrt(math.log(32) / 8))}
    for key, part in errors.parts.items():
        statistic, found = key.split()[1], part.error
        floor = 2**-24 * floors[statistic]
        rounding = max(u / 2, 2**-23) if statistic == "scale" else 2 * u
        assert part.allowed == pytest.approx(max(2 * found, floor) + rounding), key


def noisy(relative):
    """The right result with noise of this norm, of no direction and as much in every row."""

    def implementation(q, k, v):
        o = causal(q, k, v)
        noise = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)) * o.norm(dim=-1, keepdim=True)
        return o + (noise * (relative * o.norm() / noise.norm())).detach()

    return implementation


def test_noise_beyond_the_allowance_is_caught_in_the_norm():
    allowed = check(noisy(0), LARGE, torch.float32, CPU, is_causal=True).parts["o all"].allowed
    for relative, is_right in ((0.8, True), (1.3, False), (5, False)):
        errors = check(noisy(relative * allowed), LARGE, torch.float32, CPU, is_causal=True)
        assert errors.parts["o all"].is_right == is_right, relative


def test_each_statistic_is_the_error_it_is_named_after():
    found = errors_of(WRONG["o scaled by 1.01 in one head"].check(torch.float32))
    assert found["o head"] == pytest.approx(0.01, rel=1e-3)
    assert found["o scale"] == pytest.approx(0.01, rel=1e-3)
    assert found["o all"] == pytest.approx(0.01 / math.sqrt(8), rel=0.2)  # one head of eight
    assert found["dq all"] < 1e-6
    row = errors_of(WRONG["a row of o zero"].check(torch.float32))
    assert 0.7 < row["o row"] <= 1
    assert row["o scale"] == pytest.approx(1 / 128, rel=0.3), "one row of 128, each counting alike"
    assert row["o all"] < 0.05


def test_not_a_number_is_the_nearest_to_its_allowance():
    errors = WRONG["NaN in one element"].check(torch.float32)
    assert errors.nearest.name.startswith("o ")
    assert errors.nearest.share == math.inf


def test_where_the_plain_formula_does_not_fit_a_shorter_length_sets_the_budget(monkeypatch, plain_runs):
    formula = module.attention_eager

    def eager(q, *rest):
        o = formula(q, *rest)
        if q.shape[-2] > 40:
            raise torch.OutOfMemoryError
        return o

    monkeypatch.setattr(module, "attention_eager", eager)
    monkeypatch.setattr(module, "BUDGET_LENGTH", 80)
    assert check(causal, (1, 2, 200, 16), torch.bfloat16, CPU, is_causal=True).is_right
    assert [each[-2] for each in plain_runs] == [80, 40]


def test_the_error_in_all_is_that_of_the_norm():
    errors = check(lambda q, k, v: causal(1.5 * q, k, v), SHAPE, torch.float32, CPU, is_causal=True)
    q, k, v, do = (tensor.detach().double() for tensor in module.random_inputs(SHAPE, torch.float32, CPU, seed=1))

    def dq_of(factor):
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(causal(factor * leaf, k, v), leaf, do)[0]

    expected = float((dq_of(1.5) - dq_of(1)).norm() / dq_of(1).norm())
    assert errors.parts["dq all"].error == pytest.approx(expected, rel=1e-5)


def test_the_plain_formula_shows_its_extremes_on_thousands_of_rows(plain_runs):
    for shape, rows in (((1, 1, 50, 16), 4096), ((3, 60, 50, 16), 4096 + 3 * 60 * 50)):
        check(causal, shape, torch.float32, CPU, is_causal=True)
        assert sum(each[:-1].numel() for each in plain_runs) >= rows, "no fewer than the implementation's own"
