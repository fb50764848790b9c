"""Each rule against records made to trigger it, and against records that must not."""

import math
from dataclasses import replace

import pytest

from trainstep.report.findings import analysed_step, findings, recommended_flags
from trainstep.report.records import Record

CASE = {"workload": "m", "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach", "compile": "off",
        "loss": "dense", "mode": "step", "repeat": 0}  # fmt: skip


def step(warmup=5, **changes):
    values = {
        "step_ms": 100.0, "step_low_ms": 99.0, "step_high_ms": 101.0, "step_mean_ms": 100.0, "first_step_ms": 105.0,
        "forward_ms": 30.0, "loss_ms": 2.0, "backward_ms": 60.0, "optimizer_ms": 8.0,
        "peak_gib": 4.0, "at_rest_gib": 1.5, "forward_peak_gib": 3.0, "backward_peak_gib": 4.0,
        "achieved_tflops": 30.0, "forward_issue_ms": 10.0, "throttled_by": "nothing",
    }  # fmt: skip
    return Record("step", CASE | {"warmup": warmup}, values | changes)


def rung(name, verdict="faster", kept=True, status="ok", reason="", case=None, **values):
    base = {"step_ms": 50.0, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "gain": 2.0,
            "gradient_error": 0.005, "error_budget": 0.02, "verdict": verdict, "kept": kept}  # fmt: skip
    return Record("rung", CASE | {"rung": name} | (case or {}), base | values, status=status, reason=reason)


def said(records, topic):
    return " ".join(finding.sentence for finding in findings(records) if finding.topic == topic)


def test_the_largest_phase_is_named_with_its_share():
    sentence = said([step()], "phases")
    assert sentence.startswith("Backward dominates: 60% of the step (60.0 ms of 100 ms), then forward with 30%.")


@pytest.mark.parametrize("broken", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told(broken):
    row = step()
    diverged = replace(row, samples={"training_loss": [2.0, 9e9, broken, broken]})
    assert said([diverged], "loss").startswith("The loss is not finite from step 3 of 4 on (m in fp32)")
    assert said([replace(row, samples={"training_loss": [2.0, 1.0]})], "loss") == ""


@pytest.mark.parametrize(("backward", "remarked"), [(60.0, False), (36.0, True), (360.0, True)])
def test_an_odd_ratio_of_backward_to_forward_is_remarked_on(backward, remarked):
    assert ("look there first" in said([step(backward_ms=backward)], "phases")) is remarked


def test_the_gain_has_its_interval_and_its_proof():
    sentence = said([rung("baseline", "baseline", step_ms=100.0), rung("bf16 autocast")], "gain")
    assert "Bf16 autocast makes the step 2.00× faster (95 % interval 1.90–2.10): 100 ms → 50.0 ms" in sentence
    assert "off by 0.005 of 0.02 allowed" in sentence


def test_what_is_kept_for_its_memory_is_not_called_faster():
    smaller = rung("bf16 autocast", "inconclusive", speedup=0.97, speedup_low=0.9, speedup_high=1.05, peak_gib=2.0)
    sentence = said([rung("baseline", "baseline", peak_gib=4.0), smaller], "gain")
    assert "faster" not in sentence
    assert "no difference in time that these samples can show (95 % interval 0.90–1.05)" in sentence
    assert "peak memory 4.00 GiB → 2.00 GiB" in sentence


def test_no_gain_is_said_too():
    records = [rung("baseline", "baseline"), rung("x", "slower", kept=False, gain=0.5)]
    assert "No change on the ladder made the step faster" in said(records, "gain")
    assert said(records, "ladder") == "Not used: x makes the step 2.00× slower here."
    assert recommended_flags(records) == ""


def test_rungs_that_did_not_run_or_were_wrong_say_why():
    records = [rung("baseline", "baseline"), rung("y", "wrong", False, "wrong", "off by 0.9")]
    assert "Not used: y (wrong): off by 0.9." in said(records, "ladder")


def test_recommended_flags_are_those_that_changed():
    last = rung("compiled", case={"precision": "bf16", "compile": "blocks"})
    assert recommended_flags([rung("baseline", "baseline"), last]) == "--precision bf16 --compile blocks"


@pytest.mark.parametrize(("issue", "remarked"), [(10.0, False), (29.9, True), (None, False)])
def test_launch_bound_steps(issue, remarked):
    """Seen on an H200: 2.7B in fp32 issues its forward in a quarter of its time, small in bf16 in all of it."""
    assert ("launches set the pace" in said([step(forward_issue_ms=issue)], "launches")) is remarked


@pytest.mark.parametrize(("rate", "text"), [(60.0, "50% of what"), (12.0, "10% of what")])
def test_utilisation_is_against_the_measured_ceiling_of_the_same_precision(rate, text):
    ceilings = [
        Record("ceiling", {"what": "matmul bf16"}, {"tflops": 800.0}),
        Record("ceiling", {"what": "matmul fp32"}, {"tflops": 120.0}),
    ]
    sentence = said([step(achieved_tflops=rate), *ceilings], "utilisation")
    assert text in sentence
    assert ("not matrix products at full speed" in sentence) is (rate < 42)


@pytest.mark.parametrize(
    ("rest", "owner"), [(1.5, "activations and temporaries"), (3.0, "weights and optimizer state")]
)
def test_who_owns_the_peak(rest, owner):
    sentence = said([step(at_rest_gib=rest)], "memory")
    assert sentence.startswith("Memory peaks in backward at 4.00 GiB")
    assert f": {owner} own most of it" in sentence


def test_the_warmup_effect():
    cold, warm = step(0, step_mean_ms=150.0, first_step_ms=600.0), step(5)
    assert "the mean would be 50% too high: the first step took 600 ms" in said([cold, warm], "warm-up")
    assert said([step(0), warm], "warm-up") == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step_high_ms": 130.0}, "spans 31% of its median"),
        ({"throttled_by": "power cap"}, "slowed by its power cap"),
        ({}, ""),
    ],
)
def test_noise(changes, text):
    found = said([step(**changes)], "noise")
    assert text in found
    assert bool(text) is bool(found)


def test_a_disturbed_rung_is_told_though_the_baseline_was_quiet_before_and_after():
    """Seen on two busy cores: a rung that takes 150 ms, measured as 3,051 ms [224–3,392]."""
    quiet = rung("baseline", "baseline", step_low_ms=48.0, step_high_ms=60.0)
    disturbed = rung("bf16", "slower", False, step_ms=3051.0, step_low_ms=224.0, step_high_ms=3392.0, gain=0.05)
    assert said([quiet], "noise") == ""
    sentence = said([quiet, disturbed, rung("few samples")], "noise")
    assert "Unsteady times in 1 of 2 rungs" in sentence
    assert "at worst 224 ms to 3,392 ms around 3,051 ms" in sentence


@pytest.mark.parametrize(("low", "high", "remarked"), [(0.9, 1.1, False), (0.4, 0.6, True), (None, None, False)])
def test_a_machine_that_changed_is_told_by_the_baseline_measured_again(low, high, remarked):
    control = Record(
        "control", CASE, {"first_ms": 100.0, "again_ms": 50.0, "ratio": 0.5, "ratio_low": low, "ratio_high": high}
    )
    assert ("The machine changed" in said([control], "noise")) is remarked


def test_a_grid_of_steps_is_not_one_analysed_step():
    other = Record("step", CASE | {"warmup": 5, "precision": "bf16"}, step().values)
    assert analysed_step([step(), other]) is None
    assert findings([step(), other]) == []


def test_failed_steps_are_passed_over():
    assert findings([Record("step", CASE | {"warmup": 5}, status="out of memory", reason="too big")]) == []
