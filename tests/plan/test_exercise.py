"""The unchunked all-reduces against a simulation that hands whole tensors around and counts its passes."""

import pytest

from tables.plan import alternate_passes, alternate_seconds
from trainstep.plan.communication import Link, collective_seconds


def all_to_all(data):
    """In each pass every rank hands on what it got last, and adds it to its own sum."""
    n, passes = len(data), 0
    sums, held = list(data), list(data)
    for _ in range(n - 1):
        held = [held[(rank - 1) % n] for rank in range(n)]
        sums = [own + got for own, got in zip(sums, held, strict=True)]
        passes += 1
    return sums, passes


def reduce_then_broadcast(data):
    n, passes = len(data), 0
    sums = list(data)
    for rank in range(n - 1):
        sums[rank + 1] += sums[rank]
        passes += 1
    for step in range(n - 1):
        giver = (n - 1 + step) % n
        sums[(giver + 1) % n] = sums[giver]
        passes += 1
    return sums, passes


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("way", "simulate"), [("all to all", all_to_all), ("reduce, then broadcast", reduce_then_broadcast)]
)
def test_passes_are_those_of_handing_tensors_around(way, simulate, n):
    data = [3**rank for rank in range(n)]
    sums, passes = simulate(data)
    assert sums == [sum(data)] * n
    assert alternate_passes(way, n) == passes


def test_the_ring_is_faster_by_what_chunks_bring():
    link = Link(0.0, 1e9)
    ring = collective_seconds("all-reduce", 10**9, 8, link)
    assert alternate_seconds("reduce, then broadcast", 1e9, 8, 1e9) == pytest.approx(8 * ring)
    assert alternate_seconds("all to all", 1e9, 8, 1e9) == pytest.approx(8 / 2 * ring)
