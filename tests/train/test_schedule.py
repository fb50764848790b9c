"""The learning rate against the closed form."""

import math

import pytest

from trainstep.train.schedule import learning_rate


def test_warm_up_then_half_a_cosine():
    rates = [learning_rate(step, peak=2.0, warmup=4, steps=12, floor=0.25) for step in range(1, 13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * (0.25 + 0.75 / 2)), "half-way between the peak and the floor"
    assert rates[-1] == pytest.approx(0.5)
    for done in range(1, 9):
        expected = 0.5 + 1.5 * math.cos(math.pi * done / 16) ** 2  # (1 + cos x) / 2 = cos²(x / 2)
        assert rates[3 + done] == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_and_with_nothing_else():
    assert learning_rate(1, peak=1.0, warmup=0, steps=1, floor=0.1) == pytest.approx(0.1)
    assert learning_rate(5, peak=1.0, warmup=5, steps=5, floor=0.0) == 1.0
    assert learning_rate(10, peak=1.0, warmup=0, steps=10, floor=0.0) == pytest.approx(0, abs=1e-15)


def test_an_update_beyond_the_end_is_a_fault_of_ours():
    with pytest.raises(AssertionError, match="update 11 of 10"):
        learning_rate(11, peak=1.0, warmup=0, steps=10, floor=0.0)
