"""Each rule against records made to trigger it, and against records that must not."""

import math
from dataclasses import replace

import pytest

from trainstep.kinds import row_of
from trainstep.report.analysed import analysed_step
from trainstep.report.findings import findings, recommended_flags

CASE = {"workload": "m", "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach", "compile": "off",
        "loss": "dense", "mode": "step", "repeat": 0}  # fmt: skip


def step(warmup=5, **changes):
    values = {
        "step_ms": 100.0, "step_low_ms": 99.0, "step_high_ms": 101.0, "step_mean_ms": 100.0, "first_step_ms": 105.0,
        "forward_ms": 30.0, "loss_ms": 2.0, "backward_ms": 60.0, "optimizer_ms": 8.0,
        "peak_gib": 4.0, "at_rest_gib": 1.5, "forward_peak_gib": 3.0, "backward_peak_gib": 4.0,
        "achieved_tflops": 30.0, "forward_issue_ms": 10.0, "throttled_by": "nothing",
    }  # fmt: skip
    return row_of("step", CASE | {"warmup": warmup}, values | changes)


def rung(name, verdict="faster", kept=True, status="ok", reason="", case=None, **values):
    base = {"step_ms": 50.0, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "gain": 2.0,
            "gradient_error": 0.005, "error_budget": 0.02, "verdict": verdict, "kept": kept}  # fmt: skip
    return row_of("rung", CASE | {"rung": name} | (case or {}), base | values, status=status, reason=reason)


def said(records, topic):
    return " ".join(finding.sentence for finding in findings(records) if finding.topic == topic)


def test_the_largest_phase_is_named_with_its_share_of_what_the_phases_sum_to():
    sentence = said([step(step_ms=93.0)], "phases")
    assert sentence == "Backward dominates: 60% of the phases together (60.0 ms of 100 ms), then forward with 30%."


@pytest.mark.parametrize("broken", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told(broken):
    row = step()
    diverged = replace(row, samples={"training_loss": [2.0, 9e9, broken, broken]})
    assert said([diverged], "loss").startswith("The loss is not finite from step 3 of 4 on (m in fp32)")
    assert said([replace(row, samples={"training_loss": [2.0, 1.0]})], "loss") == ""


PARTS = {"projections_tflop": 2.0, "feed_forward_tflop": 5.0, "attention_tflop": 1.0, "head_tflop": 2.0,
         "parameters": 9, "trainable_parameters": 9}  # fmt: skip


@pytest.mark.parametrize(
    ("backward", "case", "parts", "remark"),
    [
        (60.0, {}, PARTS, None),
        (36.0, {}, {}, "2×:"),
        (360.0, {}, {}, "2×:"),
        (120.0, {"loss": "chunked"}, PARTS, None),  # 22 TFLOP over the 8 of the blocks alone
        (84.0, {"checkpointing": "every-1"}, PARTS, None),  # 28 over 10
        (156.0, {"checkpointing": "every-2", "loss": "chunked"}, PARTS, None),  # 30 over 8
        (36.0, {"checkpointing": "every-2"}, PARTS, "2.8× with checkpointing:"),
        (36.0, {"loss": "chunked"}, PARTS, "2.8× with a chunked loss:"),
        (240.0, {"checkpointing": "every-2", "loss": "chunked"}, PARTS, "3.8× with checkpointing and with a chunked"),
        (360.0, {"checkpointing": "selective"}, {}, "2×:"),
        (360.0, {"checkpointing": "every-2"}, {}, None),  # a user's model, whose parts are unknown
        (360.0, {"checkpointing": "recursive"}, PARTS, None),
        (360.0, {}, {**PARTS, "trainable_parameters": 3}, None),
    ],
)
def test_backward_is_held_against_what_the_matrix_products_of_this_step_make_it(backward, case, parts, remark):
    base = step(backward_ms=backward)
    row = replace(base, case={**base.case, "batch": 4, "context": 512, **case})
    facts = row_of("workload", {"workload": "m", "batch": 4, "context": 512}, parts)
    sentence = said([row, facts], "phases")
    assert ("look there first" in sentence) is (remark is not None)
    assert f"would make it {remark}" in sentence or remark is None


def test_the_flops_of_another_shape_say_nothing():
    base = step(backward_ms=36.0)
    row = replace(base, case={**base.case, "batch": 4, "context": 512, "loss": "chunked"})
    facts = row_of("workload", {"workload": "m", "batch": 4, "context": 128}, PARTS)
    assert "look there first" not in said([row, facts], "phases")


def test_the_gain_has_its_interval_and_its_proof():
    sentence = said([rung("baseline", "baseline", step_ms=100.0), rung("bf16 autocast")], "gain")
    assert "Bf16 autocast makes the step 2.00× faster (95 % interval 1.90–2.10): 100 ms → 50.0 ms" in sentence
    assert "off by 0.005 of 0.02 allowed" in sentence


def test_what_is_kept_for_its_memory_is_not_called_faster():
    smaller = rung("bf16 autocast", "inconclusive", speedup=0.97, speedup_low=0.9, speedup_high=1.05, peak_gib=2.0)
    sentence = said([rung("baseline", "baseline", peak_gib=4.0), smaller], "gain")
    assert "faster" not in sentence
    assert "no difference in time that these samples can show (95 % interval 0.90–1.05)" in sentence
    assert "kept for what else it saves: peak memory 4.00 GiB → 2.00 GiB" in sentence
    both = said([rung("baseline", "baseline", peak_gib=4.0), rung("fused optimizer"), smaller], "gain")
    assert "kept for what else they save: peak memory 4.00 GiB → 2.00 GiB" in both


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
        row_of("ceiling", {"what": "matmul bf16"}, {"tflops": 800.0}),
        row_of("ceiling", {"what": "matmul fp32"}, {"tflops": 120.0}),
    ]
    sentence = said([step(achieved_tflops=rate), *ceilings], "utilisation")
    assert text in sentence
    assert ("not matrix products at full speed" in sentence) is (rate < 42)


def test_what_is_compiled_already_is_not_told_to_compile():
    base = step(forward_issue_ms=29.9)
    assert "Larger batches, torch.compile or CUDA graphs" in said([base], "launches")
    compiled = replace(base, case={**base.case, "compile": "blocks"})
    assert "Larger batches or CUDA graphs" in said([compiled], "launches")


@pytest.mark.parametrize(
    ("precision", "rate", "judgement"),
    [
        ("fp32", 60.0, "the matrix products set the pace; a lower precision moves that limit."),
        ("bf16", 60.0, "the matrix products set the pace."),
        ("fp32", 150.0, "more than can be, so the machine was slower when the large product was measured."),
    ],
)
def test_what_utilisation_means(precision, rate, judgement):
    base = step(achieved_tflops=rate)
    row = replace(base, case={**base.case, "precision": precision})
    ceiling = row_of("ceiling", {"what": f"matmul {precision}"}, {"tflops": 120.0})
    assert said([row, ceiling], "utilisation").endswith(judgement)


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
    control = row_of(
        "control", CASE, {"first_ms": 100.0, "again_ms": 50.0, "ratio": 0.5, "ratio_low": low, "ratio_high": high}
    )
    assert ("The machine changed" in said([control], "noise")) is remarked


def test_a_grid_of_steps_is_not_one_analysed_step():
    other = row_of("step", CASE | {"warmup": 5, "precision": "bf16"}, step().values)
    assert analysed_step([step(), other]) is None
    assert findings([step(), other]) == []


def test_failed_steps_are_passed_over():
    assert findings([row_of("step", CASE | {"warmup": 5}, status="out of memory", reason="too big")]) == []
