"""What the first screen claims agrees with the rows: cards with their sentences, headlines with what was measured."""

import re
from dataclasses import replace

import pytest

from tests.report.changes import BY_NAME, carried
from tests.report.subjects.test_script_ladder import BASELINE as SCRIPT
from tests.report.subjects.test_script_ladder import row as script_rung
from tests.report.test_summary import PROFILE, SHAPE, finding, first
from trainstep.base import advice
from trainstep.base.config import PHASES
from trainstep.report.blocks import Cards, Headline
from trainstep.report.cards import CLAIMS, cards
from trainstep.report.headlines import headlines
from trainstep.report.subjects import findings
from trainstep.rows import (
    AttentionRow,
    ChangeRow,
    FamilyRow,
    ParallelRow,
    PeakRow,
    PieceRow,
    ProfileRow,
    RatioRow,
    ScriptRow,
    StepRow,
)
from trainstep.rows.records import Times

CASE = {"workload": "m", "precision": "fp32"}
STEP = StepRow(**CASE, mode="step", warmup=3, times=dict.fromkeys((*PHASES, "step"), Times(5.0)), n=9, peak_gib=4.0)


def card(rows, begin):
    """The card of the page whose claim begins so."""
    shown = first(rows, Cards)
    return next((each for each in (shown.cards if shown else ()) if each.claim.startswith(begin)), None)


def one_card(told, rows=(PROFILE, STEP)):
    """That of one finding alone."""
    (only,) = cards(rows, [told], []).cards
    return only


# ---- claims


def softmax(faster):
    """Pieces whose softmax has a fifth of the scores' FLOPs, and is so many times faster."""
    softmax = PieceRow(**CASE, phase="forward", piece="softmax", ms=1.0, main_ms=1.0, main_tflop=1.0)
    return [PROFILE, softmax, replace(softmax, piece="scores", ms=faster, main_ms=faster, main_tflop=5.0)]


def test_softmax_is_a_card_only_where_it_is_slow():
    assert card(softmax(0.5), "Softmax takes long") is not None
    assert card(softmax(10.0), "Softmax takes long") is None


def test_communication_is_claimed_with_what_is_hidden_of_it():
    rows = [replace(PROFILE, communication_ms=10.0, communication_overlapped_ms=9.0)]
    told = card(rows, "90% of communication is hidden by compute")
    assert told.figure == "1.00 ms"


@pytest.mark.parametrize(
    ("precision", "action"), [("fp32", BY_NAME["TF32 matmuls"].line.code), ("tf32", ""), ("bf16", "")]
)
def test_tf32_is_advised_only_to_a_step_that_is_not_in_it(precision, action):
    profile = replace(PROFILE, precision=precision)
    family = FamilyRow(workload="m", precision=precision, phase="step", family="FP32 SIMT matmul", ms=5.0, share=0.33)
    assert card([profile, family], "Products run in float32").action == action


def test_compiling_is_not_advised_to_a_compiled_step():
    figures = {"forward_issue_ms": 5.0, "forward_ms": 5.0}
    assert one_card(finding("launches.bound", **figures, is_compiled=False)).action == advice.COMPILED_BLOCKS.code
    assert one_card(finding("launches.bound", **figures, is_compiled=True)).action == ""


LAUNCHES = ScriptRow(
    workload="train.py", times={"step": Times(10.0), "starved": Times(9.9), "data": Times(4.0)}, n=20, on_gpu=True
)


@pytest.mark.parametrize(
    ("claim", "name"), [("Launches set the step", "compiled model"), ("Steps wait for their batch", "loader workers")]
)
def test_what_the_script_s_ladder_did_not_keep_is_not_advised(claim, name):
    left = script_rung(name, 12.0, verdict="slower", gain=0.8)
    kept = script_rung(name, 8.0, verdict="faster", gain=1.2, gain_low=1.1, gain_high=1.3, accepted=True)
    assert card([LAUNCHES, SCRIPT], claim).action == BY_NAME[name].line.code
    assert card([LAUNCHES, SCRIPT, left], claim).action == ""
    assert card([STEP, LAUNCHES, SCRIPT, left], claim).action == "", "beside a step of another workload"
    assert card([LAUNCHES, SCRIPT, replace(left, status="wrong", verdict="wrong")], claim).action == ""
    assert card([LAUNCHES, SCRIPT, kept], claim).action == BY_NAME[name].line.code


def test_what_a_ladder_found_no_gain_in_is_not_advised_whatever_the_sentence_says():
    told = finding("kernels.unfused", share=0.5)
    assert one_card(told, [PROFILE]).action == advice.COMPILED_BLOCKS.code
    for verdict, status in (("inconclusive", "ok"), ("failed", "failed")):
        rung = ChangeRow(
            **CASE, change="compiled model", verdict=verdict, status=status, reason="why", **carried("compiled model")
        )
        assert one_card(told, [PROFILE, rung]).action == ""
        other = replace(rung, workload="another")
        assert one_card(told, [PROFILE, other]).action == advice.COMPILED_BLOCKS.code


MADE_UP = {
    "checkpointing.best": ('found(f"checkpointing.{id}"', 'id, said = "best"'),
    "formulas.attention-not-fused": ('found(f"formulas.{form}"', '("attention-not-fused", '),
    "formulas.attention-written-out": ('found(f"formulas.{form}"', '("attention-written-out", '),
    "gain.faster": ('found(f"gain.{called}"', 'called = "faster"'),
    "kernels.top-of-step": ('found(f"kernels.top-of-{where}"', '_top(profile, "step"'),
    "residuals.block": ('found(f"residuals.{id}"', 'kept("block"'),
    "utilisation.high": ('found(f"utilisation.{judgement}"', 'judgement, judged = "high"'),
    "utilisation.low": ('found(f"utilisation.{judgement}"', 'judgement, judged = "low"'),
}
"""Id that is put together where its finding is made → what stands there: the template, and what is put in."""


@pytest.fixture
def rules(request):
    """The text of all rules, on one line."""
    folder = request.config.rootpath / "src/trainstep/report/subjects"
    text = " ".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    return re.sub(r"\(\s+", "(", text)


def test_every_claim_is_of_a_rule_that_there_is(rules):
    whole = set(re.findall(r'found\("([a-z-]+\.[a-z0-9_-]+)"', rules))
    assert set(CLAIMS) - whole == set(MADE_UP)
    for id, parts in MADE_UP.items():
        assert all(part in rules for part in parts), id


def test_what_a_claim_advises_is_the_line_of_a_change_that_answers_it():
    lines = [each for each in vars(advice).values() if isinstance(each, advice.Line)]
    advised = {id: claim.action for id, claim in CLAIMS.items() if claim.action in lines}
    assert len(advised) >= 8
    for id, line in advised.items():
        (change,) = [each for each in BY_NAME.values() if each.line is line]
        assert id in change.answers


def test_every_change_answers_what_the_report_asks(rules):
    """By the id of a finding, or by a part of its advice."""
    for change in BY_NAME.values():
        for each in change.answers:
            asked = "utilisation.high-{" if each.startswith("utilisation") else f'"{each}"'
            assert asked in rules or each in CLAIMS, f"{change.name} answers {each}"


# ---- stakes


@pytest.mark.parametrize(
    ("id", "figures", "shown"),
    [
        ("memory.does-not-fit", {"mode": "step", "predicted_gib": 181.0}, "181.00 GiB"),
        ("warm-up.needed", {"excess": 0.5, "step_ms": 20.0}, "10.0 ms"),
        ("plan.fastest", {"strategy": "ddp", "step_ms": 30.0}, "30.0 ms"),
        ("plan.nothing-fits", {"peak_gib": 90.0}, "90.00 GiB"),
        ("checkpointing.best", {"best": ("2",), "without_gib": 9.0, "peak_gib": 3.0}, "6.00 GiB"),
        ("residuals.block", {"gib": 2.0}, "2.00 GiB"),
        (
            "parallel.hidden",
            {"least": "a", "most": "b", "least_hidden_share": 0.1, "most_hidden_share": 0.9, "least_exposed_ms": 3.0},
            "3.00 ms",
        ),
        ("gain.faster", {"speedup": 2.0, "changes": ("a",), "before_ms": 10.0, "after_ms": 5.0}, "5.00 ms"),
        ("gain.script", {"speedup": 2.0, "changes": ("a",)}, "2.50 ms"),
    ],
)
def test_what_is_no_part_of_the_step_has_a_figure_and_no_share(id, figures, shown):
    told = one_card(finding(id, **figures), [STEP])
    assert (told.figure, told.share) == (shown, "")


def test_a_part_of_the_step_has_its_share():
    assert one_card(finding("waits.line", line="l", ms=2.0), [STEP]).share == "40% of the step"


@pytest.mark.parametrize(
    ("order", "shown"),
    [
        ({"first": "backward", "second": "forward"}, "60.0 ms"),
        ({"first": "forward", "second": "backward"}, "30.0 ms"),
        ({"first": "forward", "second": "optimizer"}, "30.0 ms"),
        ({"first": "optimizer", "second": "forward"}, "15.0 ms"),
    ],
)
def test_odd_phases_show_backward_s_time(order, shown):
    figures = {"first_ms": 60.0, "first_share": 0.6, "second_share": 0.3, "total_ms": 100.0, "is_odd": True}
    odd = {"backward_over_forward": 0.5, "expected_backward_over_forward": 2.0}
    assert one_card(finding("phases.longest", **order, **figures, **odd), []).figure == shown


# ---- confidence


def rung(name, ms, *, accepted=True, **more):
    speedup = {"speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}
    gain = {"gain": 2.0, "gain_low": 1.9, "gain_high": 2.1}
    verdict = "baseline" if name == "baseline" else "faster" if accepted else "slower"
    measured = {"times": {"step": Times(ms, ms * 0.99, ms * 1.01)}, "n": 10, "gradient_error": 0.0, "error_budget": 0.1}
    return ChangeRow(**{**CASE, **more}, change=name, verdict=verdict, accepted=accepted, **measured, **speedup, **gain)


def ladder(*throttled, workload="m"):
    """Two rungs that were kept and one that was not, under these limits."""
    rows = [rung("baseline", 100.0), rung("bf16 autocast", 50.0, precision="bf16"), rung("other", 60.0, accepted=False)]
    return [replace(row, workload=workload, throttled_by=by) for row, by in zip(rows, throttled, strict=True)]


def confidence(rows):
    return first(rows, Headline).confidence


def test_the_gpu_was_not_slowed_only_where_every_rung_says_so():
    assert "the GPU was not slowed" in confidence(ladder("nothing", "nothing", "nothing"))
    slowed = confidence(ladder("nothing", "nothing", "power"))
    assert "the GPU was slowed in 1 of 3 changes" in slowed
    assert "not slowed" not in slowed
    assert "slowed" not in confidence(ladder("nothing", "nothing", None))
    *kept, left = ladder("nothing", "nothing", None)
    too_large = replace(left, times={}, status="out of memory", verdict="out of memory", reason="why")
    assert "the GPU was not slowed" in confidence([*kept, too_large]), "that has no time"


def test_every_ladder_has_its_own_noise():
    rows = [*ladder("nothing", "nothing", "nothing"), *ladder("power", "power", "power", workload="other")]
    quiet, slowed = (each.confidence for each in headlines(rows, findings(rows)))
    assert "the GPU was not slowed" in quiet
    assert "slowed in" not in quiet
    assert "the GPU was slowed in 3 of 3 changes" in slowed


def test_a_script_s_headline_has_a_confidence():
    row = ScriptRow(
        workload="train.py", times={"step": Times(10.0, 9.9, 10.1), "forward": Times(4.0)}, n=20, left_out=5
    )
    assert confidence([row]) == "One process, 20 steps, the first 5 left out."
    noisy = replace(row, left_out=None, times=row.times | {"step": Times(10.0, 8.0, 12.0)}, rank=0, world_size=4)
    assert confidence([noisy]) == "One of 4 processes, 20 steps; times are unsteady."


# ---- the other headlines


def test_only_peaks_that_were_measured_are_counted_as_measured():
    rows = [
        PeakRow(workload="m", mode="step", context=512, peak_gib=3.0),
        PeakRow(workload="m", mode="step", context=1024, peak_gib=9.0, status="failed", reason="x"),
        PeakRow(workload="m", mode="step", context=2048, status="out of memory", reason="x"),
    ]
    made = first(rows, Headline)
    assert made.figure.value == 3.0
    assert made.stats == [("Measured", "1", "peaks"), ("Do not fit", "1", "cases"), ("Failed", "1", "cases")]


def test_cases_of_steps_are_not_called_steps():
    rows = [StepRow(workload="m", mode="forward", context=each, times={"step": Times(1.0)}) for each in (1, 2)]
    assert first(rows, Headline).says == "cases of a step measured"
    failed = StepRow(workload="m", mode="forward", context=3, status="out of memory", reason="x")
    made = first([*rows, failed], Headline)
    assert (made.figure.text, made.says) == ("3", "cases of a step tried")


def schemes(**times):
    case = {"workload": "m", "world_size": 2}
    return [ParallelRow(**case, scheme=name, times={"step": each}, n=9) for name, each in times.items()]


def test_a_scheme_that_is_wrong_is_not_the_fastest():
    wrong, *right = schemes(ddp=Times(5.0), fsdp=Times(9.0), zero=Times(9.5))
    made = first([replace(wrong, status="wrong", reason="gradients off"), *right], Headline)
    assert made.figure.value == 9.0
    assert made.says == "per step with fsdp on 2 ranks, the fastest median of 2 schemes"


def test_what_the_intervals_do_not_tell_apart_is_said():
    made = first(schemes(ddp=Times(5.0, 4.8, 5.2), fsdp=Times(5.1, 4.9, 5.3), zero=Times(6.0, 5.9, 6.1)), Headline)
    assert made.stats == [
        ("fsdp", "5.10 ms", "1.02× the median, intervals overlap"),
        ("zero", "6.00 ms", "1.20× the median"),
    ]


def test_what_is_not_known_is_left_out_of_headlines():
    profile = ProfileRow(workload="m", times={"step": Times(5.0)})
    attention = [AttentionRow(**SHAPE, impl=impl, times={"both": Times(ms)}) for impl, ms in (("a", 1.0), ("b", 2.0))]
    pair = RatioRow(workload="m", flag="compile", old="off", new="model", speedup=2.0, verdict="faster")
    for rows in ([profile], attention, [pair], [replace(STEP, n=None)]):
        made = first(rows, Headline)
        told = [made.detail, made.confidence, *(text for stat in made.stats for text in stat)]
        assert not [text for text in told if "– " in text or text == "–"], told
    assert [first([replace(STEP, n=n)], Headline).detail for n in (9, None)] == [
        "median of 9 steps: 5.00 ms",
        "median: 5.00 ms",
    ]
    assert "profiler" in first([replace(profile, profiled_n=3)], Headline).confidence
