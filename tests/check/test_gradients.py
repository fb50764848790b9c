"""How far gradients are from a reference: per parameter, per row and by their scale, beside what rounding does."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from trainstep.base.errors import UsageError
from trainstep.base.tolerance import VACUOUS, one_rounding
from trainstep.check.gradients import Error, Gradients, Rounding, compare
from trainstep.check.verdict import Deviation

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


def test_a_loss_of_float32_is_known_to_a_few_of_its_last_places():
    """Where the plain loss is off by nothing, rounding of the number itself still is."""
    for places, is_right in ((2, True), (8, False)):
        found = dataclasses.replace(drawn(), loss=2.0 + places * 2.0**-22)
        assert compare(found, drawn(), Rounding(), one_rounding("fp32")).is_right is is_right


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


ONES = Gradients(4.0, {"m": torch.ones(100, 8), "v": torch.ones(8)})
"""‖m‖² is 800, ‖v‖² and that of a row 8."""


def plain_of(matrix=0.5, rows=0.05, row=0.05):
    """What the plain computation is off by: in all rows of the matrix alike but one."""
    by_row = torch.full((100,), rows).index_fill(0, torch.tensor(3), row)
    return Rounding(0.1, 0.01, {"m": Error(matrix, by_row), "v": Error(0.03, torch.tensor([0.03]))})


def off(name, place, error):
    """`ONES` but for one element."""
    return changed(ONES, name, lambda gradient: gradient.index_put_(place, torch.tensor(1 + error)))


def test_what_is_allowed_is_twice_the_plain_error_its_headroom_and_one_rounding():
    found = compare(ONES, ONES, plain_of(), 1e-3)
    assert (found.loss, found.gradient, found.scale, found.worst, found.worst_name) == (0, 0, 0, 0, "")
    one = 1 + 4 / math.sqrt(2)
    assert found.loss_allowed == pytest.approx(2 * one * 0.1 / 4 + 1e-3)
    assert found.gradient_allowed == pytest.approx(2 * math.hypot(0.5, 0.03) / math.sqrt(808) + 1e-3)
    assert found.scale_allowed == pytest.approx(2 * one * 0.01 + 0.5e-3)
    found = compare(off("v", (torch.tensor(2),), 0.2), ONES, plain_of(), 1e-3)
    assert (found.worst_name, found.worst) == ("v", pytest.approx(0.2 / math.sqrt(8)))
    assert found.worst_allowed == pytest.approx(2 * (1 + 4 / math.sqrt(16)) * 0.03 / math.sqrt(8) + 1e-3)
    assert compare(found=Gradients(0.5, {}), reference=Gradients(0.0, {}), plain=Rounding(), rounding=0.0).loss == 0.5


@pytest.mark.parametrize(("row", "usual"), [(0.08, 0.08), (0.05, 0.05), (0.01, 0.05)])
def test_a_row_may_be_off_by_twice_what_the_worst_row_or_the_whole_is(row, usual):
    """Of 8 elements: the norm of 800 hides an error in it; 0.5 in all is 0.05 a row."""
    place = torch.tensor(7), torch.tensor(0)
    found = compare(off("m", place, 0.7), ONES, plain_of(rows=0.01, row=row), 1e-3)
    assert (found.worst_name, found.worst) == ("row 7 of m", pytest.approx(0.7 / math.sqrt(8)))
    assert found.worst_allowed == pytest.approx(2 * 2 * (1 + 4 / math.sqrt(16)) * usual / math.sqrt(8) + 1e-3)


def test_rows_are_held_against_their_own_size_but_no_less_than_a_typical_one():
    sizes = torch.ones(100, 8).index_fill(0, torch.tensor([1]), 10.0).index_fill(0, torch.tensor([2]), 0.0)
    reference = Gradients(1.0, {"m": sizes})
    plain = Rounding(by_name={"m": Error(0.0, torch.zeros(100))})
    norm = float(sizes.norm())

    def held(*errors):
        by_row = sizes.clone()
        for row, error in errors:
            by_row[row, 0] += error
        return compare(Gradients(1.0, {"m": by_row}), reference, plain, 0.1)

    assert held((1, 2.0), (5, 1.0)).worst_name == "row 5 of m", "a tenth as large"
    assert held((1, 2.0)).worst == pytest.approx(2 / (10 * math.sqrt(8)))
    assert held((2, 2.0)).worst == pytest.approx(2 / (norm / 10)), "of a row of zeros"


def test_what_uses_most_of_its_allowance_is_the_worst_not_what_is_off_most():
    found = changed(off("v", (torch.tensor(2),), 0.2), "m", lambda m: m * 1.1)
    assert compare(found, ONES, plain_of(matrix=5.0, rows=0.5, row=0.5), 1e-3).worst_name == "v"
    assert compare(found, ONES, plain_of(), 1e-3).worst_name == "m"


def test_rows_of_one_element_and_two_rows_are_judged_by_row_too():
    for rows, columns in ((2, 8), (100, 1)):
        reference = Gradients(1.0, {"m": torch.ones(rows, columns)})
        plain = Rounding(by_name={"m": Error(0.0, torch.zeros(rows))})
        for share, is_right in ((0.9, True), (1.1, False)):
            wrong = torch.ones(rows, columns)
            wrong[1, 0] += share * 0.1 * math.sqrt(columns)
            found = compare(Gradients(1.0, {"m": wrong}), reference, plain, 0.1)
            assert found.gradient <= found.gradient_allowed
            assert found.is_right is is_right
    assert ONES.rows["v"].shape == (1,)
    assert ONES.rows["m"].shape == (100,)


def test_a_gradient_on_one_side_alone_is_off_by_all_of_it():
    without = Gradients(4.0, {"m": ONES.by_name["m"]})
    found = compare(without, ONES, plain_of(), 1e-3)
    assert (found.worst, found.worst_allowed, found.worst_name) == (1.0, 0.0, "v")
    assert (found.gradient, found.scale) == (pytest.approx(math.sqrt(8 / 808)), pytest.approx(8 / 808))
    more = Gradients(4.0, dict(ONES.by_name) | {"x": torch.full((4,), 3.0)})
    found = compare(more, ONES, plain_of(), 1e-3)
    assert (found.worst, found.worst_allowed, found.worst_name) == (1.0, 0.0, "x")
    assert (found.gradient, found.scale) == (pytest.approx(6 / math.sqrt(808)), 0.0)
    assert not found.is_right
    larger = compare(changed(without, "m", lambda m: 1.1 * m), ONES, plain_of(), 1e-3)
    assert larger.scale == pytest.approx((80 - 8) / 808, rel=1e-4), "one is too large, and one is missing"


def test_where_nothing_is_allowed_what_is_exact_is_right():
    assert compare(ONES, ONES, Rounding(), 0.0).is_right
    found = compare(off("v", (torch.tensor(2),), 1e-3), ONES, Rounding(), 0.0)
    assert (found.worst, found.worst_allowed, found.worst_name) == (math.inf, 0.0, "v")


def test_the_most_of_several_roundings_and_several_times_one():
    a = Rounding(0.5, 0.2, {"m": Error(3.0, torch.tensor([1.0, 4.0]))})
    b = Rounding(2.0, 0.1, {"m": Error(2.0, torch.tensor([2.0, 3.0])), "v": Error(1.0, torch.tensor([1.0]))})
    for order in ([a, b], [b, a]):
        most = Rounding.most(order)
        assert (most.loss, most.scale, most.by_name["m"].norm) == (2.0, 0.2, 3.0)
        assert most.by_name["m"].rows.tolist() == [2.0, 4.0]
        assert most.by_name["v"].norm == 1.0
    both = a.plus(b)
    assert (both.loss, both.scale, both.by_name["m"].norm, both.by_name["v"].norm) == (
        2.5,
        pytest.approx(0.3),
        5.0,
        1.0,
    )
    assert both.by_name["m"].rows.tolist() == [3.0, 7.0]
    four = a.times(4)
    assert (four.loss, four.scale, four.by_name["m"].norm) == (2.0, 0.8, 12.0)
    assert four.by_name["m"].rows.tolist() == [4.0, 16.0]


def test_a_gradient_that_only_one_has_is_no_rounding():
    without = Gradients(4.5, {"m": 1.5 * ONES.by_name["m"]})
    for one, other in ((without, ONES), (ONES, without)):
        found = Rounding.between(one, other)
        assert list(found.by_name) == ["m"]
        assert found.loss == 0.5
    assert Rounding.between(without, ONES).scale == pytest.approx(400 / 808)


def deviation(**change):
    names = ("loss", "loss_allowed", "gradient", "gradient_allowed", "scale", "scale_allowed", "worst", "worst_allowed")
    return Deviation(**(dict.fromkeys(names, 0.012345) | {"worst_name": "row 7 of m"} | change))


@pytest.mark.parametrize(
    ("name", "said"),
    [("loss", "the loss"), ("gradient", "the gradients"), ("scale", "their scale"), ("worst", "row 7 of m")],
)
def test_what_is_off_by_more_than_is_allowed_is_told_alone(name, said):
    assert deviation().is_right, "as much as is allowed"
    for wrong in (0.056789, math.nan):
        found = deviation(**{name: wrong})
        assert not found.is_right
        assert str(found) == f"{said} off by {wrong:.2g} of 0.012"


def test_a_right_deviation_tells_all_of_it():
    four = ("the loss", "the gradients", "their scale", "row 7 of m")
    assert str(deviation()) == ", ".join(f"{name} off by 0.012 of 0.012" for name in four)
    assert str(deviation(worst_name="")).endswith("their scale off by 0.012 of 0.012"), "nothing is off at all"


def test_the_worst_of_several_is_wrong_or_says_nothing_or_is_nearest_to_its_allowance():
    """Whatever else is off: of two wrong ones, and of two right ones, the one that uses more."""
    ordered = [
        deviation(worst=0.0, worst_allowed=0.0),
        deviation(worst=0.5, worst_allowed=1.0),
        deviation(worst=0.3, worst_allowed=0.4),
        deviation(worst=0.0, gradient_allowed=VACUOUS),
        deviation(worst=0.0, loss=1.0),
        deviation(worst=0.002, worst_allowed=0.001),
        deviation(worst=3.0, worst_allowed=0.0),
    ]
    assert sorted([*reversed(ordered)], key=lambda each: each.severity) == ordered
    assert ordered[-1].severity == (True, False, 3.0)
    assert deviation(gradient_allowed=math.nan).is_vacuous


@pytest.mark.parametrize("rounding", [1e-6, 1e-2])
def test_a_matrix_that_cancels_to_zero_is_only_rounding_in_every_row(rounding):
    reference = Gradients(1.0, {"m": torch.full((100, 8), 1e-30), "v": torch.full((8,), 1e3)})
    typical = 1e3 * math.sqrt(8 / 808)
    plain = Rounding(by_name={"m": Error(0.0, torch.zeros(100))})
    for error, is_right in ((0.9, True), (1.1, False)):
        wrong = torch.full((100, 8), 1e-30)
        wrong[7] = error * rounding * rounding * typical
        found = compare(changed(reference, "m", lambda m, wrong=wrong: wrong), reference, plain, rounding)
        assert found.is_right is is_right
        assert found.worst_name == "row 7 of m"


def test_gradients_are_taken_off_the_module_and_sparse_ones_are_dense():
    module = nn.Embedding(10, 4, sparse=True)
    module(torch.tensor([1, 1, 3])).square().sum().backward()
    expected = module.weight.grad.to_dense()
    taken = Gradients.of(torch.tensor(1.0), module)
    assert module.weight.grad is None
    assert torch.equal(taken.by_name["weight"], expected)


def test_a_sketch_has_a_product_with_random_signs_for_each_row_and_vectors_as_they_are():
    signs = Gradients(1.0, {"m": torch.eye(50)}).sketched().by_name["m"]
    assert set(signs.tolist()) == {-1.0, 1.0}
    found, given = drawn().sketched().by_name, drawn().by_name
    assert torch.equal(found["matrix"], given["matrix"] @ signs)
    assert all(torch.equal(found[name], given[name]) for name in ("vector", "one"))


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_is_no_reference(loss, gradient):
    with pytest.raises(UsageError, match=r"in fp32, the loss of the first batch is .*look at the batch"):
        Gradients(loss, {"w": torch.tensor([gradient])}).check_finite("fp32")


def test_the_first_gradient_that_is_not_finite_is_named():
    right, wrong = torch.ones(3), torch.tensor([1.0, math.nan])
    with pytest.raises(UsageError, match=r"is 1, the gradient of b is not finite"):
        Gradients(1.0, {"a": right, "b": wrong, "c": wrong}).check_finite("fp32")
    with pytest.raises(UsageError, match=r"the loss of the first batch is nan: there is nothing"):
        Gradients(math.nan, {"a": right}).check_finite("fp32")
    Gradients(1.0, {"a": right}).check_finite("fp32")


def test_rounding_relative_to_gradients_is_a_quotient_of_norms():
    """Errors of norms 3 and 4 are one of 5, of gradients of norm 10 a half; of no gradients it stays as it is."""
    errors = Rounding(by_name={"a": Error(3.0, torch.tensor([3.0])), "b": Error(4.0, torch.tensor([4.0]))})
    gradients = Gradients(1.0, {"a": torch.tensor([6.0]), "b": torch.tensor([8.0])})
    assert errors.relative(gradients) == pytest.approx(0.5)
    assert errors.relative(Gradients(1.0, {"a": torch.zeros(1), "b": torch.zeros(1)})) == pytest.approx(5.0)


def test_rounding_that_makes_a_gradient_no_number_allows_any():
    plain = torch.linspace(0.5, 1.5, 12).view(3, 4)
    shaken = (Gradients(1.0, {"a": by * plain}) for by in (2.0, math.nan, math.inf))
    usual = Rounding.most(Rounding.between(each, Gradients(1.0, {"a": plain})) for each in shaken)
    assert usual.scale == usual.by_name["a"].norm == math.inf
    assert usual.by_name["a"].rows.isposinf().all()


def test_a_fault_is_what_is_said_though_every_number_is_right():
    found = compare(drawn(), drawn(), Rounding(), 1e-9)
    assert found.is_right
    faulty = dataclasses.replace(found, fault="drops from nothing")
    assert not faulty.is_right
    assert str(faulty) == "drops from nothing"
