"""The time that a ladder may take, and a patch that costs one run of it."""

import dataclasses

import pytest

from tests.ladder.given import BY_NAME, Given, captured, climbed, ladder_of
from tests.ladder.test_ladders import FUSED, ROOM, Steps
from trainstep.base.errors import UsageError
from trainstep.ladder.budget import Budget, OutOfTime
from trainstep.ladder.ladder import Ladder
from trainstep.rows import FINAL

OPTIMIZER = BY_NAME["fused optimizer"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("3m", 180.0), ("1.5h", 5400.0)])
def test_a_budget_is_a_number_with_its_unit(text, seconds):
    assert Budget.of(text).seconds == seconds
    assert seconds - 1 < Budget.of(text).left_s <= seconds
    assert [str(Budget(each)) for each in (9.6, 119.0, 180.0, 150.0)] == ["10 s", "119 s", "3 min", "2.5 min"]


@pytest.mark.parametrize("text", ["", "3", "0s", "-3m", "3 m", "3min", "m"])
def test_what_is_no_time_is_said(text):
    with pytest.raises(UsageError, match=f"budget is {text}; expected a time such as 90s, 3m or 1h"):
        Budget.of(text)


ONE, TWO = dataclasses.replace(FUSED, name="one", step={"loss": "chunked"}), dataclasses.replace(ROOM, name="two")


@pytest.mark.parametrize(
    ("gains", "costs", "names"),
    [
        ({"two": 1.3}, {}, ["baseline", "two", "one", FINAL]),  # the largest first
        ({"one": 1.3}, {}, ["baseline", "one", "two", FINAL]),
        ({"one": 1.3}, {"one": 99.0}, ["baseline", "two", FINAL]),  # the next that fits
    ],
)
def test_what_is_expected_to_gain_most_comes_first_and_what_does_not_fit_is_listed(gains, costs, names):
    runner = Steps(baseline=10.0, one=9.0, two=8.0, one_two=7.0, two_one=7.0)
    runner.gains, runner.costs = gains, costs
    rows = list(Ladder([ONE, TWO], runner, budget=Budget(60.0)).climb())
    tried = [row.change for row in rows if row.verdict != "not tried"]
    assert tried == names
    listed = {row.change: row.reason for row in rows if row.verdict == "not tried"}
    assert listed == {
        name: f"the budget of 60 s has no time for it; up to {gains[name]:.2f}× expected" for name in costs
    }


def test_a_change_under_way_at_the_end_of_the_budget_is_a_row_and_what_came_before_stays():
    runner = Steps(baseline=10.0, one=9.0, two=8.0, one_two=7.0)
    measure = runner.measure

    def until(name, made, top):
        if name == "two":
            raise OutOfTime
        return measure(name, made, top)

    runner.measure = until
    rows = {row.change: row for row in Ladder([ONE, TWO], runner, budget=Budget(60.0)).climb()}
    assert (rows["one"].accepted, rows["two"].verdict) == (True, "not tried")
    assert rows["two"].reason.startswith("the budget of 60 s has no time for it")


def test_a_budget_too_short_for_the_baseline_is_said():
    script = Given()
    script.budget = Budget(-1.0)

    def run(*_, **__):
        raise OutOfTime

    script.run = run
    ladder = ladder_of(script, [OPTIMIZER])
    ladder.budget = Budget(7.0)
    (row,) = ladder.climb()
    assert (row.status, row.reason) == ("failed", "the budget of 7 s is too short for the baseline; give --budget more")


@pytest.mark.parametrize(
    ("patched", "runs", "is_accepted"),
    [
        ({}, 3, True),  # one more run of what was accepted
        ({"step_ms": (10.5,) * 7}, 3, False),  # not in its time
        ({"captured": captured(4.0, said={"more": "is said"})}, 2, True),  # other bits
    ],
)
def test_a_patch_that_does_what_was_accepted_costs_one_run(patched, runs, is_accepted):
    script = Given(**{"fused optimizer": {"step_ms": (8.0,) * 7}})
    ladder, rows = climbed(script, OPTIMIZER)
    assert rows["fused optimizer"].accepted
    before, run = len(script.asked), script.run

    def own(what, changes=(), **more):
        found = run(what, changes, **more)
        if not more.get("sources"):
            return found
        return dataclasses.replace(found, **{"step_ms": (8.0,) * 7, **patched})

    script.run = own
    row = ladder.runner.check_sources({"train.py": ""}, [OPTIMIZER], ladder.top)
    assert row.runs == runs
    assert len(script.asked) - before == (1 if runs == 3 else 4)
    assert row.accepted is is_accepted
