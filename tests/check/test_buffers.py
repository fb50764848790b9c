"""How far a module's buffers are from the reference's, and what they may be off by."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from trainstep.check.buffers import NO_BUFFERS, Apart, Buffers, Watched, apart, joined, unlike
from trainstep.check.gradients import Gradients, Rounding, compare


class Plain(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


def after(change, **buffers):
    """What a pass that is `change(module)` makes of these."""
    module = Plain(**{name: value.clone() for name, value in buffers.items()})
    watched = Watched(module, on_host=True)
    change(module)
    return watched.changes()


def adds(amount):
    return lambda module: [value.add_(amount) for value in module.buffers()]


def only(found):
    ((_, each),) = found
    return each


def test_what_is_watched():
    def change(module):
        module.a.add_(1)
        module.b.copy_(module.b)
        module.c = torch.zeros(5)
        module.d = module.d.double()
        module.register_buffer("e", torch.zeros(2))

    found = after(change, a=torch.zeros(2), b=torch.tensor([math.nan, 1.0]), c=torch.zeros(4), d=torch.zeros(1))
    assert found.after.keys() == found.before.keys() == {"a"}
    assert torch.equal(found.before["a"], torch.zeros(2))
    assert torch.equal(found.after["a"], torch.ones(2))
    assert found.unchanged == {"b"}
    assert found.modules == {""}
    left = found.without({"a"})
    assert (left.before, left.after, left.unchanged) == ({}, {}, {"a", "b"})


def test_how_far_one_is_from_another():
    start = torch.full((4,), 10.0)
    assert only(apart(after(adds(3), a=start), after(adds(1), a=start))) == Apart(4.0, 2.0, 4, 2**-23 * 22, 22.0)
    still = only(apart(after(adds(0), a=start), after(adds(1), a=start)))
    assert (still.error, still.change) == (2.0, 2.0)
    assert [*apart(after(adds(1), a=start), after(adds(0), a=start))] == [], "the reference leaves it alone"
    assert [*apart(NO_BUFFERS, after(adds(1), a=start))] == [], "no such module"
    assert only(apart(after(adds(1), b=start), after(adds(1), a=start))).error == math.inf, "it should be there"
    longer = only(apart(after(adds(1), a=torch.zeros(5)), after(adds(1), a=start)))
    assert longer.error == math.inf
    narrow = only(apart(after(adds(1), a=start.bfloat16()), after(adds(1), a=start.double())))
    assert (narrow.error, narrow.stored) == (0.0, 2**-7 * 22)


def test_roundings_of_the_change_and_of_the_value():
    start = torch.full((4,), 10.0)
    found = only(apart(after(adds(1), a=start), after(adds(1), a=start)))
    assert found.rounded(0.25) == 0.25 * 2 + 2**-23 * 22 + 1e-5 * 22
    assert only(apart(after(adds(1), a=start.long()), after(adds(1), a=start.long()))).rounded(0.25) == 0.0


@pytest.mark.parametrize(("size", "is_right"), [(30.0, True), (0.01, False)])
def test_sums_in_another_order_are_judged_by_the_modules_largest_buffer(size, is_right):
    """A mean of about zero beside a variance, as after a linear layer of what was normalised."""

    def moved(mean, variance):
        module = nn.ModuleDict(
            {"norm": Plain(mean=torch.zeros(4), count=torch.tensor(0)), "other": Plain(b=torch.ones(4))}
        )
        module["norm"].register_buffer("variance", torch.zeros(2))
        watched = Watched(module, on_host=True)
        module["norm"].mean.fill_(mean)
        module["norm"].variance.fill_(variance)
        module["norm"].count.add_(1_000_000)
        module["other"].b.add_(1e9)
        return Gradients(1.0, {"w": torch.ones(2)}, watched.changes())

    deviation = compare(moved(2e-7, size), moved(1e-9, size), Rounding(), 1e-7)
    assert deviation.is_right is is_right
    assert deviation.worst_name == "buffer norm.mean"


def test_what_is_no_plain_tensor_is_left_alone():
    odd = {
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "meta": torch.ones(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
    }
    assert after(adds(1), a=torch.tensor([1j, 2.0]).conj()).after.keys() == {"a"}
    module = Plain(**odd)
    watched = Watched(module, on_host=True)
    assert watched.changes() == Buffers({}, {}, frozenset(), frozenset())


def test_what_is_not_finite():
    start = torch.tensor([math.inf, -math.inf, math.nan, 0.0])

    def to(*values):
        return after(lambda module: module.a.copy_(torch.tensor(values)), a=start)

    found = only(apart(to(3.0, 0.0, 0.0, 5.0), to(3.0, 4.0, 0.0, math.inf)))
    assert (found.error, found.change) == (4.0, 5.0)
    assert math.isnan(only(apart(to(3.0, math.nan, 0.0, 0.0), to(3.0, 4.0, 0.0, 0.0))).error)


@pytest.mark.parametrize(
    ("own", "usual", "is_right"),
    [(1, 0.0, True), (2, 0.0, False), (0, 0.0, False), (2, 1.0, True), (9, 1.0, False), (2, math.inf, True)],
)
def test_whole_numbers_are_equal_unless_roundings_change_them(own, usual, is_right):
    start = torch.tensor(1000)
    expected, found = (Gradients(1.0, {"w": torch.ones(2)}, after(adds(amount), a=start)) for amount in (1, own))
    deviation = compare(found, expected, Rounding(buffers={"a": usual}), 0.5)
    assert deviation.is_right is is_right
    if own != 1 and usual == 0:
        assert str(deviation) == "buffer a off by inf of 0"


@pytest.mark.parametrize(("off", "is_right"), [(0.0104, True), (0.0106, False), (math.nan, False)])
def test_a_budget_is_twice_the_plain_error_and_roundings(off, is_right):
    """Of 10,000 elements that move by 1."""
    many = torch.full((10_000,), 1e3 / 3 - 1)
    both = Rounding(buffers={"a": 0.2}), Rounding(buffers={"a": 0.3})
    expected = Gradients(1.0, {"w": torch.ones(2)}, after(adds(1), a=many.double()))
    moved = {"a": (many.double() + 1 + off)}
    found = Gradients(1.0, {"w": torch.ones(2)}, dataclasses.replace(expected.buffers, after=moved))
    stored = 2 * (1 + 4 / math.sqrt(20_000)) * 0.3 + 1e-3 * 100 + (2.0**-52 + 1e-5) * 1e3 / 3 * 100
    assert Rounding.most(both).buffers == {"a": 0.3}
    assert Rounding.most(both[::-1]).buffers == {"a": 0.3}
    deviation = compare(found, expected, Rounding.most(both), 1e-3)
    assert deviation.worst_allowed == pytest.approx(stored / 100)
    assert deviation.worst_name == "buffer a"
    assert deviation.is_right is (100 * off <= stored)


def test_the_error_of_what_changed_by_nothing_is_absolute():
    """From −0 to 0."""
    pair = [after(lambda m, to=to: m.a.copy_(torch.tensor([to])), a=torch.tensor([-0.0])) for to in (0.0, 0.5)]
    expected, found = (Gradients(1.0, {"w": torch.ones(2)}, each) for each in pair)
    assert compare(found, expected, Rounding(buffers={"a": 0.01}), 1e-3).worst == 0.5


def test_roundings_add_up_and_grow():
    one, other = Rounding(buffers={"a": 1.0, "b": 2.0}), Rounding(buffers={"b": 3.0, "c": 4.0})
    assert one.plus(other).buffers == {"a": 1.0, "b": 5.0, "c": 4.0}
    assert one.times(6).buffers == {"a": 6.0, "b": 12.0}
    assert Rounding.most([one, Rounding(buffers={"a": math.nan})]).buffers == {"a": math.inf, "b": 2.0}


def test_buffers_that_two_passes_make_alike():
    start = torch.zeros(4)
    first = after(adds(1), a=start, b=torch.zeros(4, dtype=torch.int64))
    assert unlike(first, first, 1e-3) == frozenset()
    near = dataclasses.replace(first, after={"a": first.after["a"] + 9e-4, "b": first.after["b"]})
    assert unlike(first, near, 1e-3) == frozenset()
    far = dataclasses.replace(first, after={"a": first.after["a"] + 2e-3, "b": first.after["b"] + 1})
    assert unlike(first, far, 1e-3) == {"a", "b"}
    assert unlike(first, Buffers({}, {}, frozenset(), first.modules), 1e-3) == {"a", "b"}
    broken = {"a": first.after["a"] * math.nan, "b": first.after["b"]}
    assert unlike(first, dataclasses.replace(first, after=broken), 1e-3) == {"a"}


def test_what_is_watched_may_be_small_on_the_host_and_called_otherwise():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(5))
    watched = Watched(module, 4, on_host=True, called=lambda name: f"model 2.{name}")
    module[0](torch.randn(8, 4))
    found = watched.changes()
    names = {f"model 2.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert found.after.keys() == names
    assert found.unchanged == {"model 2.1.num_batches_tracked"}, "the other two are larger"
    assert found.modules == {"model 2.0", "model 2.1"}


def test_several_modules_are_joined():
    changed = []
    for name in ("a", "b"):
        module = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "other": nn.BatchNorm1d(3)})
        watched = Watched(module, on_host=True, called=lambda each, name=name: f"{name}.{each}")
        module["norm"](torch.randn(8, 3))
        changed.append(watched.changes())
    found = joined(changed)
    assert found.before == {**changed[0].before, **changed[1].before}
    assert found.after == {**changed[0].after, **changed[1].after}
    assert len(found.after) == len(found.unchanged) == 6
    assert found.modules == {"a.norm", "a.other", "b.norm", "b.other"}
    assert joined([]) == NO_BUFFERS
