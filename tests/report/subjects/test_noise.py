"""Figures of one report that contradict one another, as a disturbed machine makes them."""

import pytest

from tests.report.test_findings import SETTINGS, found, rung, step
from trainstep.report.page import render
from trainstep.rows import CeilingRow, FamilyRow, ProfileRow
from trainstep.rows.records import make_row

SUMMARY = {"module_coverage": 1.0, "phase_coverage": 1.0}


def profile(*samples, case=SETTINGS, **values):
    values = {**SUMMARY, "step_ms": sorted(samples)[len(samples) // 2], **values}
    return make_row(ProfileRow, case, values, samples={"step": samples})


def baseline(low, median, high, **case):
    return rung("baseline", "baseline", case=case, step_ms=median, step_low_ms=low, step_high_ms=high)


def noise(*rows):
    return {finding.id: finding for finding in found(rows, "noise")}


def test_one_step_that_was_measured_as_three_things_is_told():
    only = noise(step(), profile(9.0, 9.5, 10.0, 10.5, 12.0), baseline(7.8, 8.0, 8.2))["noise.same-step"]
    assert only.figures == {
        "the_phases_ms": 100.0, "the_profile_ms": 10.0, "the_ladder's_baseline_ms": 8.0, "apart": 12.5
    }  # fmt: skip


@pytest.mark.parametrize(("low", "is_told"), [(110.9, False), (111.3, True), (150.0, True), (205.0, True)])
def test_measurements_of_one_step_disagree_from_a_tenth_apart(low, is_told):
    """The phases' interval ends at 101 ms: the ladder's begins 9.8 %, 10.2 %, 49 % and 103 % above that."""
    told = noise(step(), baseline(low, low + 1, low + 2))
    assert ("noise.same-step" in told) is is_told


@pytest.mark.parametrize(
    "rows",
    [
        [baseline(95.0, 97.0, 99.5)],  # overlaps with the 99.0 to 101.0 of the phases
        [baseline(90.5, 91.0, 92.0)],  # does not, but by less than a tenth
        [profile(50.0, 50.0, 50.0, 50.0, 95.0)],  # five samples, one of which reaches the others
        [profile(50.0, 51.0)],  # too few to enclose anything
        [profile(10.0, 10.0, 10.0, 10.0, 10.0, case={**SETTINGS, "precision": "bf16"})],
        [baseline(7.8, 8.0, 8.2, loss="chunked")],
    ],
)
def test_what_noise_or_other_settings_explain_is_not(rows):
    assert "noise.same-step" not in noise(step(), *rows)


def family(name, phase, tflops, share=0.5, gb_s=None):
    return FamilyRow(**SETTINGS, phase=phase, family=name, tflops=tflops, gb_s=gb_s, share=share, ms=1.0, calls=1.0,
                     ceiling_precision="fp32")  # fmt: skip


CEILINGS = [
    CeilingRow(operation="matmul", precision="fp32", tflops=100.0),
    CeilingRow(operation="copy", gb_s=10.0),
]


def test_the_table_marks_what_cannot_be():
    shown = profile(10.0, cost_coverage=1.0, kernels=1.0, busy_ms=1.0, profiled_step_ms=10.0, n=7, profiled_n=3)

    def cell(part):
        html = render([*CEILINGS, shown, family("matmul", "step", part)])
        return next(line for line in html.splitlines() if 'data-column="of_limit"' in line)

    assert 'class="bad' in cell(120.0)
    assert 'class="bad' not in cell(99.0)
