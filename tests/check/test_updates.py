"""Updates from equal gradients: what differs by rounding alone is right, what differs otherwise is not."""

import math

import pytest
import torch

from trainstep.check.updates import UPDATES, compare_updates, take_updates
from trainstep.check.verdict import Part
from trainstep.checkpointing.updating import UpdatesInBackward

GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = {"matrix": torch.randn(30, 20, generator=GENERATOR), "gain": torch.ones(20)}
GRADIENTS = [{name: torch.randn(value.shape, generator=GENERATOR) for name, value in WEIGHTS.items()} for _ in range(2)]
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}


def moved(make, gradients=GRADIENTS, **options):
    named = {name: torch.nn.Parameter(value.clone()) for name, value in WEIGHTS.items()}
    return take_updates(make(list(named.values()), **options), named.items(), gradients)


def held(found, expected=None, unit=2.0**-24):
    sizes = {name: float(value.norm()) for name, value in WEIGHTS.items()}
    return compare_updates(found, expected or moved(torch.optim.AdamW, **OPTIONS), sizes, unit)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": True}, {"foreach": False}, {"capturable": False}], ids=str
)
def test_the_forms_of_one_optimizer_agree(options):
    assert held(moved(torch.optim.AdamW, **OPTIONS, **options)).is_right


@pytest.mark.parametrize(
    "change",
    [{"lr": 1.001e-3}, {"weight_decay": 0.0}, {"betas": (0.9, 0.99)}, {"betas": (0.89, 0.999)}, {"maximize": True},
     {"eps": 1e-3}, {"amsgrad": True, "lr": 0.9e-3}],
    ids=str,
)  # fmt: skip
def test_another_setting_is_another_optimizer(change):
    assert not held(moved(torch.optim.AdamW, **(OPTIONS | change))).is_right


def test_gradients_come_in_the_strides_of_their_parameter():
    """As autograd makes them; a fused optimizer takes both for alike, and would mix up their elements."""
    named = {name: torch.nn.Parameter(value.clone()) for name, value in WEIGHTS.items()}
    named["matrix"].data = WEIGHTS["matrix"].T.contiguous().T
    found = take_updates(torch.optim.AdamW(named.values(), fused=True, **OPTIONS), named.items(), GRADIENTS)
    assert held(found).is_right


def test_updates_in_backward_are_made_in_a_backward_pass_of_these_gradients():
    """To the bit those of updates after backward, of each parameter that has a gradient, and of no other."""
    backward = []

    class Watched(UpdatesInBackward):
        def update(self, parameters):
            backward.append([each.grad.clone() for each in parameters])
            super().update(parameters)

    some = [{"matrix": each["matrix"]} for each in GRADIENTS]
    for gradients, of_each in ((GRADIENTS, 2), (some, 1)):
        backward.clear()
        named = {name: torch.nn.Parameter(value.clone()) for name, value in WEIGHTS.items()}
        module = torch.nn.ParameterDict(named)
        optimizer = torch.optim.AdamW(named.values(), **OPTIONS)
        updates = Watched(module, optimizer)
        found = take_updates(optimizer, named.items(), gradients, in_backward=updates)
        expected = moved(torch.optim.AdamW, gradients, **OPTIONS)
        assert all(torch.equal(found[name], each) for name, each in expected.items())
        assert len(backward) == UPDATES * of_each
        assert {tuple(each.shape) for (each,) in backward[:of_each]} == {
            tuple(each.shape) for each in gradients[0].values()
        }
        assert all(any(torch.equal(own, each) for each in gradients[0].values()) for (own,) in backward[:of_each])
        assert all(torch.equal(named[name], each) for name, each in WEIGHTS.items()), "put back"


def test_the_second_update_is_among_them():
    """With equal gradients in all updates Adam's second moment has no say."""
    once = GRADIENTS[:1]
    other = moved(torch.optim.AdamW, once, **(OPTIONS | {"betas": (0.9, 0.99)}))
    assert held(other, moved(torch.optim.AdamW, once, **OPTIONS)).is_right


@pytest.mark.parametrize("unit", [2.0**-24, 2.0**-8])
def test_allowed_are_the_roundings_of_the_weights_and_the_digits_that_bias_correction_loses(unit):
    """A weight of norm 2 that moves by 0.5 is rounded in every update on both sides; 1 − 0.999 keeps ten bits less."""
    moved, sizes = {"w": torch.tensor([0.3, 0.4]), "still": torch.zeros(2)}, {"w": 2.0, "still": 0.0}
    found = compare_updates(moved | {"w": torch.tensor([0.3, 0.5])}, moved, sizes, unit)
    assert (found.name, found.error) == ("w", pytest.approx(0.2))
    assert found.allowed == pytest.approx((2 * UPDATES * unit * 2.5 + 2 * 2**-14 * 0.5) / 0.5)
    assert found.share == pytest.approx(0.2 / found.allowed)
    idle = compare_updates(moved | {"still": torch.tensor([0.0, 1e-3])}, moved, sizes, unit)
    assert (idle.name, idle.error, idle.allowed, idle.share) == ("still", pytest.approx(1e-3), 0.0, math.inf)
    of_a_weight = compare_updates({"still": torch.tensor([0.0, 1e-3])}, {"still": torch.zeros(2)}, {"still": 2.0}, unit)
    assert of_a_weight.allowed == pytest.approx(2 * UPDATES * unit * 2)
    assert compare_updates({}, {}, {}) == Part()
    assert Part().is_right
    assert Part().share == 0


class SlowAfterTen(torch.optim.AdamW):
    """Takes half the learning rate from its eleventh step."""

    def step(self, closure=None):
        if self.state and next(iter(self.state.values()))["step"] == 10:
            for group in self.param_groups:
                group["lr"] /= 2
        return super().step()


def test_what_an_optimizer_does_otherwise_after_ten_steps_shows():
    assert not held(moved(SlowAfterTen, **OPTIONS)).is_right


class ClipsInPlace(torch.optim.AdamW):
    """Halves its gradients where they are."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step()


def test_an_optimizer_that_changes_its_gradients_is_given_them_anew_and_leaves_the_references():
    before = [{name: value.clone() for name, value in each.items()} for each in GRADIENTS]
    halves = [{name: value / 2 for name, value in each.items()} for each in GRADIENTS]
    assert held(moved(ClipsInPlace, **OPTIONS), moved(torch.optim.AdamW, halves, **OPTIONS)).error == 0
    for given, kept in zip(GRADIENTS, before, strict=True):
        assert all(torch.equal(given[name], value) for name, value in kept.items())


def test_weights_and_state_are_put_back():
    parameter = torch.nn.Parameter(WEIGHTS["matrix"].clone())
    optimizer = torch.optim.AdamW([parameter], **OPTIONS)
    take_updates(optimizer, [("matrix", parameter)], GRADIENTS)
    assert torch.equal(parameter, WEIGHTS["matrix"])
    assert parameter.grad is None
    assert not optimizer.state[parameter]


def test_a_gradient_that_ends_moves_nothing_more():
    ones = [{name: torch.ones_like(value) for name, value in WEIGHTS.items()}, {"gain": torch.ones(20)}]
    found = moved(torch.optim.SGD, ones, lr=0.5)
    torch.testing.assert_close(found["matrix"], torch.full((30, 20), -0.5), msg="by more than the first update")
    torch.testing.assert_close(found["gain"], torch.full((20,), -0.5 * UPDATES))


def test_small_updates_of_large_weights_in_16_bits_are_taken_from_zero():
    """bfloat16 has steps of 2 at 256, so that every update of 0.125 would be lost."""
    weight = torch.nn.Parameter(torch.full((4,), 256.0, dtype=torch.bfloat16))
    gradients = [{"weight": torch.ones(4)}]
    for options, expected in (({"from_zero": True}, -0.125 * UPDATES), ({}, 0.0)):
        found = take_updates(torch.optim.SGD([weight], lr=0.125), [("weight", weight)], gradients, **options)
        assert found["weight"].tolist() == [expected] * 4
        assert weight.tolist() == [256.0] * 4, "put back"
