"""The ladder's rules: which ladder is meant, which changes are still there, and what came after a precision."""

from dataclasses import replace

from tests.report.test_findings import bf16, found, rung
from trainstep.report.subjects.ladder_findings import after, after_precision, changes, climbs

BASELINE = rung("baseline", "baseline", step_ms=1000.0)


def test_ladders_are_told_apart_by_how_they_begin():
    rows = []
    for first in ("fp32", "tf32"):
        rows += [rung("baseline", "baseline", case={"precision": first}), bf16()]
    assert list(climbs(rows)) == ["precision fp32", "precision tf32"]


def test_a_change_of_two_settings_is_there_while_one_of_them_is():
    first = rung("x", case={"precision": "tf32", "attention": "ours"})
    later = bf16(case={"attention": "ours"})
    assert changes([BASELINE, first, later]) == [(first, ["precision", "attention"]), (later, ["precision"])]
    assert changes([BASELINE, first, bf16()]) == [(bf16(), ["precision", "attention"])]


def test_what_came_after_a_precision_is_said_and_needs_both_times():
    kept = [BASELINE, bf16(step_ms=200.0), bf16("fused", case={"optimizer": "adamw-fused"}, step_ms=100.0)]
    assert after_precision(kept) == {"precision_rung": "bf16 autocast", "after_precision": 2.0}
    (told,) = found(kept, "gain")
    assert "(2.00× of it after bf16 autocast)" in told.sentence
    untimed = [replace(each, times={}) for each in kept]
    assert after_precision([*kept[:2], untimed[2]]) is after_precision([BASELINE, untimed[1], kept[2]]) is None


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
