"""Each rule against rows made to trigger it, and against rows that must not: by ids and figures."""

import contextlib
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.report.changes import carried, drifted, final
from tests.report.page import Page
from trainstep.base.errors import UsageError
from trainstep.report.findings import TOPICS
from trainstep.report.page import render
from trainstep.report.subjects import RULES, findings
from trainstep.report.subjects.climbs import climbs, recommended_flags
from trainstep.report.subjects.ladder import ERRORS
from trainstep.report.subjects.steps import STEPS, analysed_step
from trainstep.report.tables import make_table
from trainstep.rows import CeilingRow, ChangeRow, FitRow, ParallelRow, StepRow, WorkloadRow, row_of
from trainstep.rows.records import Times, make_row

SETTINGS = {"workload": "m", "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach", "compile": "off",
            "loss": "dense"}  # fmt: skip
CASE = SETTINGS | {"mode": "step", "repeat": 0}


def step(warmup=5, case=None, **changes):
    values = {
        "step_ms": 100.0, "step_low_ms": 99.0, "step_high_ms": 101.0, "step_mean_ms": 100.0, "first_step_ms": 105.0,
        "step_max_ms": 102.0, "forward_ms": 30.0, "loss_ms": 2.0, "backward_ms": 60.0, "optimizer_ms": 8.0,
        "peak_gib": 4.0, "at_rest_gib": 1.5, "forward_peak_gib": 3.0, "backward_peak_gib": 4.0,
        "achieved_tflops": 30.0, "forward_issue_ms": 10.0, "throttled_by": "nothing",
    }  # fmt: skip
    return make_row(StepRow, CASE | {"warmup": warmup} | (case or {}), values | changes)


def rung(name, verdict="faster", accepted=True, status="ok", reason="", case=None, **values):
    base = {"step_ms": 50.0, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "gain": 2.0,
            "gradient_error": 0.005, "error_budget": 0.02, "verdict": verdict, "accepted": accepted}  # fmt: skip
    case, values = SETTINGS | {"change": name} | (case or {}), base | carried(name) | values
    return make_row(ChangeRow, case, values, status=status, reason=reason)


BASELINE = rung("baseline", "baseline")


def found(rows, topic):
    return [finding for finding in findings(rows) if finding.topic == topic]


def ids(rows, topic):
    return [finding.id for finding in found(rows, topic)]


def said(rows, topic):
    return " ".join(finding.sentence for finding in found(rows, topic))


def test_topics_have_an_order_and_every_finding_an_id_of_its_own():
    rows = [step(0, n=2, first_step_ms=200.0, step_mean_ms=150.0), step(forward_issue_ms=29.9),
            rung("baseline", "baseline"), rung("x", "slower", False, gain=0.5), rung("y")]  # fmt: skip
    every = findings(rows)
    assert [each.topic for each in every] == sorted((each.topic for each in every), key=list(TOPICS).index)
    told = [each.id for each in every]
    assert {"gain.faster", "phases.longest", "launches.bound", "warm-up.needed", "ladder.slower"} <= set(told)
    assert len(told) == len(set(told))
    assert len(RULES) == len(set(RULES))


def test_the_largest_phase_is_named_with_its_share_of_what_the_phases_sum_to():
    (only,) = found([step(step_ms=93.0)], "phases")
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
        (44.9, {}, {}, 2, "2×:"),
        (45.1, {}, {}, 2, None),
        (104.9, {}, {}, 2, None),
        (105.1, {}, {}, 2, "2×:"),
        (120.0, {"loss": "chunked"}, PARTS, 22 / 8, None),  # 22 TFLOP over the 8 of the blocks alone
        (84.0, {"checkpointing": "every-1"}, PARTS, 28 / 10, None),
        (156.0, {"checkpointing": "every-1", "loss": "chunked"}, PARTS, 30 / 8, None),
        (36.0, {"checkpointing": "every-1"}, PARTS, 2.8, "2.8× with checkpointing:"),
        (36.0, {"loss": "chunked"}, PARTS, 2.75, "2.8× with a chunked loss:"),
        (240.0, {"checkpointing": "every-1", "loss": "chunked"}, PARTS, 3.75, "with checkpointing and with a chunked"),
        (360.0, {"checkpointing": "selective"}, {}, 2, "2×:"),
        (360.0, {"checkpointing": "every-1"}, {}, None, None),  # a user's model, whose parts are unknown
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
        "changes": ("bf16 autocast",), "unchecked": (), "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1,
        "gradient_error": 0.005, "error_budget": 0.02, "before_ms": 100.0, "after_ms": 50.0,
        "peak_before_gib": None, "peak_after_gib": None,
    }  # fmt: skip
    assert only.sentence.startswith("Bf16 autocast makes the step 2.00× faster (")


def bf16(name="bf16 autocast", case=None, **values):
    return rung(name, case={"precision": "bf16", **(case or {})}, **values)


def test_only_changes_that_are_still_there_count_and_only_what_was_checked_is_called_so():
    """TF32 is gone where bf16 came after it, and rows of earlier versions say nothing of an optimizer's updates."""
    fused = {"case": {"optimizer": "adamw-fused"}}
    rows = [rung("baseline", "baseline", step_ms=1000.0), rung("TF32 matmuls", case={"precision": "tf32"}),
            bf16(step_ms=200.0), bf16("fused optimizer", **fused, step_ms=100.0)]  # fmt: skip
    (only,) = found(rows, "gain")
    assert only.figures["changes"] == ("bf16 autocast", "fused optimizer")
    assert only.figures["unchecked"] == ("fused optimizer",)
    assert (only.figures["precision_change"], only.figures["after_precision"]) == ("bf16 autocast", 2.0)
    assert "(2.00× of it after bf16 autocast)" in only.sentence
    assert "The updates of fused optimizer were not checked" in only.sentence
    checked = [*rows[:-1], bf16("fused optimizer", **fused, update_error=1e-7, update_allowed=1e-6)]
    (only,) = found(checked, "gain")
    assert only.figures["unchecked"] == ()
    assert "Loss, gradients and updates pass" in only.sentence
    (only,) = found(rows[:3], "gain")
    assert "precision_change" not in only.figures, "nothing came after it"


def test_two_ladders_of_a_file_are_told_apart():
    rows = []
    for workload, speedup in (("a", 2.0), ("b", 3.0)):
        own = {"workload": workload}
        rows += [rung("baseline", "baseline", case=own, step_ms=100.0), bf16(case=own, speedup=speedup),
                 rung("x", "slower", False, case=own, gain=0.5)]  # fmt: skip
    gains = found(rows, "gain")
    assert [(each.figures["changes"], each.figures["speedup"]) for each in gains] == [
        (("bf16 autocast",), 2.0), (("bf16 autocast",), 3.0)
    ]  # fmt: skip
    assert [each.sentence.partition(":")[0] for each in gains] == ["workload a", "workload b"]
    assert len(found(rows, "ladder")) == 2
    assert {climb.name: len(climb.rows) for climb in climbs(rows)} == {"workload a": 3, "workload b": 3}
    twice = [*rows[:3], *rows[:3]]
    assert [climb.name for climb in climbs(twice)] == ["a", "a, ladder 2"]


def test_a_change_that_was_kept_at_its_second_try_is_not_called_unused():
    rows = [rung("baseline", "baseline"), rung("x", "inconclusive", False), rung("y", "inconclusive", False),
            rung("x, on the top"), rung("y, on the top", "slower", False, gain=0.5)]  # fmt: skip
    (only,) = found(rows, "ladder")
    assert (only.id, only.figures["change"]) == ("ladder.slower", "y, on the top")


def test_what_is_kept_for_its_memory_is_not_called_faster():
    smaller = rung("bf16 autocast", "inconclusive", speedup=0.97, speedup_low=0.9, speedup_high=1.05, peak_gib=2.0)
    (only,) = found([rung("baseline", "baseline", peak_gib=4.0), smaller], "gain")
    assert only.id == "gain.smaller"
    assert (only.figures["peak_before_gib"], only.figures["peak_after_gib"]) == (4.0, 2.0)
    assert "accepted for what else it saves: peak memory 4.00 GiB" in only.sentence
    (both,) = found([rung("baseline", "baseline", peak_gib=4.0), rung("fused optimizer"), smaller], "gain")
    assert both.figures["changes"] == ("fused optimizer", "bf16 autocast")


def test_no_gain_is_said_too():
    rows = [rung("baseline", "baseline"), rung("x", "slower", accepted=False, gain=0.5)]
    assert ids(rows, "gain") == ["gain.none"]
    (slower,) = found(rows, "ladder")
    assert (slower.id, slower.figures["change"], slower.figures["gain"]) == ("ladder.slower", "x", 0.5)
    assert slower.sentence == "Not used: x makes the step 2.00× slower here."
    assert "faster: the baseline is the best found." in said(rows, "gain")
    assert recommended_flags(rows) == ""


def test_rungs_that_made_no_difference_did_not_run_or_were_wrong_say_why():
    rows = [
        rung("baseline", "baseline"),
        rung("w", "inconclusive", False),
        rung("x", "inconclusive"),  # kept for its memory
        rung("y", "wrong", False, "wrong", "off by 0.9"),
        rung("z", "out of memory", False, "out of memory", "no room"),
    ]
    told = [(each.id, each.figures["change"], each.figures["reason"]) for each in found(rows, "ladder")]
    assert told == [
        ("ladder.inconclusive", "w", None),
        ("ladder.wrong", "y", "off by 0.9"),
        ("ladder.out-of-memory", "z", "no room"),
    ]


def test_recommended_flags_are_those_that_changed():
    last = rung("compiled", case={"precision": "bf16", "compile": "blocks"})
    assert recommended_flags([rung("baseline", "baseline"), last]) == "--precision bf16 --compile blocks"


@pytest.mark.parametrize(("precision", "advised"), [("fp32", True), ("tf32", True), ("bf16", False)])
def test_a_lower_precision_is_advised_where_there_is_one(precision, advised):
    ceiling = CeilingRow(operation="matmul", precision=precision, tflops=120.0)
    sentence = said([step(case={"precision": precision}, achieved_tflops=60.0), ceiling], "utilisation")
    assert ("a lower precision moves that limit" in sentence) is advised


@pytest.mark.parametrize(
    ("many", "row", "name"),
    [
        ("changes", partial(ChangeRow, change="bf16"), "bf16"),
        ("schemes", partial(ParallelRow, scheme="fsdp", world_size=2), "fsdp"),
        ("activations", partial(FitRow, form="every-1"), "every-1"),
        ("steps", partial(StepRow, workload="m", mode="forward"), "m"),
    ],
)
def test_noise_is_looked_for_wherever_something_was_timed(many, row, name):
    quiet, wide = (
        row(seed=0, times={"step": Times(10.0, 9.6, 10.5)}),
        row(seed=1, times={"step": Times(10.0, 9.4, 10.5)}),
    )
    assert found([quiet, quiet], "noise") == []
    (only,) = found([quiet, wide], "noise")
    assert only.id == f"noise.unsteady-{many}"
    assert (only.figures["rows"], only.figures["of"], only.figures["worst"]) == (1, 2, name)
    assert only.figures["width"] == pytest.approx(0.11)


@pytest.mark.parametrize(("width", "is_wild"), [(0.49, False), (0.51, True)])
def test_times_that_span_half_of_the_median_are_not_to_be_believed(width, is_wild):
    (only,) = found([rung("x", step_ms=100.0, step_low_ms=90.0, step_high_ms=90.0 + 100 * width)], "noise")
    assert ("before believing" in only.sentence) is is_wild


def test_rungs_at_the_power_cap_are_counted():
    """6 of 9 rungs of the 2.7B ladder were, and nothing said so."""
    slowed = [rung(f"r{place}", throttled_by="power cap", power_w=690.0) for place in range(6)]
    free = [rung("baseline", "baseline", throttled_by="nothing"), rung("a", throttled_by="nothing"), rung("b")]
    (only,) = found([*free, *slowed], "noise")
    assert (only.id, only.figures["rows"], only.figures["of"]) == ("noise.throttled-changes", 6, 8)
    assert (only.figures["power cap"], only.figures["slowed"]) == (6, tuple(each.change for each in slowed))
    assert found(free, "noise") == []


@pytest.mark.parametrize(
    ("low", "high", "is_claimed"), [(1.3, 1.5, False), (1.3, 1.9, True), (2.2, 3.0, False), (None, None, True)]
)
def test_a_speedup_that_is_not_found_again_in_turns_is_not_claimed(low, high, is_claimed):
    """By its gains the top was 8.86 times as fast as the first rung, on a busy machine; in turns with it 2.13 times."""
    top = bf16(speedup=2.0, speedup_low=1.9, speedup_high=2.1)
    again = {"speedup": low and 1.4, "speedup_low": low, "speedup_high": high}
    rows = [BASELINE, top, final(SETTINGS | {"precision": "bf16"}, **again)]
    (told,) = found(rows, "gain")
    assert told.id == ("gain.faster" if is_claimed else "gain.withheld")
    assert recommended_flags(rows) == ("--precision bf16" if is_claimed else "")
    page = render(rows)
    assert ("no speed-up is claimed" in page, "add these flags" in page) == (not is_claimed, is_claimed)


@pytest.mark.parametrize(
    ("in_turns", "speedup", "holds"), [(True, 2.0, True), (False, 2.0, False), (True, None, False)]
)
def test_gains_taken_in_turns_outlast_a_machine_that_changed(in_turns, speedup, holds):
    changed = 100.0, 50.0, 0.4, 0.6
    top = final(SETTINGS | {"precision": "bf16"}, **drifted("top", *changed, "bf16"), speedup=speedup)
    rows = [BASELINE, final(SETTINGS, **drifted("first", *changed)), BASELINE, bf16(in_turns=in_turns), top]
    first, second = found(rows, "noise")
    assert "Gains are of interleaved steps" not in first.sentence, "another ladder's"
    assert ("Gains are of interleaved steps" in second.sentence) is holds


def test_both_ends_that_drifted_are_named():
    """The first rung and the top are measured again; either may say that the machine changed."""
    changed = 100.0, 50.0, 0.4, 0.6
    both = drifted("first", *changed) | drifted("top", *changed, "bf16 autocast")
    rows = [BASELINE, bf16(), final(SETTINGS | {"precision": "bf16"}, **both)]
    assert [each.figures["change"] for each in found(rows, "noise")] == ["baseline", "bf16 autocast"]


def test_a_grid_of_steps_is_not_one_analysed_step():
    other = step(case={"precision": "bf16"})
    assert analysed_step([step(), other]) is None
    assert findings([step(), other]) == []


def test_a_step_that_is_wrong_or_was_not_judged_says_so_in_its_table():
    wrong = StepRow(**CASE, warmup=5, status="wrong", reason="off by 0.9", gradient_error=0.9, error_budget=0.01)
    unjudged = step(case={"precision": "bf16"}, not_checked="out of memory: 3 GiB")
    right = step(case={"precision": "tf32"}, gradient_error=0.001, error_budget=0.01)
    table = make_table(STEPS, [wrong, unjudged, right])
    cells = [dict(zip(table.columns, texts, strict=True)) for texts in table.texts()]
    outcomes = ["wrong: off by 0.9", "not checked: out of memory: 3 GiB", "ok"]
    assert [each["outcome"] for each in cells] == outcomes
    assert [(each["gradient error"], each["budget"]) for each in cells] == [
        ("0.90", "0.010"), ("–", "–"), ("0.0010", "0.010")
    ]  # fmt: skip
    assert "not checked: out of memory" in make_table(STEPS, [unjudged, unjudged]).caption, "alike: in the caption"


def test_errors_stand_beside_what_is_allowed_of_each():
    full = {"loss_error": 1e-4, "worst_gradient_error": 0.02, "worst_allowed": 0.04, "worst_parameter": "row 3 of head",
            "float32_error": 1e-6, "float32_allowed": 4e-6, "update_error": 9e-7, "update_allowed": 1e-6}  # fmt: skip
    rows = [rung("baseline", "baseline", gradient_error=0.0), bf16(**full), bf16("x", not_in_float32="out of memory")]
    page = Page(render(rows)).values["errors"]
    numbers = {name: float(value) for name, value in page["bf16 autocast"].items() if not name.startswith("worst_p")}
    own = {"gradient_error": 0.005, "error_budget": 0.02}
    assert numbers == {name: value for name, value in full.items() if name != "worst_parameter"} | own
    by_title, unknown = ({column.title: column.of(row) for column in ERRORS.columns} for row in rows[1:])
    assert by_title["Updates"].of.value == 1e-6
    assert by_title["Used at most"].text == "90%", "by the updates, of all that was compared"
    assert "out of memory" in unknown["The same in float32"].note


def test_failed_steps_are_passed_over():
    assert findings([StepRow(**CASE, warmup=5, status="out of memory", reason="too big")]) == []


def braced(value):
    if isinstance(value, str):
        return f"{value}{{rows.__class__}}"
    return [braced(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "name", ["cpu-tour", "h200-analyze-2.7B-4096", "h200-memory", "h200-residuals", "h200-allocations"]
)
def test_no_text_of_a_file_is_a_template(name):
    lines = Path(f"docs/results/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for section, name in sorted({(part, name) for row in rows for part in ("case", "values") for name in row[part]}):
        changed = [
            row | {section: {key: braced(each) if key == name else each for key, each in row[section].items()}}
            for row in rows
        ]
        if changed != rows:
            with contextlib.suppress(UsageError):  # where a rule needs a name that it knows
                findings([row_of(**row) for row in changed])
