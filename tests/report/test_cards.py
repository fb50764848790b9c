"""What the first screen claims agrees with the rows: cards with their stakes, headlines with what was measured."""

import re
from dataclasses import replace

import pytest

from tests.report.changes import BY_NAME, carried
from tests.report.subjects.test_formulas import WRITTEN_OUT
from tests.report.subjects.test_memory import STUDY
from tests.report.subjects.test_plan import strategy
from tests.report.subjects.test_script_ladder import BASELINE as SCRIPT
from tests.report.subjects.test_script_ladder import FUSED
from tests.report.subjects.test_script_ladder import row as script_rung
from tests.report.subjects.test_thresholds import COPY, OWNED, ceiling, family, piece
from tests.report.subjects.test_thresholds import PROFILE as KERNELS
from tests.report.test_findings import rung, step
from tests.report.test_summary import PROFILE, SHAPE, finding, first
from trainstep.base import advice
from trainstep.base.config import PHASES
from trainstep.base.cores import cores
from trainstep.ladder.changes.loaders import workers_here
from trainstep.report.blocks import Cards, Headline
from trainstep.report.findings import Claim
from trainstep.report.headlines import headlines
from trainstep.report.subjects import findings
from trainstep.report.summary import cards
from trainstep.rows import (
    AttentionRow,
    ChangeRow,
    DtypeRow,
    LineRow,
    ParallelRow,
    ParallelTraceRow,
    PeakRow,
    ProfileRow,
    RatioRow,
    RecompilationRow,
    ScriptRow,
    StepRow,
    WaitRow,
)
from trainstep.rows.records import Times

CASE = {"workload": "m", "precision": "fp32"}
STEP = StepRow(**CASE, mode="step", warmup=3, times=dict.fromkeys((*PHASES, "step"), Times(5.0)), n=9, peak_gib=4.0)
TIMES = {"step": Times(10.0), "starved": Times(9.9), "data": Times(4.0)}
LAUNCHES = ScriptRow(workload="train.py", times=TIMES, n=20, on_gpu=True, environment={"cores": cores()})
AGAIN = RecompilationRow(workload="train.py", line="a.py:1", function="f", last_step=2)
WAIT = WaitRow(workload="train.py", line="a.py:3", call="item", ms_per_step=2.0, calls_per_step=1.0, on_gpu=True)
LINE = LineRow(workload="train.py", line="a.py:5", phase="other", function="work", seen=40, share=0.9)
MORE = {name: [2.0 + at for at in range(47)] for name in ("step", "other")}
RANKS = [
    ScriptRow(workload="train.py", rank=at, n=9, times=dict.fromkeys(("own", "forward", "step"), Times(ms, ms)))
    for at, ms in enumerate((5.0, 5.0, 8.0))
]
TRACES = [
    ParallelTraceRow(
        workload="m", world_size=2, scheme=name, hidden_share=share, exposed_communication_ms=ms, communication_ms=9.0
    )
    for name, share, ms in (("ddp", 0.9, 1.0), ("fsdp", 0.1, 3.0))
]
TIMED = replace(KERNELS, kernels_ms=20.0)
OPTIMIZER = [family("a", 1, ms=100.0), family("b", 1, "optimizer", ms=15.0)]
SOFTMAX = [replace(piece("softmax", 1.0, 1.0), ms=1.5), piece("scores", 0.5, 40.0)]
SIMT = family("FP32 SIMT matmul", 0.5)
TOP = {"_family": "matmul", "_share": 0.5, "_ms": 4.0, "_calls": 2.0}
TOP = {"top_step_kernel": "mm"} | {f"top_step_kernel{name}": value for name, value in TOP.items()}
IN_MATH = replace(WRITTEN_OUT[1], operator="aten::_scaled_dot_product_attention_math", share=0.0)
RETURNING = DtypeRow(module="blocks.0.attention", class_name="MultiheadAttention")
ASIDE, APART = {"severity": "aside"}, {"is_part": False}


def of(rows, **settings):
    return [replace(row, **settings) for row in rows]


@pytest.mark.parametrize(
    ("id", "rows", "claim"),
    [
        ("gain.no-baseline", [rung("baseline", "failed", False, "failed", "why")], {"severity": "alarm"}),
        ("loss.not-finite", [replace(step(), samples={"training_loss": [None]})], {"severity": "alarm"}),
        ("gain.faster", [rung("baseline", "baseline", step_ms=90.0), rung("x")], {"ms": 40.0} | ASIDE | APART),
        ("gain.smaller", [rung("baseline", "baseline", step_ms=90.0), rung("x", speedup_low=0.9)], {}),
        ("gain.script", [SCRIPT, FUSED], {"ms": 5.0} | ASIDE | APART),
        ("data.bound", [LAUNCHES], {"ms": 4.0, "action": advice.loader_workers(workers_here())}),
        ("launches.script", [LAUNCHES], {"ms": 9.9, "action": advice.IN_GRAPHS}),
        ("waits.line", [LAUNCHES, WAIT], {"ms": 2.0}),
        ("script.lines", [replace(LAUNCHES, times={"step": Times(10.0), "other": Times(4.0)}), LINE],
         {"ms": 4.0}),
        ("script.slows-down", of([LAUNCHES], times=dict.fromkeys(("step", "other"), Times(9.0)), samples=MORE),
         {"ms": 5.0}),
        ("script.memory-grows", [replace(LAUNCHES, series={"process_mib": [1024 * each for each in MORE["step"]]})],
         {"gib": 42.0} | APART),
        ("ranks.late", RANKS, {"ms": 3.0}),
        ("compiled.again", [AGAIN], {}),
        ("phases.longest", [step()], {"ms": 60.0} | ASIDE),
        ("phases.longest", [step(backward_ms=20.0)], {"ms": 20.0}),  # odd
        ("launches.bound", [step(forward_issue_ms=29.9)],
         {"ms": 29.9, "action": advice.COMPILED_BLOCKS}),
        ("launches.bound", [step(forward_issue_ms=29.9, case={"compile": "blocks"})],
         {"ms": 29.9, "action": ""}),
        ("utilisation.low", [step(), ceiling(120.0)], {"ms": 75.0} | ASIDE),
        ("utilisation.high", [step(), ceiling(40.0)], {"ms": 75.0}),
        ("utilisation.beyond", [step(), ceiling(10.0)], {}),
        ("warm-up.needed", [step(0, n=2, first_step_ms=200.0, step_mean_ms=150.0), step()],
         {"ms": 50.0} | ASIDE | APART),
        ("kernels.unfused", [TIMED, family("elementwise", 0.5)],
         {"ms": 10.0, "action": advice.COMPILED_BLOCKS}),
        ("kernels.unfused", [KERNELS, family("elementwise", 0.5)],
         {"action": advice.COMPILED_BLOCKS}),  # of kernels that were not measured
        ("kernels.unfused-though-compiled", of([TIMED, family("elementwise", 0.5)], compile="model"), {"ms": 10.0}),
        ("kernels.optimizer-unfused", [TIMED, *OPTIMIZER], {"ms": 3.0, "action": advice.FUSED_OPTIMIZER}),
        ("kernels.optimizer", of([TIMED, *OPTIMIZER], optimizer="adamw-fused"), {"ms": 3.0}),
        ("kernels.softmax", [TIMED, *SOFTMAX, COPY, *of(SOFTMAX, phase="backward", ms=0.5)],
         {"ms": 2.0, "action": advice.FUSED_ATTENTION}),
        ("kernels.softmax", [TIMED, SOFTMAX[0], piece("scores", 50.0, 40.0), COPY], {}),  # as fast as it is small
        ("kernels.float32-products", [TIMED, SIMT], {"ms": 10.0, "action": advice.TF32}),
        ("kernels.float32-products", of([TIMED, SIMT], precision="tf32"), {"ms": 10.0, "action": ""}),
        ("kernels.transfers", [replace(TIMED, transfers_ms=4.0, transfers_overlapped_ms=1.0, busy_ms=9.0)],
         {"ms": 3.0}),
        ("kernels.communication", [replace(TIMED, communication_ms=10.0, communication_overlapped_ms=9.0)],
         {"ms": 1.0}),
        ("kernels.idle", [replace(TIMED, idle_share=0.2, idle_ms=4.0)], {"ms": 4.0}),
        ("kernels.top-of-step", [replace(TIMED, **TOP, most_called_step_kernel="mm")], {"ms": 4.0} | ASIDE),
        ("formulas.attention-written-out", [replace(WRITTEN_OUT[0], kernels_ms=20.0), *WRITTEN_OUT[1:]],
         {"ms": pytest.approx(4.0), "action": advice.FUSED_ATTENTION}),
        ("formulas.attention-not-fused", [replace(WRITTEN_OUT[0], kernels_ms=20.0), *WRITTEN_OUT[1:], IN_MATH],
         {"ms": pytest.approx(4.0)}),
        ("formulas.attention-returns-weights", [replace(WRITTEN_OUT[0], kernels_ms=20.0), *WRITTEN_OUT[1:], RETURNING],
         {"ms": pytest.approx(4.0),
          "action": advice.Line("attention(q, k, v, …, need_weights=False)", "where nn.MultiheadAttention is called")}),
        ("formulas.cross-entropy-written-out", [replace(WRITTEN_OUT[0], kernels_ms=20.0), *WRITTEN_OUT[1:]],
         {"ms": pytest.approx(6.0),
          "action": advice.Line("F.cross_entropy(logits.flatten(0, -2), targets.flatten())")}),
        ("parallel.hidden", TRACES, {"ms": 3.0} | APART),
        ("parallel.hidden", TRACES[:1], APART),
        ("memory.peak", [step()], {"gib": 2.5}),
        ("memory.owners", OWNED, {"gib": pytest.approx(1.6)}),
        ("memory.owners", [step(), *OWNED], {}),  # of the same peak
        ("memory.cache", [StepRow(mode="forward", cache_gib=3.0)],
         {"gib": 3.0, "action": advice.Line("model.config.use_cache = False")}),
        ("memory.does-not-fit", STUDY, {"gib": 200.0} | APART),
        ("residuals.block", STUDY, {"gib": 1.0} | ASIDE | APART),
        ("plan.fastest", [strategy("ddp", fits=True)], {"ms": 51.3} | APART),
        ("plan.nothing-fits", [strategy("ddp", fits=False)], {"gib": 150.0} | APART),
    ],
)  # fmt: skip
def test_a_finding_has_its_stake_and_its_action(id, rows, claim):
    (told,) = [each for each in findings(rows) if each.id == id]
    assert replace(told.claim, said="", seen=()) == Claim(**claim)
    assert "{" not in told.claim.said or told.claim.stake is None
    if isinstance(told.claim.action, advice.Line) and told.claim.action in vars(advice).values():
        (change,) = [each for each in BY_NAME.values() if each.line is told.claim.action]
        assert id in change.answers


def test_every_change_answers_what_the_report_asks(request):
    """By the id of a finding, or by a part of its advice."""
    folder = request.config.rootpath / "src/trainstep/report/subjects"
    rules = re.sub(r"\(\s+", "(", " ".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py")))
    for change in BY_NAME.values():
        for each in change.answers:
            name = each.removeprefix("formulas.").removeprefix("script.")
            asked = "utilisation.high-{" if each.startswith("utilisation") else f'"{name}"'
            assert asked in rules, f"{change.name} answers {each}"


# ---- cards


def card(rows, begin):
    """The card of the page whose claim begins so."""
    shown = first(rows, Cards)
    return next((each for each in (shown.cards if shown else ()) if each.claim.startswith(begin)), None)


GRAPHS = ("The step is launch-bound", "compiled model with CUDA graphs")


@pytest.mark.parametrize(("claim", "name"), [GRAPHS, ("Steps wait for their batch", "loader workers")])
def test_what_the_script_s_ladder_did_not_keep_is_not_advised(claim, name):
    left = script_rung(name, 12.0, verdict="slower", gain=0.8)
    kept = script_rung(name, 8.0, verdict="faster", gain=1.2, gain_low=1.1, gain_high=1.3, accepted=True)
    assert card([LAUNCHES, SCRIPT], claim).action == BY_NAME[name].line.code
    assert card([LAUNCHES, SCRIPT, left], claim).action == ""
    assert card([STEP, LAUNCHES, SCRIPT, left], claim).action == "", "beside a step of another workload"
    assert card([LAUNCHES, SCRIPT, replace(left, status="wrong", verdict="wrong")], claim).action == ""
    assert card([LAUNCHES, SCRIPT, kept], claim).action == BY_NAME[name].line.code


def test_what_a_ladder_found_no_gain_in_is_not_advised_whatever_the_sentence_says():
    told = finding("kernels.unfused", ms=5.0, action=advice.COMPILED_BLOCKS)

    def action(*rows):
        (only,) = cards([PROFILE, *rows], [told], []).cards
        return only.action

    assert action() == advice.COMPILED_BLOCKS.code
    for verdict, status in (("inconclusive", "ok"), ("failed", "failed")):
        tried = ChangeRow(
            **CASE, change="compiled model", verdict=verdict, status=status, reason="why", **carried("compiled model")
        )
        assert action(tried) == ""
        assert action(replace(tried, workload="another")) == advice.COMPILED_BLOCKS.code


@pytest.mark.parametrize(
    ("claim", "figure", "share"),
    [
        ({"ms": 2.0}, "2.00 ms", "40% of the step"),
        ({"ms": 2.0, "is_part": False}, "2.00 ms", ""),
        ({"gib": 1.0}, "1.00 GiB", "25% of the peak"),
        ({"gib": 181.0, "is_part": False}, "181.00 GiB", ""),
    ],
)
def test_a_part_of_the_step_or_of_its_peak_has_its_share(claim, figure, share):
    (only,) = cards([STEP], [finding("x", **claim)], []).cards
    assert (only.figure, only.share) == (figure, share)


# ---- confidence


def timed(name, ms, *, accepted=True, **more):
    speedup = {"speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}
    gain = {"gain": 2.0, "gain_low": 1.9, "gain_high": 2.1}
    verdict = "baseline" if name == "baseline" else "faster" if accepted else "slower"
    measured = {"times": {"step": Times(ms, ms * 0.99, ms * 1.01)}, "n": 10, "gradient_error": 0.0, "error_budget": 0.1}
    return ChangeRow(**{**CASE, **more}, change=name, verdict=verdict, accepted=accepted, **measured, **speedup, **gain)


def ladder(*throttled, workload="m"):
    """Two rungs that were kept and one that was not, under these limits."""
    rows = [
        timed("baseline", 100.0),
        timed("bf16 autocast", 50.0, precision="bf16"),
        timed("other", 60.0, accepted=False),
    ]
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
    row = replace(LAUNCHES, times={"step": Times(10.0, 9.9, 10.1), "forward": Times(4.0)}, left_out=5)
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
    overlaps = ("fsdp", "5.10 ms", "1.02× the median, intervals overlap")
    assert made.stats == [overlaps, ("zero", "6.00 ms", "1.20× the median")]


def test_what_is_not_known_is_left_out_of_headlines():
    profile = ProfileRow(workload="m", times={"step": Times(5.0)})
    attention = [AttentionRow(**SHAPE, impl=impl, times={"both": Times(ms)}) for impl, ms in (("a", 1.0), ("b", 2.0))]
    pair = RatioRow(workload="m", flag="compile", old="off", new="model", speedup=2.0, verdict="faster")
    for rows in ([profile], attention, [pair], [replace(STEP, n=None)]):
        made = first(rows, Headline)
        told = [made.detail, made.confidence, *(text for stat in made.stats for text in stat)]
        assert not [text for text in told if "– " in text or text == "–"], told
    details = [first([replace(STEP, n=n)], Headline).detail for n in (9, None)]
    assert details == ["median of 9 steps: 5.00 ms", "median: 5.00 ms"]
    assert "profiler" in first([replace(profile, profiled_n=3)], Headline).confidence
