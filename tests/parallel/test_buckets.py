"""Buckets: every tensor once, in order, within the limit, closed in the order in which they fill."""

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.parallel.collectives import MB, assign_buckets

ITEMS = st.lists(st.tuples(st.integers(0, 3 * MB), st.sampled_from("ab")), max_size=30)


@settings(deadline=None)
@given(items=ITEMS, limit=st.sampled_from([0, 0.5, 1.0, 2.5, math.inf]))
def test_buckets_hold_everything_once_in_order_and_within_the_limit(items, limit):
    numbered = [(index, size, kind) for index, (size, kind) in enumerate(items)]
    buckets = assign_buckets(numbered, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({items[index][1] for index in bucket}) == 1, "one kind"
        assert len(bucket) == 1 or sum(items[index][0] for index in bucket[:-1]) < limit * MB, "closed when it is full"
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets), "in the order they fill"
    for kind in "ab":
        own = [bucket for bucket in buckets if items[bucket[0]][1] == kind]
        for one, _ in pairwise(own):
            assert sum(items[index][0] for index in one) >= limit * MB, "a bucket is closed only when it is full"


def test_the_two_ends_of_the_scale():
    items = [(index, 10, "x") for index in range(5)]
    assert assign_buckets(items, 0) == [[0], [1], [2], [3], [4]]
    assert assign_buckets(items, math.inf) == [[0, 1, 2, 3, 4]]
    assert assign_buckets([], 1.0) == []
