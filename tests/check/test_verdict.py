"""A verdict holds if it is right and says something, and its columns are what it found."""

import math
from dataclasses import replace

import pytest

from trainstep.check.verdict import Deviation, Part, Verdict

NAMES = ("loss", "loss_allowed", "gradient", "gradient_allowed", "scale", "scale_allowed", "worst", "worst_allowed")


def deviation(**changes):
    return Deviation(**(dict.fromkeys(NAMES, 0.01) | {"worst_name": "w"} | changes))


RIGHT, VAGUE, WRONG = deviation(), deviation(gradient_allowed=0.517), deviation(worst=0.12345)
UPDATE = Part(0.001, 0.002, "update")


@pytest.mark.parametrize(
    ("verdict", "wrong", "says"),
    [
        (Verdict(RIGHT), "", ""),
        (Verdict(RIGHT, RIGHT, {"update": UPDATE}), "", ""),
        (Verdict(RIGHT, VAGUE), "", " in float32 off by so much that 0.52 would be allowed"),
        (Verdict(VAGUE), "", " off by so much that 0.52 would be allowed"),
        (Verdict(deviation(gradient_allowed=0.499)), "", ""),
        (Verdict(deviation(gradient_allowed=0.5)), "", " off by so much that 0.5 would be allowed"),
        (Verdict(VAGUE, faults=("ranks differ",)), "ranks differ", ""),
        (Verdict(WRONG, RIGHT), "w off by 0.12 of 0.01", ""),
        (Verdict(RIGHT, WRONG), "in float32, w off by 0.12 of 0.01", ""),
        (Verdict(RIGHT, parts={"update": replace(UPDATE, error=0.12345)}), "update off by 0.12 of 0.002", ""),
        (
            Verdict(WRONG, WRONG, {"update": replace(UPDATE, error=0.12345)}),
            "in float32, w off by 0.12 of 0.01; w off by 0.12 of 0.01; update off by 0.12 of 0.002",
            "",
        ),
    ],
)
def test_a_verdict_says_each_part_that_is_wrong_and_what_says_nothing_does_not_hold(verdict, wrong, says):
    assert (verdict.is_right, verdict.holds, str(verdict)) == (not wrong, not wrong and not says, wrong)
    assert verdict.not_told.endswith(says)
    assert bool(verdict.not_told) == bool(says)
    assert verdict.columns()["not_checked"] == (verdict.not_told or None)


@pytest.mark.parametrize(
    ("float32", "notes", "exact"),
    [
        (None, {}, 0.01),
        (deviation(gradient=0.004), {"compared": "in eval mode"}, 0.004),
        (None, {"not_in_float32": "out of memory"}, None),
    ],
)
def test_columns_have_float32_s_error_where_it_was_compared(float32, notes, exact):
    parts = {"update": Part(0.3, 0.4), "moved": Part(9.0, math.inf)}
    columns = Verdict(RIGHT, float32, parts, notes=notes).columns()
    assert (columns["float32_error"], columns["gradient_error"], columns["worst_parameter"]) == (exact, 0.01, "w")
    assert columns["float32_allowed"] == (None if exact is None else 0.01)
    assert {"not_in_float32", "compared", "batches"} & columns.keys() == notes.keys()
    assert (columns["update_error"], columns["update_allowed"]) == (0.3, 0.4)
    assert (columns["moved_error"], columns["moved_allowed"]) == (9.0, None)
    assert notes.items() <= columns.items()
