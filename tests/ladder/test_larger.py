"""A larger batch and what makes room for it, tried by a ladder whose runs are given, with the memory of a GPU."""

import dataclasses
import math

import pytest

from tests.ladder.given import BY_NAME, ON_CPU, Given, captured, climbed
from trainstep.ladder.scripts import needed_gib, why_memory_limits_not, why_no_room
from trainstep.ladder.trial.capture import of_all_ranks

CHECKPOINTED, LARGER = BY_NAME["checkpointed blocks"], BY_NAME["larger batch"]


def given(peak=4.0, larger=(), checkpointed=(), both=()):
    """The script, with twice the samples in 15 ms, and blocks computed again in 13 ms with 4 GiB."""
    runs = {
        "larger batch": {"step_ms": (15.0,) * 7, "samples_per_step": 16.0, **dict(larger)},
        "checkpointed blocks": {"step_ms": (13.0,) * 7, "captured": captured(4.0), **dict(checkpointed)},
        "checkpointed blocks,larger batch": {"step_ms": (16.0,) * 7, "samples_per_step": 16.0, **dict(both)},
    }
    return Given(peak, **runs)


@pytest.mark.parametrize("ms", [15.0, 5.0])
def test_a_larger_batch_is_another_step_and_never_a_faster_one(ms):
    """Even where its steps are shorter: gradients of other samples would be wrong ones of these."""
    others = {"captured": captured(6.0, losses=(3.0, 2.0, 1.0), weights="others")}
    ladder, rows = climbed(given(larger={"step_ms": (ms,) * 7, **others}), LARGER)
    row = rows["larger batch"]
    assert (row.verdict, row.status, row.accepted) == ("another step", "ok", False)
    assert ladder.accepted == []
    assert (dict(row.times), row.gain, row.speedup, row.gradient_error) == ({}, None, None, None)
    assert (row.samples_per_step_before, row.samples_per_step, row.runs) == (8, 16, 2)
    assert (row.samples_per_s_before, row.samples_per_s) == (800, pytest.approx(16e3 / ms))
    assert row.throughput == row.throughput_low == pytest.approx(20 / ms)
    assert row.peak_gib == 6.0
    assert row.lines.startswith("DataLoader(…, batch_size=2 * …) (another step: the learning rate may")
    assert row.lines.endswith("(train.py:7: 16 in place of 8)")


def test_samples_that_take_as_long_are_no_gain_in_throughput():
    row = climbed(given(larger={"step_ms": (20.0,) * 7}), LARGER)[1]["larger batch"]
    assert row.throughput == row.throughput_high == 1.0


def test_a_batch_fits_where_twice_what_grows_does():
    assert needed_gib(captured(5.5)) == 9.0
    assert why_no_room(captured(5.75)) == "", "9.5 of 10 GiB"
    assert "may need 9.52 GiB, more than 95% of the 10 GiB" in why_no_room(captured(5.76))
    assert "on a CPU no limit of memory is known" in why_no_room(ON_CPU)


def test_memory_limits_from_a_share_of_what_there_is():
    assert why_memory_limits_not(captured(6.01)) == ""
    assert "whose peak is 60% of what it could have" in why_memory_limits_not(captured(6.0))
    assert "on a CPU no limit of memory is known" in why_memory_limits_not(ON_CPU)


def test_blocks_are_computed_again_where_memory_limits_and_for_a_larger_batch_alone():
    script = given(peak=7.0)
    ladder, rows = climbed(script, CHECKPOINTED, LARGER, rounds=1)
    row = rows["checkpointed blocks"]
    assert (row.verdict, row.status, row.accepted, ladder.accepted) == ("slower", "ok", False, [])
    row = rows["larger batch"]
    assert (row.verdict, row.throughput, row.samples_per_s_before) == ("another step", pytest.approx(20 / 16), 800)
    assert row.lines.startswith(f"{CHECKPOINTED.line.text}; DataLoader(")
    both = "checkpointed blocks,larger batch"
    assert script.asked[-4:] == [both, "", "", both], "in turns with what was kept, which has no checkpoints"
    assert "larger batch" not in script.asked


@pytest.mark.parametrize(
    ("script", "rungs", "why"),
    [
        (given(6.0), [CHECKPOINTED], "memory does not limit"),
        (given(7.0), [LARGER], "12 GiB, more than 95% of the 10 GiB"),
        (given(7.0, checkpointed={"captured": captured(6.4)}), [CHECKPOINTED, LARGER], "12 GiB, more than 95%"),
        (given(larger={"samples_per_step": 8.0}), [LARGER], "8 samples all the same"),
        (given(larger={"samples_per_step": None}), [LARGER], "how many samples a step takes is not known"),
    ],
)
def test_what_is_not_tried_says_why(script, rungs, why):
    row = list(climbed(script, *rungs)[1].values())[-1]
    assert (row.verdict, row.throughput, row.accepted) == ("not tried", None, False)
    assert why in row.reason


@pytest.mark.parametrize("script", [given(7.0), given(7.0, checkpointed={"captured": ON_CPU})])
def test_what_is_named_is_tried_all_the_same(script):
    script.plain["captured"] = script.runs["checkpointed blocks"]["captured"]
    _, rows = climbed(script, CHECKPOINTED, LARGER, are_named=True)
    assert [row.verdict for row in rows.values()] == ["baseline", "slower", "another step"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_no_numbers_are_wrong(loss):
    row = climbed(given(larger={"captured": captured(4.0, losses=(1.0, loss, 1.0))}), LARGER)[1]["larger batch"]
    assert (row.status, row.verdict, row.throughput) == ("wrong", "wrong", None)
    assert row.reason == f"the loss of update 2 is {loss}"


def test_a_lack_of_memory_is_a_row_and_what_needs_less_is_tried_then():
    words = "it was ended by OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    script = given(larger={"captured": None, "failure": words})
    row = climbed(script, LARGER)[1]["larger batch"]
    assert (row.status, row.verdict, row.reason) == ("out of memory", "out of memory", words)
    script.plain["captured"] = captured(5.5)
    _, rows = climbed(script, CHECKPOINTED, LARGER, are_named=True)
    assert rows["larger batch"].verdict == "another step"
    assert rows["larger batch"].lines.startswith(CHECKPOINTED.line.text)
    script = given(7.0, checkpointed={"captured": None, "failure": words})
    assert climbed(script, CHECKPOINTED)[1]["checkpointed blocks"].status == "out of memory"


def test_of_several_ranks_the_one_with_the_least_room_counts():
    found = of_all_ranks([captured(4.0, 2.0, 10.0), captured(5.0, 3.0, 9.0)])
    assert (found.peak_gib, found.fixed_gib, found.limit_gib) == (5.0, 2.0, 9.0)
    found = of_all_ranks([ON_CPU, ON_CPU])
    assert (found.peak_gib, found.fixed_gib, found.limit_gib) == (None, None, None)


def test_what_is_smaller_counts_until_something_else_is_kept():
    """It was measured on top of what was kept then."""
    fused = BY_NAME["fused optimizer"]
    script = given(9.0)
    script.runs |= {
        "fused optimizer": {"step_ms": (8.0,) * 7, "captured": captured(9.0)},
        "fused optimizer,checkpointed blocks": {"step_ms": (12.0,) * 7, "captured": captured(9.0)},
    }
    ladder, rows = climbed(script, CHECKPOINTED, LARGER)
    assert rows["larger batch"].verdict == "another step", "checkpointed blocks leave room"
    ladder, rows = climbed(script, CHECKPOINTED, fused, LARGER)
    assert [rung.name for rung in ladder.accepted] == ["fused optimizer"]
    assert rows["larger batch"].verdict == "not tried"


class Failing(Given):
    """The script as it is runs so often, and no more."""

    left = 2

    def run(self, what, changes=(), **more):
        found = super().run(what, changes, **more)
        self.left -= not changes
        return found if changes or self.left >= 0 else dataclasses.replace(found, failure="no more", step_ms=())


@pytest.mark.parametrize("name", ["fused optimizer", "larger batch"])
def test_a_rung_without_a_run_beside_it_has_no_time(name):
    script = Failing(**given().runs, **{"fused optimizer": {"step_ms": (8.0,) * 7}})
    _, rows = climbed(script, BY_NAME[name])
    assert (rows[name].status, rows[name].accepted, rows[name].speedup) == ("failed", False, None)
    assert "no run of one side came to its end" in rows[name].reason


def test_samples_per_second_are_of_totals():
    row = climbed(given(larger={"step_ms": (1.0, 1.0, 1.0, 57.0)}), LARGER)[1]["larger batch"]
    assert row.samples_per_s == pytest.approx(16e3 / 15)
    assert row.throughput == pytest.approx(20 / 15)
