"""A verdict holds if it is right and says something, and its columns are what it found."""

import math

import pytest

from trainstep.check.verdict import Deviation, Part, Verdict

NAMES = ("loss", "loss_allowed", "gradient", "gradient_allowed", "scale", "scale_allowed", "worst", "worst_allowed")


def deviation(**changes):
    return Deviation(**(dict.fromkeys(NAMES, 0.01) | {"worst_name": "w"} | changes))


RIGHT, VAGUE = deviation(), deviation(gradient_allowed=0.517)


@pytest.mark.parametrize(
    ("verdict", "is_right", "holds", "says"),
    [
        (Verdict(RIGHT), True, True, ""),
        (Verdict(RIGHT, VAGUE), True, False, " in float32 off by so much that 0.52 would be allowed"),
        (Verdict(VAGUE), True, False, " off by so much that 0.52 would be allowed"),
        (Verdict(deviation(gradient_allowed=0.499)), True, True, ""),
        (Verdict(deviation(gradient_allowed=0.5)), True, False, " off by so much that 0.5 would be allowed"),
        (Verdict(VAGUE, faults=("ranks differ",)), False, False, ""),
        (Verdict(RIGHT, parts={"update": Part(2.0, 1.0, "update")}), False, False, ""),
    ],
)
def test_what_says_nothing_does_not_hold(verdict, is_right, holds, says):
    assert (verdict.is_right, verdict.holds) == (is_right, holds)
    assert verdict.not_told.endswith(says)
    assert bool(verdict.not_told) == bool(says)


@pytest.mark.parametrize(
    ("float32", "notes", "exact"),
    [(None, {}, 0.01), (deviation(gradient=0.004), {}, 0.004), (None, {"not_in_float32": "out of memory"}, None)],
)
def test_columns_have_float32_s_error_where_it_was_compared(float32, notes, exact):
    parts = {"update": Part(0.3, 0.4), "moved": Part(9.0, math.inf)}
    columns = Verdict(RIGHT, float32, parts, notes=notes).columns()
    assert columns["float32_error"] == exact
    assert (columns["update_error"], columns["update_allowed"]) == (0.3, 0.4)
    assert (columns["moved_error"], columns["moved_allowed"]) == (9.0, None)
    assert notes.items() <= columns.items()
