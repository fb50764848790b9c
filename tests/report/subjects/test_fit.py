"""What the page says of a step that was made to fit, on both sides of each threshold."""

from dataclasses import replace

import pytest

from tests.report.page import Page
from trainstep.plan.fit import ENOUGH
from trainstep.report.page import render
from trainstep.report.subjects.fit import PROVEN, fit_findings, form_of
from trainstep.rows import FitRow
from trainstep.rows.row import Times

CASE = {"workload": "m", "context": 128, "precision": "fp32"}
SAMPLES = [100.0 + step / 10 for step in range(10)]


def row(form, peak, ms=100.0, **more):
    samples = {"step": [ms * sample / 100 for sample in SAMPLES]}
    return FitRow(**CASE, form=form, peak_gib=peak, times={"step": Times(ms)}, samples=samples, budget_gib=7.0, **more)


FIT = row(
    *("fit", 6.9), round=1, checkpointing="@fit.json", predicted_gib=6.8, prediction_error=-0.014, predicted_ms=104.0,
    time_error=0.04, blocks_kept=3, blocks_again=5, host_gib=1.5, policy="fit.json", choices=("computed again",),
)  # fmt: skip
BESIDE = [row("all again", 5.0), row("plain", 10.0), FIT, row("every-1", 5.0, 130.0), row("selective", 8.0, 90.0)]


def ids(rows):
    return [each.id for each in fit_findings(rows)]


def test_a_fit_is_told_with_its_prediction_and_how_to_repeat_it():
    (said,) = fit_findings([FIT])
    assert said.id == "fit.fits"
    assert said.figures == {
        "budget_gib": 7.0, "peak_gib": 6.9, "predicted_gib": 6.8, "predicted_ms": 104.0, "prediction_error": -0.014,
        "time_error": 0.04, "blocks_kept": 3, "blocks_again": 5, "step_ms": 100.0, "host_gib": 1.5,
    }  # fmt: skip
    assert said.sentence.endswith("1.50 GiB are in host memory. --checkpointing @fit.json repeats it.")


def test_what_does_not_fit_is_no_fit():
    assert ids([replace(FIT, peak_gib=7.1)]) == ["fit.too-large"]
    assert ids([replace(FIT, peak_gib=7.1), replace(FIT, round=2)]) == ["fit.fits"]
    assert form_of(replace(FIT, round=2)) == "fit, corrected 1×"


@pytest.mark.parametrize(
    ("peak", "time", "said"),
    [
        (0.029, 0.069, None),
        (-0.031, 0.0, "misses by 3.1% of the peak."),
        (0.0, 0.071, "misses by 7.1% of the time."),
        (0.04, -0.08, "misses by 4.0% of the peak and 8.0% of the time."),
    ],
)
def test_predictions_that_are_off(peak, time, said):
    _, *found = fit_findings([replace(FIT, prediction_error=peak, time_error=time)])
    assert [each.sentence for each in found] == ([f"The prediction of the chosen step {said}"] if said else [])


def test_a_choice_that_was_not_shown_to_be_the_best():
    assert PROVEN == ENOUGH, "what the solver stops at is what counts as proven"
    assert ids([replace(FIT, gap=0.019)]) == ["fit.fits"]
    _, said = fit_findings([replace(FIT, gap=0.042)])
    assert (said.id, said.figures) == ("fit.unproven", {"gap": 0.042})


def test_each_budget_is_told_of():
    roomy = replace(FIT, budget_gib=9.0, peak_gib=8.5, checkpointing="@fit-2.json", policy="fit-2.json")
    corrected = [replace(FIT, peak_gib=7.1), replace(FIT, round=2), roomy]
    said = [found.sentence for found in fit_findings(corrected) if found.id == "fit.fits"]
    assert [each.split(":")[0] for each in said] == ["The step fits 7.00 GiB", "The step fits 9.00 GiB"]


def test_the_fastest_policy_that_fits_stands_beside_it():
    *_, last = fit_findings(BESIDE)
    assert last.id == "fit.beside"
    assert (last.figures["other_ms"], last.figures["speedup"]) == (130.0, pytest.approx(1.3))
    slower = fit_findings([*BESIDE[:3], row("every-1", 5.0, 80.0)])[-1]
    assert slower.figures["speedup"] == pytest.approx(0.8)
    assert slower.sentence.endswith("Take that one here: --checkpointing every-1.")
    alike = [*BESIDE[:3], row("every-1", 5.0, 100.0)]
    assert "no difference" in fit_findings(alike)[-1].sentence


def test_the_page_has_its_section():
    page = render(BESIDE)
    assert "#fit" in Page(page).anchors
    assert "computed again" in page
