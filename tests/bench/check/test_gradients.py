"""How far gradients are from a reference: per parameter, per row and by their scale, beside what rounding does."""

import math

import pytest
import torch
from torch import nn

from trainstep.bench.check.gradients import Gradients, Rounding, compare
from trainstep.errors import UsageError

ROUNDING = 2.0**-7


def drawn(seed=0, loss=2.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (40, 50), "vector": (50,), "one": ()}
    return Gradients(loss, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


def changed(gradients, name, change, loss=None):
    by_name = dict(gradients.by_name)
    by_name[name] = change(by_name[name].clone())
    return Gradients(gradients.loss if loss is None else loss, by_name)


def noisy(gradients, size=0.01, seed=1):
    noise = drawn(seed).by_name
    return Gradients(gradients.loss * (1 + size / 10), {k: v + size * noise[k] for k, v in gradients.by_name.items()})


PLAIN = Rounding.most(Rounding.between(noisy(drawn(), seed=seed), drawn()) for seed in (1, 2, 3))


def test_a_known_error():
    found = compare(changed(drawn(), "vector", lambda g: 1.1 * g, loss=2.02), drawn(), Rounding(), 1e-9)
    assert found.loss == pytest.approx(0.01)
    assert (found.worst, found.worst_name) == (pytest.approx(0.1, rel=1e-5), "vector")
    vector, every = (float(torch.cat(parts).norm()) for parts in (
        [drawn().by_name["vector"]], [each.flatten() for each in drawn().by_name.values()]
    ))  # fmt: skip
    assert found.gradient == pytest.approx(0.1 * vector / every, rel=1e-5)
    assert found.scale == pytest.approx(0.1 * (vector / every) ** 2, rel=1e-5)


@pytest.mark.parametrize("seed", range(10, 20))
def test_what_rounding_does_is_allowed(seed):
    assert compare(noisy(drawn(), seed=seed), drawn(), PLAIN, ROUNDING).is_right


@pytest.mark.parametrize(
    "change",
    [
        lambda g: changed(g, "matrix", lambda m: 1.04 * m),
        lambda g: changed(g, "vector", lambda v: 1.08 * v),
        lambda g: changed(g, "one", lambda o: 1.5 * o),
        lambda g: changed(g, "matrix", lambda m: m.index_fill(0, torch.tensor(7), 0.0)),
        lambda g: changed(g, "matrix", lambda m: m.index_fill(0, torch.tensor(7), math.nan)),
        lambda g: changed(g, "one", lambda o: o, loss=2.4),
        lambda g: changed(g, "one", lambda o: o, loss=math.nan),
        lambda g: Gradients(g.loss, {name: 1.02 * each for name, each in g.by_name.items()}),
        lambda g: Gradients(g.loss, {name: each for name, each in g.by_name.items() if name != "vector"}),
        lambda g: Gradients(g.loss, dict(g.by_name) | {"more": torch.ones(3)}),
    ],
    ids=["matrix", "vector", "one", "row", "NaN", "loss", "NaN loss", "scale", "missing", "more"],
)
def test_what_rounding_does_not_explain_is_wrong(change):
    found = compare(change(noisy(drawn(), seed=4)), drawn(), PLAIN, ROUNDING)
    assert not found.is_right
    assert "of" in str(found)


def test_each_statistic_decides_alone():
    """A row that the matrix's norm hides, and a scale that every norm hides."""
    row = compare(changed(drawn(), "matrix", lambda m: m.index_fill(0, torch.tensor(7), 0.0)), drawn(), PLAIN, 0.3)
    assert row.gradient <= row.gradient_allowed
    assert row.worst_name == "row 7 of matrix"
    assert row.worst == pytest.approx(1, rel=0.3)
    scale = compare(Gradients(2.0, {k: 1.02 * v for k, v in drawn().by_name.items()}), drawn(), PLAIN, ROUNDING)
    assert scale.worst <= scale.worst_allowed
    assert scale.gradient <= scale.gradient_allowed
    assert scale.scale == pytest.approx(0.02, rel=1e-4)
    assert scale.scale > scale.scale_allowed
    assert not scale.is_right


@pytest.mark.parametrize(("factor", "is_right"), [(0.9, True), (1.1, False)])
def test_twice_the_plain_error_plus_one_rounding(factor, is_right):
    """For a large parameter; the error has a direction of its own, so that the scale stays."""
    reference = Gradients(1.0, {"w": torch.ones(1, 10**6)})
    turned = torch.ones(1, 10**6)
    turned[:, ::2] = -1
    plain = Rounding.between(Gradients(1.0, {"w": reference.by_name["w"] + 0.01 * turned}), reference)
    found = Gradients(1.0, {"w": reference.by_name["w"] + factor * (2 * 0.01 + ROUNDING) * turned})
    assert compare(found, reference, plain, ROUNDING).is_right is is_right


def test_few_elements_may_be_off_by_more_than_many():
    def share(count):  # of an error twice the plain one
        reference = Gradients(1.0, {"w": torch.ones(count)})
        plain = Rounding.between(Gradients(1.0, {"w": 1.01 * reference.by_name["w"]}), reference)
        return compare(Gradients(1.0, {"w": 1.02 * reference.by_name["w"]}), reference, plain, 0.0).worst_allowed / 0.01

    assert share(1) == pytest.approx(2 * (1 + 4 / math.sqrt(2)), rel=1e-3)
    assert share(10**6) == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("rounding", [1e-6, 1e-2])
def test_a_gradient_that_cancels_to_zero_is_only_rounding(rounding):
    """A key projection's bias: softmax does not feel it, so its gradient is whatever the sum's rounding leaves."""
    reference = changed(drawn(), "vector", lambda v: v.fill_(1e-30))
    typical = math.sqrt(
        sum(float(each.square().sum()) for each in reference.by_name.values())
        / sum(each.numel() for each in reference.by_name.values())
    )
    for error, is_right in ((0.9 * rounding, True), (1.1 * rounding, False)):
        found = changed(reference, "vector", lambda v, error=error: v.fill_(error * rounding * typical))
        assert compare(found, reference, Rounding(), rounding).is_right is is_right


def test_gradients_are_taken_off_the_module_and_sparse_ones_are_dense():
    module = nn.Embedding(10, 4, sparse=True)
    module(torch.tensor([1, 1, 3])).square().sum().backward()
    expected = module.weight.grad.to_dense()
    taken = Gradients.of(torch.tensor(1.0), module)
    assert module.weight.grad is None
    assert torch.equal(taken.by_name["weight"], expected)


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_is_no_reference(loss, gradient):
    with pytest.raises(UsageError, match=r"in fp32, the loss of the first batch is .*look at the batch"):
        Gradients(loss, {"w": torch.tensor([gradient])}).check_finite("fp32")
