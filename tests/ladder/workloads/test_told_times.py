"""What is kept, and what is said to be gained, of times and peaks that are told."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import trainstep.ladder.ladder as rule
import trainstep.ladder.steps as ladder
from tests.ladder.workloads import BASE, RIGHT, SOURCE, TOY, TWO, Trusting, change, climb_with, faked
from trainstep.ladder.ladder import Ladder
from trainstep.ladder.steps import StepRunner, TriedStep, climb
from trainstep.report.subjects.noise import measured_again
from trainstep.rows import FINAL
from trainstep.step.workload import WorkloadSource


def test_a_ladder_of_named_rungs_tries_no_others(monkeypatch):
    faked(monkeypatch, [100.0, 50.0], [(100.0, 50.0), (100.0, 50.0)])
    monkeypatch.setattr(ladder, "changes_of_step", lambda *_: pytest.fail("all that may help"))
    rows = climb(SOURCE, BASE, warmup=0, steps=7, changes=TWO[:1])
    assert [row.change for row in rows] == ["baseline", "one", FINAL]


def test_the_gain_is_over_the_kept_rung_in_turns_and_the_speed_up_the_product_of_gains(monkeypatch):
    """Times taken alone at different moments say nothing: the machine became twice as fast in between."""
    faked(monkeypatch, [200.0, 50.0, 40.0], [(100.0, 50.0), (50.0, 40.0), (100.0, 40.0)])
    first, one, two = climb_with(TWO)
    assert [rung.verdict for rung in (first, one, two)] == ["baseline", "faster", "faster"]
    assert (one.speedup, one.gain, one.step_ms, one.in_turns) == (2.0, 2.0, 50.0, True)
    assert (two.speedup, two.gain, two.in_turns, first.in_turns) == (2.5, 1.25, True, None)
    assert two.speedup_low < 2.5 < two.speedup_high
    assert two.gain_low < 1.25 < two.gain_high < two.speedup_low
    assert two.samples["step_before"] == [50.0] * 7


def test_what_is_slower_than_the_kept_rung_is_not_kept_though_faster_than_the_first(monkeypatch):
    faked(monkeypatch, [100.0, 50.0, 80.0, 80.0], [(100.0, 50.0), (50.0, 80.0), (50.0, 80.0), (100.0, 50.0)])
    _, _, two = climb_with(TWO)
    assert (two.verdict, two.accepted) == ("slower", False)
    assert (two.speedup, two.gain) == (1.25, 0.625)


def test_what_slows_the_machine_for_a_while_is_in_both_of_a_pair(monkeypatch):
    """The same step was called 8.9 times faster where something else ran during the first measurement."""
    busy = [400.0, 100.0, 900.0, 100.0, 100.0, 300.0, 100.0]
    faked(monkeypatch, [900.0, 100.0], [(busy, [each / 1.5 for each in busy]), (100.0, 66.0)])
    _, one = climb_with(TWO[:1])
    assert (one.verdict, one.gain, one.attempts) == ("faster", pytest.approx(1.5), 1)
    assert one.gain_high / one.gain_low == pytest.approx(1.02**2)


@pytest.mark.parametrize(
    ("peak", "kept"),
    [(700, True), (970, True), (980, False), (990, False), (1000, False), (1400, False), (None, False)],
)
def test_smaller_is_by_more_than_runs_differ(monkeypatch, peak, kept):
    faked(monkeypatch, [100.0] * 4, [(100.0, 100.0)] * 3, [1000, peak, 1000, peak])
    _, one = climb_with(TWO[:1])
    assert (one.verdict, one.accepted, one.attempts) == ("inconclusive", kept, 1)


def test_of_an_unknown_peak_nothing_is_smaller(monkeypatch):
    faked(monkeypatch, [100.0] * 4, [(100.0, 100.0)] * 3, [None, 500, None, 500])
    _, one = climb_with(TWO[:1])
    assert (one.verdict, one.accepted) == ("inconclusive", False)


@pytest.mark.parametrize(("step", "attempts"), [(1.018, 1), (1.023, 4)])
def test_more_turns_are_taken_while_a_wide_interval_decides_nothing(monkeypatch, step, attempts):
    """The interval reaches from the smallest ratio to the largest and 2 % beyond: 8 % of 1 with steps of 2 %."""
    before = [100.0 * step, 100.0, 100.0 / step] * 3
    taken = faked(monkeypatch, [100.0] * 3, [(before, 100.0)] * 4 + [(100.0, 100.0)] * 2)
    _, one = climb_with(TWO[:1], steps=9)
    assert (one.verdict, one.attempts, one.n) == ("inconclusive", attempts, 9 * attempts)
    assert len(taken) == attempts + one.accepted
    assert len(one.samples["step"]) == len(one.samples["forward"]) == one.n
    assert [finding.figures for finding in measured_again([one])] == [{"changes": ("one",)}] * (attempts > 1)


def test_only_the_first_turns_are_warmed_up(monkeypatch):
    before = [105.0, 100.0, 95.0] * 3
    faked(monkeypatch, [100.0] * 3, [(before, 100.0)] * 4 + [(100.0, 100.0)] * 2)
    retimed, warmups = ladder.time_in_turns, []

    def take_turns(*arguments, **options):
        warmups.append(options["warmup"])
        return retimed(*arguments, **options)

    monkeypatch.setattr(ladder, "time_in_turns", take_turns)
    _, one = climb_with(TWO[:1], warmup=3, steps=9)
    assert warmups[: one.attempts] == [3, 0, 0, 0]


def test_a_wide_interval_that_decides_is_enough(monkeypatch):
    faked(monkeypatch, [100.0] * 2, [([200.0, 300.0] * 4, 100.0), (100.0, 100.0)])
    _, one = climb_with(TWO[:1])
    assert (one.verdict, one.attempts) == ("faster", 1)


def test_two_steps_that_do_not_fit_together_are_timed_one_after_the_other(monkeypatch):
    faked(monkeypatch, [90.0, 55.0, 110.0, 45.0, 100.0, 50.0], [None, None])
    _, one, final = climb(SOURCE, BASE, changes=TWO[:1], warmup=1, steps=7)
    assert (one.verdict, one.gain, one.attempts, one.in_turns) == ("faster", 2.0, 2, False)
    assert "step_before" not in one.samples
    assert (final.first_again_ms, final.top_again_ms) == (100.0, 50.0)


def test_a_rung_that_cannot_be_measured_again_is_told_by_its_first_times(monkeypatch):
    faked(monkeypatch, [100.0, 100.0, None, None, 100.0], [None])
    _, one = climb_with(TWO[:1])
    assert (one.status, one.attempts, one.verdict, one.step_ms) == ("ok", 1, "inconclusive", 100.0)


def test_the_first_rung_is_one_times_itself(monkeypatch):
    faked(monkeypatch, [100.0, 50.0], [(100.0, 50.0)] * 2)
    first, one = climb_with(TWO[:1])
    assert (first.speedup, first.gain, first.speedup_low, first.gain_high) == (1.0, 1.0, None, None)
    assert (first.verdict, first.accepted, one.accepted, first.attempts) == ("baseline", True, True, 1)


def test_a_rung_on_the_baseline_is_as_much_faster_as_its_gain_says(monkeypatch):
    """One times itself is exactly one: it widens no interval that is multiplied by it."""
    faked(monkeypatch, [100.0, 50.0], [([100.0, 104.0], [50.0, 51.0])] * 2)
    _, one = climb_with(TWO[:1])
    assert one.gain_low < one.gain < one.gain_high
    found = (one.speedup, one.speedup_low, one.speedup_high)
    assert found == pytest.approx((one.gain, one.gain_low, one.gain_high), rel=1e-12)


def test_a_step_measured_twice_has_the_last_memory_and_the_first_first_step(monkeypatch):
    """Compiling is in the first of all steps alone, and what a step took while it was compiled is not its peak."""
    compiling = [9000.0] + [50.0] * 7
    faked(monkeypatch, [100.0, compiling, 100.0, 50.0, 100.0, 50.0], [None, None], [1000, 700, 1000, 500, 1000, 500])
    _, one = climb_with(TWO[:1])
    assert one.peak_gib * 2**30 == pytest.approx(500)
    assert one.first_step_ms == 9000


@pytest.mark.parametrize(("peaks", "kept"), [([1000, 1200, 1000, 700], True), ([1000, 700, 600, 700], False)])
def test_smaller_is_what_was_measured_last(monkeypatch, peaks, kept):
    faked(monkeypatch, [100.0] * 6, [None, None], [*peaks, 1000, 1000])
    _, one = climb_with(TWO[:1])
    assert (one.verdict, one.accepted, one.attempts) == ("inconclusive", kept, 2)


def test_a_step_of_which_nothing_can_be_said_gets_no_time(monkeypatch):
    class Doubting(Trusting):
        def start(self, config):
            step, found = super().start(config)
            vague = dataclasses.replace(RIGHT, gradient_allowed=0.7)
            return step, found if config == BASE else dataclasses.replace(found, gradients=vague)

    faked(monkeypatch, [100.0, 50.0, 100.0], [(100.0, 50.0)])
    monkeypatch.setattr(ladder, "StepCheck", Doubting)
    _, one = climb_with(TWO[:1])
    assert (one.status, one.verdict, one.accepted, one.step_ms) == ("unsupported", "unsupported", False, None)
    assert one.reason == "rounding alone takes its gradients off by so much that 0.7 would be allowed"
    assert one.error_budget == 0.7


def test_every_part_is_told_before_it_begins(monkeypatch):
    faked(monkeypatch, [100.0, 120.0, 50.0, 40.0], [(100.0, 120.0), (100.0, 50.0), (50.0, 40.0), (100.0, 40.0)])
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    told = []
    rows = climb(
        SOURCE, BASE, changes=[change("blocks", {"compile": "blocks"}), TWO[0]], warmup=0, steps=7, on_part=told.append
    )
    assert next(rows).change == "baseline"
    assert told == ["ladder: baseline, checked and timed"]
    assert [row.change for row in rows] == [*("blocks", "one", "blocks, on the top"), "final configuration"]
    assert told[1:] == [
        "ladder: blocks, compiled, checked and timed",
        "ladder: one, checked and timed",
        "ladder: blocks, on the top, compiled, checked and timed",
        "ladder: the first and the final configuration again",
    ]


def test_a_final_configuration_that_fails_is_a_row_and_medians_lie_between_the_middle_two(monkeypatch):
    alone = [[100.0, 100.0, 110.0, 110.0] * 2, 50.0, [90.0, 90.0, 120.0, 120.0] * 2, None]
    faked(monkeypatch, alone, [(100.0, 50.0), None])
    _, _, final = climb(SOURCE, BASE, changes=TWO[:1], warmup=1, steps=8)
    assert (final.first_ms, final.first_again_ms, final.first_drift, final.first) == (105.0, 105.0, 1.0, "baseline")
    assert (final.status, final.reason, final.attention) == ("out of memory", "no room", "sdpa")
    assert (final.top, final.top_again_ms, final.speedup, final.accepted) == ("one", None, None, False)


def test_ten_steps_are_timed_after_three(monkeypatch):
    taken = faked(monkeypatch, [100.0] * 3, [(100.0, 50.0)] * 2)
    first, one, *_ = climb(SOURCE, BASE, changes=TWO[:1])
    assert (first.n, len(first.samples["training_loss"])) == (10, 13)
    assert (one.n, len(one.samples["training_loss"]), len(taken[0][0])) == (10, 13, 10)


def test_the_seconds_of_a_check_are_those_before_and_after_the_measurement(monkeypatch):
    clock = [100.0]

    class Slow(Trusting):
        def start(self, config):
            clock[0] += 0.2
            return super().start(config)

        def end(self, step, verdict):
            clock[0] += 0.3
            return verdict

    faked(monkeypatch, [100.0] * 2)
    monkeypatch.setattr(ladder, "StepCheck", Slow)
    original = ladder.measure_training_step

    def measure(*arguments):
        clock[0] += 3.0
        return original(*arguments)

    monkeypatch.setattr(ladder, "measure_training_step", measure)
    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    first, final = climb(SOURCE, BASE, changes=[], warmup=1, steps=1)
    assert first.check_s == pytest.approx(0.5)
    assert (final.status, final.first, final.top) == ("ok", "baseline", None), "the top is the first"


def test_what_was_too_large_for_what_was_kept_is_tried_on_a_top_that_is_smaller(monkeypatch):
    def build(step):
        if step.optimizer == "adamw-fused" and step.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SOURCE.build(step)

    monkeypatch.setattr(TriedStep, "is_smaller", lambda own, than: own.config.attention != than.config.attention)
    faked(monkeypatch, [100.0] * 3, [(100.0, 100.0), (100.0, 50.0), (100.0, 50.0)])
    large = [TWO[1], TWO[0]]
    baseline, two, one, again = climb_with(large, WorkloadSource("big", build, TOY))
    assert [(row.change, row.status, row.accepted) for row in (baseline, two, one, again)] == [
        ("baseline", "ok", True),
        ("two", "out of memory", False),
        ("one", "ok", True),
        ("two, on the top", "ok", True),
    ]


@pytest.mark.parametrize(("steps", "kept"), [(3, False), (7, True)])
def test_too_few_samples_keep_nothing(monkeypatch, steps, kept):
    """Smaller and not told apart is worth keeping, but only where there is an interval to tell by."""
    monkeypatch.setattr(rule, "verdict", lambda ratio: "inconclusive")
    monkeypatch.setattr(TriedStep, "is_smaller", lambda own, than: True)
    faked(monkeypatch, [100.0] * 4, [(100.0, 100.0)] * 5)
    records = climb_with([change("chunked", {"loss": "chunked"})], steps=steps)
    assert records[1].values["accepted"] is kept


@pytest.mark.parametrize(("ms", "kept"), [(100.0, True), (101.0, False)])
def test_what_saves_memory_is_kept_only_where_it_is_certainly_not_slower(monkeypatch, ms, kept):
    """The interval of the gain has to lie above 0.98; before, any that reached 1 would do."""
    monkeypatch.setattr(rule, "RUN_SPREAD", 0.02)
    faked(monkeypatch, [100.0, ms] * 2, [(100.0, ms)] * 2, [1000, 500] * 2)
    _, one = climb_with(TWO[:1])
    assert (one.verdict, one.accepted) == ("inconclusive", kept)


def test_first_and_top_are_measured_again_at_the_end(monkeypatch):
    faked(monkeypatch, [100.0, 50.0], [(100.0, 50.0), (110.0, 50.0)])
    _, one, final = climb(SOURCE, BASE, changes=TWO[:1], warmup=1, steps=7)
    assert one.accepted
    assert (final.change, final.first, final.top, final.attention) == (FINAL, "baseline", "one", "sdpa")
    assert (final.first_ms, final.first_again_ms, final.first_drift) == (100.0, 110.0, 1.1)
    assert (final.top_ms, final.top_again_ms, final.top_drift) == (50.0, 50.0, 1.0)
    assert final.first_drift_low < 1.1 < final.first_drift_high
    assert (final.speedup, final.verdict, final.accepted) == (2.2, "faster", True)
    assert final.samples == {"first_again": [110.0] * 7, "top_again": [50.0] * 7}
    assert final.speedup_low < 2.2 < final.speedup_high
    assert final.step_ms is None, "no step that reports would show as one more change"


def test_a_rejected_rung_is_tried_once_more_on_the_top(monkeypatch):
    """What brought nothing below may bring something above; what was kept, or tried on the top, is not tried again."""
    faked(monkeypatch, [100.0, 120.0, 50.0, 40.0], [(100.0, 120.0), (100.0, 50.0), (50.0, 40.0), (100.0, 40.0)])
    _, one, two, again = climb_with(TWO)
    assert [one.accepted, two.accepted, again.accepted] == [False, True, True]
    assert again.change == "one, on the top"
    assert (again.attention, again.optimizer) == ("sdpa", "adamw-fused")
    assert again.gain == 1.25


def test_a_rejected_rung_that_would_undo_what_was_kept_since_is_not_tried_again(monkeypatch):
    both = change("both", {"attention": "sdpa", "loss": "chunked"})
    faked(monkeypatch, [100.0, 120.0, 50.0], [(100.0, 120.0), (100.0, 50.0), (100.0, 50.0)])
    _, one, two = climb_with([both, TWO[0]])
    assert [one.accepted, two.accepted] == [False, True]


def test_a_change_takes_the_place_of_those_whose_fields_it_sets(monkeypatch):
    """The wide one stays: a part of it is as it was. Equal fields replace one another."""
    faked(monkeypatch, [100.0, 50.0, 25.0, 12.0], [(100.0, 50.0), (50.0, 25.0), (25.0, 12.0), (100.0, 12.0)])
    wide = change("wide", {"loss": "chunked", "optimizer": "adamw-fused"})
    tried = Ladder([wide, change("plain", {"loss": "dense"}), change("again", {"loss": "chunked"})], runner())
    assert all(row.accepted for row in tried.climb())
    assert [each.name for each in tried.accepted] == ["wide", "again"]


def runner():
    return StepRunner(SOURCE, BASE, None, 1, 7, False)
