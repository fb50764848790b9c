"""Arithmetic of intervals, exactly; and against counting single points."""

import random

import pytest

from trainstep.measure.intervals import difference, intersection, length, union


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([], []),
        ([(5, 9), (1, 3)], [(1, 3), (5, 9)]),
        ([(1, 3), (3, 4)], [(1, 4)]),
        ([(1, 9), (2, 3), (8, 10)], [(1, 10)]),
        ([(2, 2), (4, 3)], []),
    ],
)
def test_union(intervals, merged):
    assert union(intervals) == merged


@pytest.mark.parametrize(
    ("first", "second", "both", "first_alone"),
    [
        ([(0, 10)], [], [], [(0, 10)]),
        ([], [(0, 10)], [], []),
        ([(0, 10)], [(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(10, 20)], [], [(0, 10)]),
        ([(0, 10)], [(2, 3), (5, 7)], [(2, 3), (5, 7)], [(0, 2), (3, 5), (7, 10)]),
        ([(2, 3), (5, 7)], [(0, 10)], [(2, 3), (5, 7)], []),
        ([(0, 4), (6, 10)], [(3, 8)], [(3, 4), (6, 8)], [(0, 3), (8, 10)]),
    ],
)
def test_what_two_share_and_what_one_has_alone(first, second, both, first_alone):
    assert intersection(first, second) == both
    assert intersection(second, first) == both
    assert difference(first, second) == first_alone


def test_against_sets_of_points():
    draw = random.Random(0)
    for _ in range(300):
        raw = [[(a, a + draw.randrange(6)) for a in draw.choices(range(40), k=draw.randrange(9))] for _ in range(2)]
        points = [{x for start, end in one for x in range(start, end)} for one in raw]
        first, second = map(union, raw)
        assert length(first) == len(points[0])
        for found, expected in (
            (intersection(first, second), points[0] & points[1]),
            (difference(first, second), points[0] - points[1]),
        ):
            assert {x for start, end in found for x in range(start, end)} == expected
            assert found == union(found)
