"""The sentence that says who is missing, made of where every rank says that it is."""

import pytest

from trainstep.parallel.announced import BESIDE
from trainstep.parallel.verdict import UNEVEN, Answer, apart, verdict

GLOO = "gloo:0:default_pg"


def answer(rank, number=None, name="all_reduce", *, group="gloo:0:default_pg", ranks=(0, 1, 2), **more):
    calls = {} if number is None else {group: (number, name)}
    return Answer(rank, f"h{rank}", "update 7", f"net.py:{rank} (forward)", calls, dict.fromkeys(calls, ranks), **more)


def waits(rank, number, **more):
    return answer(rank, number, is_waiting=True, **more)


@pytest.mark.parametrize(
    ("mine", "others", "silent", "said"),
    [
        (waits(0, 5), [], {1: "h1"}, "rank 1 (host h1) does not answer: killed, stopped, hung or cut off"),
        (waits(0, 5), [waits(1, 5)], {2: "b", 3: "b"}, "rank 2 (host b), rank 3 (host b) do not answer: killed"),
        (waits(0, 5), [answer(1, stopped="KeyError: 'x'")], {}, "rank 1 (host h1) stopped with KeyError: 'x'"),
        (waits(0, 5), [Answer(1, "h1", has_left=True)], {}, "rank 1 (host h1) has left"),
        (
            waits(0, 5),
            [answer(1, 4), waits(2, 5)],
            {},
            "rank 1 (host h1) hangs or is late: it is at net.py:1 (forward) of update 7 and has not come to all_reduce "
            "no. 5",
        ),
        (waits(0, 5), [answer(1)], {}, "and has not come to no. 1 to 5 (all_reduce)"),
        (waits(0, 5), [waits(1, 3), answer(2, 5)], {}, "wait for different collectives: rank 1 (host h1) has not come"),
        (waits(0, 5), [waits(1, 5), answer(2, 5)], {}, "the network between them is broken or too slow"),
        (waits(0, 5, ranks=(0, 2)), [answer(1, 9, group="gloo:3:rows", ranks=(1, 3))], {}, "none is behind"),
        (waits(0, 5), [waits(1, 5, group=f"gloo:1:{BESIDE}")], {}, "rank 1 (host h1) has not come to no. 1 to 5"),
        (waits(0, 9, group=f"gloo:1:{BESIDE}"), [answer(1, 8, group=f"gloo:1:{BESIDE}")], {}, "none is behind"),
        (
            waits(0, 9, group=f"gloo:1:{BESIDE}", is_beside=True),
            [waits(1, 8, group=f"gloo:1:{BESIDE}")],
            {},
            "rank 1 (host h1) has not come to all_reduce no. 9 of the checkpoint",
        ),
    ],
)  # fmt: skip
def test_the_verdict(mine, others, silent, said):
    found = verdict(mine, {each.rank: each for each in [mine, *others]}, silent)
    assert said in found
    assert "\n" not in found


def stands(rank, where, name, *, ranks=(0, 1, 2), **calls):
    """A rank that waits in the last of `calls` of a process group's backend: gloo=14."""
    numbers = {f"{how}:0:default_pg": number for how, number in calls.items()}
    told = {group: (number, name) for group, number in numbers.items()}
    return Answer(
        rank, f"h{rank}", "", f"net.py:{rank} (f)", told, dict.fromkeys(told, ranks), is_waiting=True,
        waits_in=(where, numbers[where], name),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        (stands(0, GLOO, "all_reduce", gloo=14), stands(1, GLOO, "barrier", gloo=14), True),
        (stands(0, GLOO, "all_reduce", gloo=14), stands(1, GLOO, "all_reduce", gloo=14), False),
        (stands(0, GLOO, "all_reduce", gloo=14), stands(1, GLOO, "barrier", gloo=13), False),  # it may come yet
        (stands(0, GLOO, "all_gather", gloo=7), stands(1, GLOO, "all_to_all", gloo=7), True),
        (
            stands(0, GLOO, "all_reduce", gloo=14),
            stands(1, GLOO, "barrier", gloo=14, ranks=(1, 2)),
            False,  # another group, though of one name
        ),
        (stands(0, GLOO, "all_reduce", gloo=14), Answer(1, "h1"), False),
    ],
)
def test_ranks_are_apart_where_they_came_to_collectives_in_different_orders(one, other, is_apart):
    for first, second in ((one, other), (other, one)):
        found = apart(first, second)
        assert bool(found) is is_apart
    if is_apart:
        assert verdict(one, {0: one, 1: other}, {}) == apart(other, one)
        for each in (one, other):
            assert f"rank {each.rank} (host h{each.rank}) is in {each.waits_in[2]} no. {each.waits_in[1]}" in found
            assert f"at net.py:{each.rank} (f)" in found
        assert found.endswith(UNEVEN)
