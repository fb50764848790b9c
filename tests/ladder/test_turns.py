"""In which order two versions of a script take turns, and when they have taken enough."""

from pathlib import Path

import pytest

from trainstep.ladder.scripts import in_turns, times
from trainstep.ladder.single import Taken
from trainstep.observe.log import RankLog


def taken(ms, failure=""):
    steps = () if failure else (ms,) * 7
    return Taken(Path(), 0, RankLog({}), step_ms=steps, first_step_ms=ms, failure=failure, captured=None)


def turns(b_ms, *, rounds=3, begun=None, spread=0.0, fails=()):
    """The order in which A and B were run, and the runs that count.

    Args:
        spread: by which share one run of a side differs from the next.
        fails: numbers of runs that fail.
    """
    order = []

    def run(is_b):
        order.append("AB"[is_b])
        ms = b_ms if is_b else 10.0
        ms *= 1 + spread * (-1) ** order.count(order[-1])
        return taken(ms, "it fell over" if len(order) in fails else "")

    found = in_turns(run, rounds, begun=begun)
    return "".join(order), found


@pytest.mark.parametrize("b_ms", [5.0, 20.0, 10.0])
def test_a_clear_difference_and_a_small_one_take_one_round(b_ms):
    assert turns(b_ms)[0] == "BAAB"


def test_one_that_is_open_takes_more_rounds_and_no_more_than_it_may():
    assert turns(10.0, spread=0.2)[0] == "BAAB" * 3
    assert turns(10.0, spread=0.2, rounds=2)[0] == "BAAB" * 2


def test_a_run_of_b_that_was_there_is_the_first():
    first = taken(5.0)
    order, (before, own) = turns(5.0, begun=first)
    assert (order, len(before), len(own), own[0]) == ("AAB", 2, 2, first)
    assert turns(10.0, spread=0.2, rounds=2, begun=taken(10.0))[0] == "AAB" + "BAAB"


def test_runs_that_fail_do_not_count_and_end_it_where_a_side_has_too_few():
    order, (before, own) = turns(10.0, spread=0.2, fails=(2,))
    assert (order, len(before), len(own)) == ("BAAB", 1, 2)
    order, (before, own) = turns(5.0, fails=(1, 4))
    assert (len(before), len(own)) == (2, 0)


def run_of(*ms, **more):
    return Taken(Path(), 0, RankLog({}), step_ms=ms, first_step_ms=1.0, failure="", captured=None, **more)


def test_a_run_counts_by_its_total_of_which_waiting_for_a_burst_of_batches_is_a_part():
    assert times([run_of(1.0, 1.0, 1.0, 37.0, 1.0, 1.0, 1.0, 37.0)]) == [(10.0,)]


def test_steps_whose_batches_were_loaded_before_are_not_counted():
    assert times([run_of(5.0, 5.0, 5.0, 5.0, from_stock=0.5)]) == [(10.0,)]
