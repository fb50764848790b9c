"""Ranks that do different things: found at once between CPUs; on GPUs once per pass, which is tried on CPUs here."""

import pytest

from trainstep.base.errors import UsageError
from trainstep.parallel.fsdp.schedule import Agreement

pytestmark = pytest.mark.distributed

SAME = [("gather", 0), ("gather", 1), ("send", 1), ("finish", -1)]


def _said(agreement, acts):
    try:
        for act, group in acts:
            agreement.announce(act, group)
        agreement.end_pass()
        agreement.compare(wait=True)
    except UsageError as error:
        return str(error)
    return "nothing"


def _passes(process, at_once, passes):
    """What is said in each pass; a pass is the acts of each rank."""
    agreement = Agreement(process.group, ["blocks.0", "blocks.1"], at_once=at_once)
    return [_said(agreement, of_ranks[process.rank]) for of_ranks in passes]


@pytest.mark.parametrize("at_once", [True, False])
def test_ranks_that_do_the_same(two, at_once):
    assert two.run(_passes, at_once, [(SAME, SAME)] * 3) == [["nothing"] * 3] * 2


def test_at_once_every_rank_says_where_each_is(two):
    other = [("gather", 1), ("gather", 0), ("send", 1), ("finish", -1)]
    by_rank = two.run(_passes, True, [(SAME, SAME), (SAME, other)])
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][0] == "nothing"
    assert "rank 0 comes to gather blocks.0, rank 1 comes to gather blocks.1" in by_rank[0][1]


@pytest.mark.parametrize(
    "other",
    [
        [("gather", 1), ("gather", 0), ("send", 1), ("finish", -1)],
        [("gather", 0), ("send", 1), ("finish", -1)],
        [("gather", 0), ("gather", 1), ("gather", 1), ("finish", -1)],
    ],
    ids=["order", "one less", "another act"],
)
def test_once_per_pass_every_rank_says_that_they_differ(two, other):
    by_rank = two.run(_passes, False, [(SAME, SAME), (SAME, other), (SAME, SAME)])
    assert by_rank[0] == by_rank[1]
    first, differing, after = by_rank[0]
    assert (first, after) == ("nothing", "nothing")
    assert "did not gather the same groups of parameters in the same order" in differing


def _later(process):
    """The answer of a pass is looked at in the next one."""
    agreement = Agreement(process.group, ["blocks.0", "blocks.1"], at_once=False)
    agreement.announce("gather", process.rank)
    agreement.end_pass()
    return _said(agreement, SAME)


def test_an_answer_that_came_late_is_not_forgotten(two):
    assert all("did not gather the same groups" in said for said in two.run(_later))
