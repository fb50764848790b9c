"""The ladder's rules: which ladder is meant, which changes are still there, and what came after a precision."""

from dataclasses import replace

import pytest

from tests.report.changes import final
from tests.report.test_findings import SETTINGS, bf16, found, rung
from trainstep.report.subjects.climbs import (
    after,
    after_precision,
    climbs,
    failed_baselines,
    of_script,
    of_steps,
    times_agree,
)

BASELINE = rung("baseline", "baseline", step_ms=1000.0)


def climb_of(*rows):
    (climb,) = climbs(rows)
    return climb


def test_ladders_are_told_apart_by_how_they_begin():
    rows = []
    for first in ("fp32", "tf32"):
        rows += [rung("baseline", "baseline", case={"precision": first}), bf16()]
    assert [climb.name for climb in climbs(rows)] == ["precision fp32", "precision tf32"]


def test_a_change_of_two_settings_is_there_while_one_of_them_is():
    first = rung("x", case={"precision": "tf32", "attention": "ours"})
    later = bf16(case={"attention": "ours"})
    assert climb_of(BASELINE, first, later).settings == [["precision", "attention"], ["precision"]]
    assert climb_of(BASELINE, first, later).there == [first, later]
    assert climb_of(BASELINE, first, bf16()).there == [bf16()]


def test_what_came_after_a_precision_is_said_and_needs_both_times():
    kept = [BASELINE, bf16(step_ms=200.0), bf16("fused", case={"optimizer": "adamw-fused"}, step_ms=100.0)]
    assert after_precision(climb_of(*kept)) == {"precision_change": "bf16 autocast", "after_precision": 2.0}
    untimed = [replace(each, times={}) for each in kept]
    for rows in ((*kept[:2], untimed[2]), (BASELINE, untimed[1], kept[2])):
        assert after_precision(climb_of(*rows)) is None


def test_what_came_after_a_rung_is_the_product_of_the_gains_kept_since():
    """Not the ratio of times taken at different moments."""
    one = rung("a", step_ms=100.0, gain=9.0)
    two = rung("b", step_ms=100.0, gain=2.0, gain_low=1.9, gain_high=2.1)
    three = rung("c", step_ms=100.0, gain=1.5, gain_low=1.4, gain_high=1.6)
    found = after(one, [BASELINE, one, two, three])
    assert found.value == 3.0
    assert 1.9 * 1.4 < found.interval.low < 1.4 * 2 < 3.0 < 1.6 * 2 < found.interval.high < 2.1 * 1.6
    assert after(three, [one, two, three]).value == 1.0
    assert after(one, [one, two, replace(three, gain_low=None)]).interval is None


@pytest.mark.parametrize(("ms", "agree"), [(480.0, True), (1100.0, False), (200.0, False)])
def test_times_that_belie_the_speed_up_are_said_to_be_of_different_moments(ms, agree):
    """Twice as fast in turns: 1,000 ms → 1,100 ms beside it would be absurd."""
    top = bf16(step_ms=ms, speedup=2.0, speedup_low=1.9, speedup_high=2.1)
    assert times_agree(climb_of(BASELINE, top)) is agree
    (told,) = found([BASELINE, top], "gain")
    assert (f": 1,000 ms → {ms:,.0f} ms" in told.sentence) is agree
    moved = f"The machine changed: the first took 1,000 ms when it was tried, the last {ms:,.0f} ms. Loss"
    assert (moved in told.sentence) is not agree


def test_without_both_times_nothing_belies_the_speed_up():
    top = bf16(step_ms=1100.0, speedup=2.0, speedup_low=1.9, speedup_high=2.1)
    assert not times_agree(climb_of(BASELINE, top))
    assert times_agree(climb_of(replace(BASELINE, times={}), top))
    assert times_agree(climb_of(BASELINE, replace(top, times={})))


def failed_baseline(case=None, reason="no such file"):
    return rung("baseline", "failed", False, "failed", reason, case)


def test_of_several_ladders_those_without_a_baseline_are_named():
    cases = [{"workload": name} for name in ("a", "b", "{c}")]
    first, last = failed_baseline(cases[0]), failed_baseline(cases[2], "torn file")
    rows = [first, rung("baseline", "baseline", case=cases[1]), last]
    assert [(each.id, each.sentence.partition(":")[0], each.figures.get("reason")) for each in found(rows, "gain")] == [
        ("gain.no-baseline", "workload a", "no such file"),
        ("gain.no-baseline", "workload {c}", "torn file"),
        ("gain.none", "workload b", None),
    ]
    (alone,) = found([failed_baseline()], "gain")
    assert alone.sentence.startswith("The baseline failed (failed): no such file. There is nothing to compare with")


SLOWER = rung("x", "slower", False, gain=0.5)


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        ([], "No change was timed, so nothing is known of what is faster than the baseline."),
        ([rung("x", "failed", False, "failed", gain=None)],
         "No change was timed, so nothing is known of what is faster than the baseline."),
        ([SLOWER, rung("y", "inconclusive", False, gain=0.9, gain_low=0.5, gain_high=1.2)],
         "No change was accepted, and nothing could be decided of y (0.50–1.20). Run again on a quieter machine, or "
         "with more steps."),
        ([SLOWER, rung("y", "inconclusive", False, gain=1.0, gain_low=0.98, gain_high=1.04)],
         "No change made the step faster: the baseline is the best found. Tried: x and y."),
    ],
)  # fmt: skip
def test_the_best_is_found_only_where_all_that_was_tried_is_decided(tried, said):
    assert found([BASELINE, *tried], "gain")[0].sentence == said


def too_large(case=None):
    return rung("baseline", "out of memory", False, "out of memory", "40 GiB", case)


def first_that_fits(name="tf32", **values):
    return rung(name, "first that fits", speedup=1.0, speedup_low=1.0, speedup_high=1.0, **values)


def test_speedups_of_a_ladder_whose_baseline_is_too_large_are_over_the_first_rung_that_fits():
    rest = [rung("x", "inconclusive", False), first_that_fits(), bf16(), rung("fused", case={"optimizer": "fused"})]
    told, gained = found([too_large(), *rest], "gain")
    assert (told.id, told.figures) == ("gain.too-large", {"reason": "40 GiB", "first": "tf32"})
    assert told.sentence.startswith("The baseline is too large (40 GiB)")
    assert gained.id == "gain.faster"
    case = {"workload": "b"}
    named, _, _ = found([too_large(case), first_that_fits(case=case), BASELINE], "gain")
    assert named.sentence.startswith("workload b: the baseline is too large (40 GiB): speed-ups are over tf32")


def test_a_baseline_is_never_told_as_a_change_that_was_not_used():
    assert found([failed_baseline()], "ladder") == found([too_large()], "ladder") == []
    assert found([replace(BASELINE, verdict="inconclusive", accepted=False)], "ladder") == []


def again(case, low, high, speedup=1.5):
    return final(SETTINGS | case, speedup=speedup, speedup_low=low, speedup_high=high)


def test_a_speedup_that_is_withheld_is_told_by_both_measurements():
    top = bf16(speedup=2.0, speedup_low=1.9, speedup_high=2.1)
    rows = [first_that_fits("sdpa"), rung("tf32", case={"precision": "tf32"}), top]
    disputed = again({"precision": "bf16"}, 1.4, 1.6)
    (told,) = found([*rows, disputed], "gain")
    assert told.id == "gain.withheld"
    assert told.figures == {
        "first": "sdpa", "top": "bf16 autocast", "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1,
        "again": 1.5, "again_low": 1.4, "again_high": 1.6,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "speedups", "is_disputed"),
    [
        (1.4, 1.6, (1.9, 2.1), True),
        (1.4, 1.9, (1.9, 2.1), False),  # a point in common
        (2.1, 2.5, (1.9, 2.1), False),
        (2.2, 2.5, (1.9, 2.1), True),
        (None, 1.6, (1.9, 2.1), False),
        (2.5, None, (1.9, 2.1), False),
        (1.4, 1.6, (None, 2.1), False),
        (2.2, 2.5, (1.9, None), False),
    ],
)
def test_a_speedup_is_disputed_by_an_interval_apart_from_its_own(low, high, speedups, is_disputed):
    kept = [BASELINE, rung("tf32", case={"precision": "tf32"}),
            bf16(speedup_low=speedups[0], speedup_high=speedups[1])]  # fmt: skip
    assert climb_of(*kept, again({"precision": "bf16"}, low, high)).is_disputed is is_disputed


def test_of_two_ladders_only_the_one_that_is_disputed_is_withheld():
    rows = []
    for name in ("a", "b"):
        case = {"workload": name}
        rows += [rung("baseline", "baseline", case=case), bf16(case=case)]
    disputed = again({"precision": "bf16", "workload": "b"}, 1.0, 1.1)
    claimed, withheld = found([*rows, disputed], "gain")
    assert (claimed.id, withheld.id) == ("gain.faster", "gain.withheld")
    assert [each.sentence.partition(":")[0] for each in (claimed, withheld)] == ["workload a", "workload b"]


def test_ladders_of_steps_and_of_scripts_are_told_apart():
    script = [replace(BASELINE, between_runs=True), rung("fused", between_runs=True), final({"between_runs": True})]
    steps = [BASELINE, bf16(), final(SETTINGS)]
    rows = [*script, *steps]
    assert [(climb.is_script, climb.name) for climb in climbs(rows)] == [(True, ""), (False, "")], "each is alone"
    assert [climb.rows for climb in of_steps(rows)] == [steps[:2]]
    assert of_script(rows).rows == script[:2]
    assert of_script(rows).final is script[2]
    assert of_script(steps) is None
    assert not of_script(rows).is_disputed


def test_what_a_script_ended_with_is_its_final_configuration_or_the_last_that_was_accepted():
    def climb(*names, **first):
        rows = [replace(BASELINE, between_runs=True, **first)]
        return climb_of(*rows, *(rung(name, between_runs=True, code=f"{name}()") for name in names))

    assert climb("a", "b").top.change == "b"
    assert climb().top is climb("a", status="failed").top is None
    assert [row.change for row in climb("a", "b").there] == ["a", "b"]
    together = final({"between_runs": True}, code="b()")
    ended = climb_of(*climb("a", "b").rows, together)
    assert (ended.top, [row.change for row in ended.there]) == (together, ["b"]), "it took the place of a"


def test_ladders_that_could_not_begin():
    failed, large = failed_baseline({"workload": "a"}), too_large({"workload": "b"})
    assert failed_baselines([failed, large, BASELINE, bf16()]) == [failed]


def test_the_last_of_three_is_held_against_the_first():
    top = bf16("x", case={"optimizer": "y"}, step_ms=250.0, speedup=4.0, speedup_low=3.9, speedup_high=4.1)
    assert times_agree(climb_of(BASELINE, bf16(step_ms=900.0), top))
    assert not times_agree(climb_of(BASELINE, top, bf16(step_ms=900.0, speedup=4.0, speedup_low=3.9, speedup_high=4.1)))


def test_a_ladder_that_accepted_nothing_is_not_disputed():
    alone = replace(BASELINE, speedup=1.0, speedup_low=0.9, speedup_high=1.1)
    assert not climb_of(alone, again({}, 2.0, 3.0)).is_disputed
