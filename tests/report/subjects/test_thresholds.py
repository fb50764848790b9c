"""Every rule of a finding on both sides of its threshold, and on it."""

from dataclasses import replace

import pytest

from tests.report.changes import drifted, final
from tests.report.subjects.test_peak_findings import owned
from tests.report.test_findings import SETTINGS, rung, step
from trainstep.base.stats import RUN_SPREAD
from trainstep.report.subjects import findings
from trainstep.report.subjects.noise import APART
from trainstep.report.subjects.steps import analysed_step
from trainstep.rows import (
    AllocationRow,
    CeilingRow,
    FamilyRow,
    MemoryTimelineRow,
    OwnerRow,
    PeakRow,
    PieceRow,
    ProfileRow,
    SweepRow,
)
from trainstep.rows.records import Times

PROFILE = ProfileRow(**SETTINGS, profiled_step_ms=10.0, idle_ms=1.0, times={"step": Times(10.0)})
COPY = CeilingRow(operation="copy", gb_s=100.0)
OTHER = CeilingRow(operation="convolution", precision="fp32", tflops=1.0)


def figures(*rows):
    """Id → figures of the findings."""
    return {each.id: each.figures for each in findings(rows)}


def family(name, share, phase="step", **values):
    return FamilyRow(**SETTINGS, family=name, phase=phase, share=share, **values)


def transfers(busy, taken, beside=None):
    return replace(PROFILE, busy_ms=busy, transfers_ms=taken, transfers_overlapped_ms=beside)


def ceiling(tflops=100.0):
    return CeilingRow(operation="matmul", precision="fp32", tflops=tflops)


def interval(low, high):
    return step(step_low_ms=low, step_high_ms=high)


def cold(first, others=100.0, n=3):
    """A run without warm-up: its first step, and what each of the others took."""
    return step(0, n=n, first_step_ms=first, step_mean_ms=(first + (n - 1) * others) / n)


def baseline(low, high):
    return rung("baseline", "baseline", step_low_ms=low, step_high_ms=high)


def wild(width):
    return baseline(50.0 - 25 * width, 50.0 + 25 * width)


def piece(name, ms, tflop, gb_s=None):
    return PieceRow(**SETTINGS, phase="forward", piece=name, main_ms=ms, main_tflop=tflop, main_gb_s=gb_s)


@pytest.mark.parametrize(
    ("id", "rows", "is_told"),
    [
        ("noise.unsteady-steps", [interval(96.0, 105.0)], False),
        ("noise.unsteady-steps", [interval(95.0, 105.0)], False),
        ("noise.unsteady-steps", [interval(94.0, 105.0)], True),
        ("noise.unsteady-steps", [step(0, step_high_ms=200.0), step(5)], False),  # a window that is not the last
        ("noise.unsteady-steps", [step(0), step(5, step_high_ms=200.0)], True),
        ("noise.throttled-steps", [step(throttled_by=None)], False),
        ("noise.throttled-steps", [step(throttled_by="nothing")], False),
        ("noise.throttled-steps", [step(throttled_by="temperature")], True),
        ("noise.throttled-steps", [replace(step(throttled_by="temperature"), status="wrong")], False),
        ("noise.unsteady-changes", [wild(0.1)], False),
        ("noise.unsteady-changes", [wild(0.11)], True),
        ("noise.unsteady-steps", [step(step_low_ms=None, step_high_ms=200.0)], False),
        ("noise.unsteady-steps", [step(step_low_ms=None, step_high_ms=None)], False),
        ("noise.unsteady-steps", [step(step_low_ms=1.0, step_high_ms=None)], False),
        ("noise.measured-again", [rung("x", attempts=1), rung("y")], False),
        ("noise.measured-again", [rung("x", attempts=2), rung("y")], True),
        ("noise.same-step", [step(), rung("x", step_low_ms=49.0, step_high_ms=51.0)], False),
        ("noise.same-step", [step(), baseline(49.0, 51.0)], True),
        ("noise.same-step", [step(), baseline(95.0, 99.5), baseline(49.0, 51.0)], False),
        ("noise.same-step", [step(step_low_ms=(1 + APART) * 90.0), baseline(80.0, 90.0)], False),
        ("noise.same-step", [step(), baseline(90.5, 92.0)], False),  # apart, but by less than a tenth
        ("noise.same-step", [step(), baseline(110.9, 112.0)], False),  # 9.8 % above the 101 ms of the phases
        ("noise.same-step", [step(), baseline(111.3, 113.0)], True),  # 10.2 %
        ("noise.same-step", [step(), baseline(205.0, 207.0)], True),
        ("noise.same-step", [step(), replace(baseline(7.8, 8.2), loss="chunked")], False),  # another step
        ("noise.control", [baseline(49.0, 51.0), final(**drifted("first", 1.0, 1.0, 1.0, 1.1))], False),
        ("noise.control", [baseline(49.0, 51.0), final(**drifted("first", 1.0, 1.0, 0.9, 1.0))], False),
        ("noise.control", [baseline(49.0, 51.0), final(**drifted("first", 1.0, 1.1, 1.01, 1.2))], True),
        ("noise.control", [baseline(49.0, 51.0), final(**drifted("first", 1.0, 0.9, 0.8, 0.99))], True),
        ("utilisation.beyond", [step(achieved_tflops=90.0), ceiling(), OTHER], False),
        ("utilisation.low", [step(achieved_tflops=49.0), ceiling()], True),
        ("utilisation.low", [step(achieved_tflops=50.0), ceiling()], False),
        ("utilisation.high", [step(achieved_tflops=50.0), ceiling()], True),
        ("utilisation.high", [step(achieved_tflops=100.0), ceiling()], True),
        ("utilisation.beyond", [step(achieved_tflops=101.0), ceiling()], True),
        ("utilisation.uncounted", [step(flops_uncounted=("lib::product",))], True),
        ("utilisation.uncounted", [step()], False),
        ("launches.bound", [step(forward_issue_ms=28.4)], False),
        ("launches.bound", [step(forward_issue_ms=28.5)], True),
        ("warm-up.needed", [cold(110.0), step(5)], False),
        ("warm-up.needed", [cold(116.0), step(5)], True),
        ("warm-up.needed", [cold(50.0), step(5)], False),
        ("warm-up.needed", [cold(116.0), step(2), step(5)], True),
        ("warm-up.needed", [replace(cold(116.0), warmup=1), step(5)], False),
        ("warm-up.needed", [cold(116.0)], False),
        ("warm-up.needed", [cold(116.0, n=1), step(5)], False),
        ("warm-up.needed", [cold(102.0, others=80.0), step(5)], False),
        ("warm-up.needed", [cold(102.1, others=80.0), step(5)], True),
        ("warm-up.needed", [cold(105.0, others=80.0), step(2), step(5, step_max_ms=105.0)], False),
        ("warm-up.needed", [cold(105.0, others=80.0), step(2, step_max_ms=105.0), step(5)], True),
        ("warm-up.needed", [cold(110.0), step(5, step_mean_ms=60.0, step_max_ms=61.0)], False),  # a slower process
        ("kernels.coverage", [replace(PROFILE, module_coverage=0.98)], False),
        ("kernels.coverage", [replace(PROFILE, module_coverage=0.97)], True),
        ("kernels.profiler-free", [replace(PROFILE, profiler_cost=RUN_SPREAD)], True),
        ("kernels.profiler-free", [replace(PROFILE, profiler_cost=-RUN_SPREAD)], True),
        ("kernels.profiler-cost", [replace(PROFILE, profiler_cost=RUN_SPREAD + 0.001)], True),
        ("kernels.profiler-faster", [replace(PROFILE, profiler_cost=-RUN_SPREAD - 0.001)], True),
        ("kernels.float32-products", [PROFILE, family("FP32 SIMT matmul", 0.15)], True),
        ("kernels.float32-products", [PROFILE, family("FP32 SIMT matmul", 0.14)], False),
        ("kernels.unfused", [PROFILE, family("elementwise", 0.15), family("copy", None)], True),
        ("kernels.unfused", [PROFILE, family("elementwise", None)], False),
        ("kernels.unfused", [PROFILE, family("elementwise", 0.09), family("copy", 0.05)], False),
        ("kernels.optimizer-unfused", [PROFILE, family("a", 1, ms=100.0), family("b", 1, "optimizer", ms=15.0)], True),
        ("kernels.optimizer-unfused", [PROFILE, family("a", 1, ms=100.0), family("b", 1, "optimizer", ms=14.0)], False),
        ("kernels.idle", [replace(PROFILE, idle_share=0.10)], True),
        ("kernels.idle", [replace(PROFILE, idle_share=0.09)], False),
        ("kernels.idle", [replace(PROFILE, idle_share=0.50, on_cpu=True)], False),
        ("kernels.transfers", [transfers(10.0, 0.5)], True),
        ("kernels.transfers", [transfers(10.0, 0.4)], False),
        ("kernels.transfers", [transfers(10.0, 9.0, 8.6)], False),
        ("kernels.transfers", [transfers(0.1, 0.004)], False),
        ("kernels.transfers", [transfers(0.1, 0.006)], True),
        ("kernels.transfers", [transfers(1.0, 0.0)], False),
        ("kernels.transfers", [transfers(1.0, None)], False),
        ("kernels.transfers", [transfers(0.0, 0.4)], False),
        ("kernels.transfers", [transfers(None, 0.4)], False),
        ("kernels.communication", [replace(PROFILE, communication_ms=0.0, communication_overlapped_ms=0.0)], False),
        ("kernels.communication", [replace(PROFILE, communication_ms=1.0)], False),
    ],
)  # fmt: skip
def test_a_finding_begins_at_its_threshold(id, rows, is_told):
    assert (id in figures(*rows)) is is_told


@pytest.mark.parametrize(
    ("backward", "is_odd"), [(44.0, True), (45.0, False), (60.0, False), (105.0, False), (106.0, True)]
)
def test_backward_is_odd_below_three_quarters_and_above_seven_quarters_of_twice_forward(backward, is_odd):
    assert figures(step(backward_ms=backward))["phases.longest"]["is_odd"] is is_odd


@pytest.mark.parametrize(
    ("other", "is_told"),
    [
        ([50.0, 51.0, 52.0, 53.0], False),  # four samples enclose nothing
        ([50.0, 51.0, 52.0, 53.0, 54.0], True),
        ([50.0, 51.0, 52.0, 53.0, 89.0], True),
        ([50.0, 51.0, 52.0, 53.0, 90.01], False),
        ([110.0, 150.0, 150.0, 150.0, 200.0], False),
        ([112.0, 150.0, 150.0, 150.0, 200.0], True),
    ],
)
def test_five_samples_enclose_a_step(other, is_told):
    profile = replace(PROFILE, times={"step": Times(51.0)}, samples={"step": other})
    assert ("noise.same-step" in figures(step(), profile)) is is_told


def test_one_step_that_was_measured_as_three_things_is_told():
    profile = replace(PROFILE, times={"step": Times(10.0)}, samples={"step": [9.0, 9.5, 10.0, 10.5, 12.0]})
    assert figures(step(), profile, rung("baseline", "baseline", step_ms=8.0, step_low_ms=7.8, step_high_ms=8.2))[
        "noise.same-step"
    ] == {"the_phases_ms": 100.0, "the_profile_ms": 10.0, "the_ladder's_baseline_ms": 8.0, "apart": 12.5}
    assert "noise.same-step" not in figures(step(), replace(profile, precision="bf16"))


def test_the_step_with_the_longest_warm_up_is_the_one_analysed():
    assert [analysed_step([step(first), step(second)]).warmup for first, second in ((0, 1), (1, 0), (2, 5))] == [
        1,
        1,
        5,
    ]


def test_the_worst_of_several_unsteady_rungs_is_shown_and_every_kind_of_row_is_looked_at():
    rows = [
        wild(0.6),
        wild(1.2),
        wild(0.2),
        replace(wild(0.1), times={}, verdict="wrong", status="wrong", accepted=False),
    ]
    assert figures(*rows)["noise.unsteady-changes"] == {
        "rows": 3, "of": 3, "worst": "baseline", "width": pytest.approx(1.2), "low_ms": 20.0, "ms": 50.0,
        "high_ms": 80.0,
    }  # fmt: skip
    swept = [SweepRow(command="bench step", times=row.times) for row in (*rows, wild(0.1))]
    found = figures(*swept)["noise.unsteady-sweep"]
    assert (found["rows"], found["of"], found["worst"]) == (3, 4, "rows of the sweep")


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (1.04, "as much time as"),
        (1.05, "1.1× more time than"),
        (1 / 1.04, "as much time as"),
        (0.5, "2.0× less time than"),
    ],
)
def test_a_twentieth_more_time_is_a_difference(ms, words):
    rows = [PROFILE, piece("scores", 1.0, 40.0), piece("softmax", ms, 1.0), COPY]
    (found,) = [each for each in findings(rows) if each.id == "kernels.softmax"]
    assert words in found.sentence


@pytest.mark.parametrize(
    ("fewer", "gb_s", "why"),
    [
        (2.0, 80.0, "bandwidth-bound ("),  # as many FLOPs in its time as half the scores' rate
        (1.9, 80.0, None),
        (40.0, 60.0, "bandwidth-bound ("),
        (40.0, 59.0, "its arithmetic does not take that long"),
    ],
)
def test_softmax_is_bound_by_memory_from_three_fifths_of_a_copy_s_rate(fewer, gb_s, why):
    rows = [PROFILE, piece("scores", 1.0, fewer), piece("softmax", 1.0, 1.0, gb_s), COPY]
    (found,) = [each for each in findings(rows) if each.id == "kernels.softmax"]
    assert (why in found.sentence) if why else ("of_copy" not in found.figures)


def test_families_below_a_hundredth_are_not_named():
    shares = {"elementwise": 0.2, "normalisation": 0.01, "reduction": 0.009}
    found = figures(PROFILE, *(family(name, share) for name, share in shares.items()))["kernels.unfused"]
    assert (found["families"], found["share"]) == (("elementwise", "normalisation"), pytest.approx(0.21))


@pytest.mark.parametrize(("precision", "is_lower"), [("fp32", True), ("tf32", False)])
def test_tf32_is_lower_than_fp32_alone(precision, is_lower):
    limit = CeilingRow(operation="matmul", precision=precision, tflops=100.0)
    rows = [step(case={"precision": precision}, achieved_tflops=60.0), limit, rung("TF32 matmuls", gain=2.0)]
    assert ("gain of TF32 matmuls" in figures(*rows)["utilisation.high"]) is is_lower


@pytest.mark.parametrize(("low", "id"), [(0.99, "gain.smaller"), (1.0, "gain.smaller"), (1.01, "gain.faster")])
def test_faster_is_an_interval_above_one(low, id):
    assert id in figures(rung("baseline", "baseline"), rung("x", speedup_low=low))


def test_the_proof_is_of_the_rungs_asked_for_alone():
    rows = [PROFILE, family("elementwise", 0.5), rung("bf16 autocast"),
            rung("compiled blocks", "slower", False, gain=0.5)]  # fmt: skip
    (found,) = [each for each in findings(rows) if each.id == "kernels.unfused"]
    assert {name: value for name, value in found.figures.items() if "gain" in name} == {"gain of compiled blocks": 0.5}


def test_the_first_profile_that_ran_is_told_by_its_own_rows():
    failed = replace(PROFILE, status="out of memory", module_coverage=0.5)
    other = replace(family("elementwise", 0.9), precision="bf16")
    assert figures(failed, PROFILE, family("elementwise", 0.1), other) == {}
    assert "kernels.coverage" in figures(failed, replace(PROFILE, module_coverage=0.5))


@pytest.mark.parametrize(("share", "remedy"), [(0.05, True), (0.04, False)])
def test_a_part_is_worth_a_change_from_a_twentieth_of_the_peak(share, remedy):
    for part, change in (("the loss", "a chunked loss"), ("attention", "a fused attention")):
        found, _ = owned({}, {"activations": 0.6, f"activations/{part}": share})
        assert (change in found.figures["remedies"]) is remedy


@pytest.mark.parametrize(("first", "named"), [(0.5, 2), (0.51, 1)])
def test_owners_are_named_until_they_own_more_than_half(first, named):
    found, _ = owned({}, {"activations": first, "parameters": 0.3, "gradients": 0.1})
    assert len(found.figures["owners"]) == named


@pytest.mark.parametrize(("rest", "stays"), [(2.0, False), (2.1, True)])
def test_most_stays_from_half_of_the_peak(rest, stays):
    found = figures(step(at_rest_gib=rest))["memory.peak"]
    assert bool(found["remedies"]) is stays


OWNED = [
    MemoryTimelineRow(**SETTINGS, peak_phase="backward", peak_gib=4.0),
    *(OwnerRow(**SETTINGS, owner=name, share=share) for name, share in
      (("activations", 0.4), ("parameters", 0.3), ("gradients", 0.2), ("batch", 0.1))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"module": "blocks.*.mlp", "phase": "forward"}, "blocks.*.mlp"),
        ({"phase": "loss"}, "the loss"),
        ({"phase": "forward"}, "the model itself"),
        ({"line": "train.py:3", "phase": "forward"}, "train.py:3"),
    ],
)
def test_three_owners_and_the_largest_part_of_the_activations(part, words):
    parts = [OwnerRow(**SETTINGS, owner="temporaries", phase="backward", share=0.9),
             OwnerRow(**SETTINGS, owner="activations", share=0.25, **part),
             OwnerRow(**SETTINGS, owner="activations", share=0.2, phase="optimizer")]  # fmt: skip
    found = figures(*OWNED, *parts)["memory.owners"]
    assert found == {
        "share of activations": 0.4, "share of parameters": 0.3, "share of gradients": 0.2,
        "peak_gib": 4.0, "phase": "backward", "part": words, "share of the part": 0.25,
    }  # fmt: skip
    assert "part" not in figures(*OWNED)["memory.owners"]


@pytest.mark.parametrize(("count", "words"), [(None, "is made"), (1, "is made"), (2, "2 times a step, is made")])
def test_the_largest_allocation_is_the_first_and_says_how_often(count, words):
    rows = [AllocationRow(**SETTINGS, rank=rank, mib=2048.0 / rank, count=count, line=f"a.py:{rank}", phase="forward")
            for rank in (1, 2)]  # fmt: skip
    (found,) = [each for each in findings([*OWNED, *rows]) if each.id == "memory.owners"]
    assert (found.figures["largest_gib"], found.figures["line"]) == (2.0, "a.py:1")
    assert f"2.00 GiB, {words} by" in found.sentence
    assert "largest_gib" not in figures(*OWNED, replace(rows[0], mib=None))["memory.owners"]


def test_a_recording_that_failed_or_knows_no_owner_says_nothing():
    timeline, *owners = OWNED
    assert figures(replace(timeline, status="failed"), *owners) == {}
    assert figures(replace(timeline, peak_phase=None), *owners) == {}
    assert figures(timeline) == {}


@pytest.mark.parametrize(
    ("peaks", "proof"),
    [
        ([4.0, 3.93], None),  # by no more than runs differ
        ([4.0, 3.91], ("1", 4.0, 3.91)),
        ([4.0, 3.0, 1.0], ("2", 3.0, 1.0)),
        ([4.0, 2.0, 1.0], ("1", 4.0, 2.0)),
        ([4.0, 3.0, 2.0], ("1", 4.0, 3.0)),
        ([4.0, None, 2.0], ("2", 4.0, 2.0)),
        ([None, 3.0, 1.0], ("2", 3.0, 1.0)),
    ],
)
def test_the_rung_that_saved_most_memory_against_what_it_was_built_on(peaks, proof):
    rungs = [rung(str(at), peak_gib=peak) for at, peak in enumerate(peaks)]
    found = figures(*OWNED, *rungs)["memory.owners"]
    told = tuple(found[name] for name in ("change", "before_gib", "after_gib")) if "change" in found else None
    assert told == proof
    apart = [replace(each, accepted=False, status="wrong") if at == 1 else each for at, each in enumerate(rungs)]
    assert figures(*OWNED, *apart)["memory.owners"].get("change") != "1"


@pytest.mark.parametrize(("error", "id"), [(0.05, "memory.predicted"), (-0.06, "memory.prediction-off")])
def test_a_prediction_agrees_to_a_twentieth(error, id):
    rows = [PeakRow(context=at, mode="step", prediction_error=each) for at, each in enumerate((0.01, error, None))]
    assert figures(*rows) == {id: {"worst": abs(error), "peaks": 2, "over": int(id.endswith("off"))}}


@pytest.mark.parametrize(("calls", "words"), [(1.0, "in 1 call."), (1.2, "in 1 call."), (2.0, "in 2 calls.")])
def test_a_kernel_s_calls_are_counted_in_words(calls, words):
    top = {"kernel": "mm", "kernel_family": "matmul", "kernel_calls": calls, "kernel_ms": 1.0, "kernel_share": 0.5}
    profile = replace(PROFILE, **{f"top_forward_{name}": value for name, value in top.items()},
                      most_called_forward_kernel="mm", most_called_forward_kernel_calls=calls)  # fmt: skip
    (found,) = findings([profile])
    assert found.id == "kernels.top-of-forward"
    assert found.sentence.endswith(words)


def test_the_phases_that_take_most_are_named_the_longest_first():
    simt = [family("FP32 SIMT matmul", 0.5, phase, ms=ms) for phase, ms in
            (("step", 100.0), ("forward", 30.0), ("backward", 55.0), ("loss", 15.0), ("optimizer", None))]  # fmt: skip
    rows = [replace(row, precision="bf16") for row in (PROFILE, *simt, family("copy", 0.1, "optimizer", ms=500.0))]
    sentences = {each.id: each.sentence for each in findings(rows)}
    assert sentences["kernels.float32-products"].endswith(
        "though the step runs in bf16: 55% of it in backward, 30% of it in forward and 15% of it in loss."
    )
    rows[4] = replace(rows[4], ms=14.0)
    (found,) = [each for each in findings(rows) if each.id == "kernels.float32-products"]
    assert "of it in loss" not in found.sentence


@pytest.mark.parametrize(("forward", "whole"), [(0.5, None), (None, 0.5), (0.5, 0.4)])
def test_matrix_products_are_told_of_where_both_shares_are_known(forward, whole):
    found = figures(replace(PROFILE, matmul_share_forward=forward, matmul_share_step=whole))
    known = None not in (forward, whole)
    assert found == ({"kernels.matmuls": {"forward_share": forward, "step_share": whole}} if known else {})


@pytest.mark.parametrize(
    "pieces",
    [
        [piece("softmax", 1.0, 1.0)],
        [piece("scores", 1.0, 40.0)],
        [piece("softmax", 1.0, None), piece("scores", 1.0, 40.0)],
        [piece("softmax", 1.0, 1.0), piece("scores", 1.0, None)],
        [piece("softmax", None, 1.0), piece("scores", 1.0, 40.0)],
        [piece("softmax", 1.0, 1.0), piece("scores", None, 40.0)],
    ],
)
def test_softmax_is_not_held_against_what_is_unknown(pieces):
    assert figures(PROFILE, *pieces) == {}


def test_softmax_is_held_against_the_scores_of_forward_and_a_copy():
    pieces = [piece("softmax", 1.0, 1.0, 60.0), piece("scores", 0.5, 40.0)]
    others = [replace(each, phase="backward", main_ms=9.0) for each in pieces]
    product_first = CeilingRow(operation="matmul", precision="fp32", gb_s=1.0)
    found = figures(PROFILE, *pieces, *others, product_first, COPY)["kernels.softmax"]
    assert found == {"fewer_flop": 40.0, "faster": 0.5, "is_memory_bound": True, "gb_s": 60.0, "of_copy": 0.6}
    assert "of_copy" not in figures(PROFILE, *pieces, product_first)["kernels.softmax"]
    assert "of_copy" in figures(PROFILE, pieces[0], replace(pieces[1], main_tflop=1.5), COPY)["kernels.softmax"]
    unknown = [replace(pieces[0], main_gb_s=None), pieces[1]]
    assert "of_copy" not in figures(PROFILE, *unknown, COPY)["kernels.softmax"]


@pytest.mark.parametrize(("gb", "told"), [(None, None), (2.0, 2.0)])
def test_what_the_optimizer_takes_is_of_what_is_known(gb, told):
    rows = [family("a", 1, ms=100.0), family("b", 1), family("c", 1, "optimizer", ms=15.0, gb=gb),
            family("d", 1, "optimizer")]  # fmt: skip
    assert figures(PROFILE, *rows)["kernels.optimizer-unfused"] == {"share": 0.15, "gb": told}


def test_transfers_are_no_part_of_the_kernel_time_of_which_the_optimizer_has_its_share():
    """15 of 100 ms; with the transfers it would be 15 of 1000, and 90 of 100 by those of the optimizer's own phase."""
    rows = [family("matmul", 1, ms=85.0), family("optimizer", 1, ms=15.0), family("transfer", 1, ms=900.0, gb=9.0),
            family("transfer", 1, "optimizer", ms=75.0, gb=9.0)]  # fmt: skip
    updates = family("optimizer", 1, "optimizer", ms=15.0, gb=2.0)
    assert figures(PROFILE, *rows, updates)["kernels.optimizer-unfused"] == {"share": 0.15, "gb": 2.0}
    assert figures(PROFILE, *rows, replace(updates, ms=14.0)) == {}


@pytest.mark.parametrize(
    ("shares", "owners", "remedies"),
    [
        ({"parameters": 0.3, "activations": 0.51}, ("activations",), None),
        ({"activations": 0.4, "activations/the loss": 0.39, "parameters": 0.3}, ("activations", "parameters"), None),
        ({"batch": 0.0, "activations": 0.6}, ("activations",), None),
        ({"activations": 0.6, "batch": 0.0, "unknown": 0.0}, ("activations",), None),
        ({"activations": 0.5, "batch": None}, ("activations",), None),
        ({"activations": 0.4, "batch": 0.0, "unknown": 0.0}, ("activations", "batch", "unknown"), None),
        ({"batch": 0.7}, ("batch",), ("a smaller batch",)),
        ({"activations": 0.6, "temporaries": 0.2, "temporaries/Softmax of backward": 0.1}, ("activations",),
         ("activation checkpointing", "a smaller batch")),
    ],
)  # fmt: skip
def test_owners_are_totals_the_largest_first_and_remedies_their_own(shares, owners, remedies):
    found, _ = owned({}, shares)
    assert found.figures["owners"] == owners
    assert remedies is None or found.figures["remedies"] == remedies
