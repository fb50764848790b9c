"""Each rule against rows made to trigger it, and against rows that must not: by ids and figures."""

import math
from dataclasses import replace

import pytest

from trainstep.kinds import CeilingRow, ControlRow, RungRow, StepRow, WorkloadRow
from trainstep.records import make_row
from trainstep.report.blocks import TOPICS
from trainstep.report.subjects import RULES, findings
from trainstep.report.subjects.ladder import recommended_flags
from trainstep.report.subjects.steps import analysed_step

SETTINGS = {"workload": "m", "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach", "compile": "off",
            "loss": "dense"}  # fmt: skip
CASE = SETTINGS | {"mode": "step", "repeat": 0}


def step(warmup=5, case=None, **changes):
    values = {
        "step_ms": 100.0, "step_low_ms": 99.0, "step_high_ms": 101.0, "step_mean_ms": 100.0, "first_step_ms": 105.0,
        "forward_ms": 30.0, "loss_ms": 2.0, "backward_ms": 60.0, "optimizer_ms": 8.0,
        "peak_gib": 4.0, "at_rest_gib": 1.5, "forward_peak_gib": 3.0, "backward_peak_gib": 4.0,
        "achieved_tflops": 30.0, "forward_issue_ms": 10.0, "throttled_by": "nothing",
    }  # fmt: skip
    return make_row(StepRow, CASE | {"warmup": warmup} | (case or {}), values | changes)


def rung(name, verdict="faster", kept=True, status="ok", reason="", case=None, **values):
    base = {"step_ms": 50.0, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "gain": 2.0,
            "gradient_error": 0.005, "error_budget": 0.02, "verdict": verdict, "kept": kept}  # fmt: skip
    return make_row(RungRow, SETTINGS | {"rung": name} | (case or {}), base | values, status=status, reason=reason)


def found(rows, topic):
    return [finding for finding in findings(rows) if finding.topic == topic]


def ids(rows, topic):
    return [finding.id for finding in found(rows, topic)]


def said(rows, topic):
    return " ".join(finding.sentence for finding in found(rows, topic))


def test_topics_have_an_order_and_every_finding_an_id_of_its_own():
    rows = [step(0, step_mean_ms=150.0), step(forward_issue_ms=29.9), rung("baseline", "baseline"),
            rung("x", "slower", False, gain=0.5), rung("y")]  # fmt: skip
    every = findings(rows)
    assert [each.topic for each in every] == sorted((each.topic for each in every), key=list(TOPICS).index)
    told = [each.id for each in every]
    assert {"gain.faster", "phases.longest", "launches.bound", "warm-up.needed", "ladder.slower"} <= set(told)
    assert len(told) == len(set(told))
    assert len(RULES) == len(set(RULES))


def test_the_largest_phase_is_named_with_its_share_of_what_the_phases_sum_to():
    (only,) = found([step(step_ms=93.0)], "phases")
    assert only.sentence == "Backward dominates: 60% of the phases together (60.0 ms of 100 ms), then forward with 30%."
    assert (only.id, only.figures["first"], only.figures["second"]) == ("phases.longest", "backward", "forward")
    assert (only.figures["first_share"], only.figures["second_share"]) == (0.6, 0.3)


@pytest.mark.parametrize("broken", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told(broken):
    row = step()
    (only,) = found([replace(row, samples={"training_loss": [2.0, 9e9, broken, broken]})], "loss")
    assert only.id == "loss.not-finite"
    assert only.figures == {"step": 3, "steps": 4, "row": "m in fp32"}
    assert found([replace(row, samples={"training_loss": [2.0, 1.0]})], "loss") == []
    (of_a_rung,) = found([replace(rung("bf16"), samples={"training_loss": [2.0, broken]})], "loss")
    assert of_a_rung.figures["row"] == "bf16"


PARTS = {"projections_tflop": 2.0, "feed_forward_tflop": 5.0, "attention_tflop": 1.0, "head_tflop": 2.0,
         "parameters": 9, "trainable_parameters": 9}  # fmt: skip


@pytest.mark.parametrize(
    ("backward", "case", "parts", "expected", "remark"),
    [
        (60.0, {}, PARTS, 2, None),
        (36.0, {}, {}, 2, "2×:"),
        (360.0, {}, {}, 2, "2×:"),
        (120.0, {"loss": "chunked"}, PARTS, 22 / 8, None),  # 22 TFLOP over the 8 of the blocks alone
        (84.0, {"checkpointing": "every-1"}, PARTS, 28 / 10, None),
        (156.0, {"checkpointing": "every-2", "loss": "chunked"}, PARTS, 30 / 8, None),
        (36.0, {"checkpointing": "every-2"}, PARTS, 2.8, "2.8× with checkpointing:"),
        (36.0, {"loss": "chunked"}, PARTS, 2.75, "2.8× with a chunked loss:"),
        (240.0, {"checkpointing": "every-2", "loss": "chunked"}, PARTS, 3.75, "with checkpointing and with a chunked"),
        (360.0, {"checkpointing": "selective"}, {}, 2, "2×:"),
        (360.0, {"checkpointing": "every-2"}, {}, None, None),  # a user's model, whose parts are unknown
        (360.0, {"checkpointing": "recursive"}, PARTS, None, None),
        (360.0, {}, {**PARTS, "trainable_parameters": 3}, None, None),
        (360.0, {"loss": "chunked"}, {**PARTS, "head_tflop": None}, None, None),
        (360.0, {"loss": "chunked"}, {**PARTS, "attention_tflop": None}, None, None),
    ],
)
def test_backward_is_held_against_what_the_matrix_products_of_this_step_make_it(
    backward, case, parts, expected, remark
):
    row = step(case={"batch": 4, "context": 512, **case}, backward_ms=backward)
    facts = make_row(WorkloadRow, {"workload": "m", "batch": 4, "context": 512}, parts)
    (only,) = found([row, facts], "phases")
    assert only.figures["is_odd"] is (remark is not None) is ("look there first" in only.sentence)
    assert only.figures["expected_backward_over_forward"] == (None if expected is None else pytest.approx(expected))
    assert remark is None or remark in only.sentence


def test_the_flops_of_another_shape_say_nothing():
    row = step(case={"batch": 4, "context": 512, "loss": "chunked"}, backward_ms=36.0)
    facts = make_row(WorkloadRow, {"workload": "m", "batch": 4, "context": 128}, PARTS)
    (only,) = found([row, facts], "phases")
    assert (only.figures["is_odd"], only.figures["expected_backward_over_forward"]) == (False, None)


def test_the_gain_has_its_interval_and_its_proof():
    (only,) = found([rung("baseline", "baseline", step_ms=100.0), rung("bf16 autocast")], "gain")
    assert only.id == "gain.faster"
    assert only.figures == {
        "rungs": ("bf16 autocast",), "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1,
        "gradient_error": 0.005, "error_budget": 0.02, "before_ms": 100.0, "after_ms": 50.0,
        "peak_before_gib": None, "peak_after_gib": None,
    }  # fmt: skip
    assert (
        "Bf16 autocast makes the step 2.00× faster (95 % interval within this run 1.90–2.10): 100 ms → 50.0 ms"
        in only.sentence
    )
    assert "off by 0.005 of 0.02 allowed" in only.sentence


def test_what_is_kept_for_its_memory_is_not_called_faster():
    smaller = rung("bf16 autocast", "inconclusive", speedup=0.97, speedup_low=0.9, speedup_high=1.05, peak_gib=2.0)
    (only,) = found([rung("baseline", "baseline", peak_gib=4.0), smaller], "gain")
    assert only.id == "gain.smaller"
    assert (only.figures["peak_before_gib"], only.figures["peak_after_gib"]) == (4.0, 2.0)
    assert "faster" not in only.sentence
    assert (
        "no difference in time that these samples can show (95 % interval within this run 0.90–1.05)" in only.sentence
    )
    assert "kept for what else it saves: peak memory 4.00 GiB → 2.00 GiB" in only.sentence
    both = said([rung("baseline", "baseline", peak_gib=4.0), rung("fused optimizer"), smaller], "gain")
    assert "kept for what else they save: peak memory 4.00 GiB → 2.00 GiB" in both


def test_no_gain_is_said_too():
    rows = [rung("baseline", "baseline"), rung("x", "slower", kept=False, gain=0.5)]
    assert ids(rows, "gain") == ["gain.none"]
    (slower,) = found(rows, "ladder")
    assert (slower.id, slower.figures["rung"], slower.figures["gain"]) == ("ladder.slower", "x", 0.5)
    assert slower.sentence == "Not used: x makes the step 2.00× slower here."
    assert recommended_flags(rows) == ""


def test_rungs_that_made_no_difference_did_not_run_or_were_wrong_say_why():
    rows = [
        rung("baseline", "baseline"),
        rung("w", "inconclusive", False),
        rung("x", "inconclusive"),  # kept for its memory
        rung("y", "wrong", False, "wrong", "off by 0.9"),
        rung("z", "out of memory", False, "out of memory", "no room"),
    ]
    told = [(each.id, each.figures["rung"], each.figures["reason"]) for each in found(rows, "ladder")]
    assert told == [
        ("ladder.inconclusive", "w", None),
        ("ladder.wrong", "y", "off by 0.9"),
        ("ladder.out-of-memory", "z", "no room"),
    ]
    assert "Not used: y (wrong): off by 0.9." in said(rows, "ladder")


def test_recommended_flags_are_those_that_changed():
    last = rung("compiled", case={"precision": "bf16", "compile": "blocks"})
    assert recommended_flags([rung("baseline", "baseline"), last]) == "--precision bf16 --compile blocks"


@pytest.mark.parametrize(("issue", "remarked"), [(10.0, False), (29.9, True), (None, False)])
def test_launch_bound_steps(issue, remarked):
    """Seen on an H200: 2.7B in fp32 issues its forward in a quarter of its time, small in bf16 in all of it."""
    told = found([step(forward_issue_ms=issue)], "launches")
    assert bool(told) is remarked
    assert not told or told[0].figures == {"forward_issue_ms": 29.9, "forward_ms": 30.0, "is_compiled": False}


@pytest.mark.parametrize(
    ("rate", "share", "judged"), [(60.0, 0.5, "high"), (12.0, 0.1, "low"), (150.0, 1.25, "beyond")]
)
def test_utilisation_is_against_the_measured_ceiling_of_the_same_precision(rate, share, judged):
    ceilings = [
        CeilingRow(operation="matmul", precision="bf16", tflops=800.0),
        CeilingRow(operation="matmul", precision="fp32", tflops=120.0),
        CeilingRow(operation="copy", gb_s=4000.0),
    ]
    (only,) = found([step(achieved_tflops=rate), *ceilings], "utilisation")
    assert only.id == f"utilisation.{judged}"
    assert only.figures == {"achieved_tflops": rate, "ceiling_tflops": 120.0, "share": pytest.approx(share)}
    assert f"{share:.0%} of what" in only.sentence


def test_what_is_compiled_already_is_not_told_to_compile():
    base = step(forward_issue_ms=29.9)
    assert "Larger batches, torch.compile or CUDA graphs" in said([base], "launches")
    compiled = replace(base, compile="blocks")
    assert found([compiled], "launches")[0].figures["is_compiled"] is True
    assert "Larger batches or CUDA graphs" in said([compiled], "launches")


@pytest.mark.parametrize(("precision", "advised"), [("fp32", True), ("tf32", True), ("bf16", False)])
def test_a_lower_precision_is_advised_where_there_is_one(precision, advised):
    ceiling = CeilingRow(operation="matmul", precision=precision, tflops=120.0)
    sentence = said([step(case={"precision": precision}, achieved_tflops=60.0), ceiling], "utilisation")
    assert ("a lower precision moves that limit" in sentence) is advised


def test_the_warmup_effect():
    cold, warm = step(0, step_mean_ms=150.0, first_step_ms=600.0), step(5)
    (only,) = found([cold, warm], "warm-up")
    assert only.id == "warm-up.needed"
    assert only.figures == {"excess": pytest.approx(0.5), "first_step_ms": 600.0, "step_ms": 100.0}
    assert found([step(0), warm], "warm-up") == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step_high_ms": 130.0}, [("noise.interval", {"width": pytest.approx(0.31)})]),
        ({"throttled_by": "power cap"}, [("noise.throttled", {"throttled_by": "power cap"})]),
        ({}, []),
    ],
)
def test_noise(changes, told):
    assert [(each.id, each.figures) for each in found([step(**changes)], "noise")] == told


def test_a_disturbed_rung_is_told_though_the_baseline_was_quiet_before_and_after():
    """Seen on two busy cores: a rung that takes 150 ms, measured as 3,051 ms [224–3,392]."""
    quiet = rung("baseline", "baseline", step_low_ms=48.0, step_high_ms=60.0)
    disturbed = rung("bf16", "slower", False, step_ms=3051.0, step_low_ms=224.0, step_high_ms=3392.0, gain=0.05)
    assert found([quiet], "noise") == []
    (only,) = found([quiet, disturbed, rung("few samples")], "noise")
    assert only.id == "noise.unsteady-rungs"
    assert only.figures == {"rows": 1, "of": 2, "low_ms": 224.0, "ms": 3051.0, "high_ms": 3392.0}


def test_rungs_that_were_measured_twice_are_told():
    (only,) = found([rung("baseline", "baseline", attempts=1), rung("bf16", attempts=2)], "noise")
    assert (only.id, only.figures) == ("noise.measured-again", {"rungs": ("bf16",)})


@pytest.mark.parametrize(("low", "high", "remarked"), [(0.9, 1.1, False), (0.4, 0.6, True), (None, None, False)])
def test_a_machine_that_changed_is_told_by_the_baseline_measured_again(low, high, remarked):
    control = ControlRow(**SETTINGS, first_ms=100.0, again_ms=50.0, ratio=0.5, ratio_low=low, ratio_high=high)
    told = found([control], "noise")
    assert bool(told) is remarked
    assert not told or told[0].figures == {"first_ms": 100.0, "again_ms": 50.0, "ratio": 0.5}


def test_a_grid_of_steps_is_not_one_analysed_step():
    other = step(case={"precision": "bf16"})
    assert analysed_step([step(), other]) is None
    assert findings([step(), other]) == []


def test_failed_steps_are_passed_over():
    assert findings([StepRow(**CASE, warmup=5, status="out of memory", reason="too big")]) == []
