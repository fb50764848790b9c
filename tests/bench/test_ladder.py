import dataclasses
import itertools
import time

import pytest
import torch

import trainstep.bench.ladder as ladder
from trainstep.analysis import plain_form
from trainstep.bench.check.gradients import Deviation
from trainstep.bench.check.step import Verdict
from trainstep.bench.check.updates import UpdateError
from trainstep.bench.ladder import Rung, chosen, climb, rungs_for
from trainstep.commands.output import run_and_report
from trainstep.config import PHASES, ModelConfig, StepConfig
from trainstep.errors import UsageError
from trainstep.kinds import RungRow, StepRow
from trainstep.records import Times
from trainstep.report.page import Report
from trainstep.report.subjects.ladder_findings import recommended_flags
from trainstep.report.subjects.noise import measured_again
from trainstep.stats import Interval, Ratio
from trainstep.training_step import build_step
from trainstep.workload import WorkloadSource, builtin_source

pytestmark = pytest.mark.usefixtures("small_pool")

TOY = ModelConfig(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=256)
SOURCE = builtin_source("toy", TOY)
THEIRS = WorkloadSource("theirs", SOURCE.build)
BASE = StepConfig(batch=2, context=32, device="cpu")
CPU = torch.device("cpu")


class Trusting:
    """Finds every step right, at once: for what the ladder makes of right ones."""

    def __init__(self, source, plain):
        self.source = source

    def start(self, config):
        return build_step(self.source, config), Verdict(RIGHT, UpdateError())

    def end(self, step, verdict):
        return verdict


RIGHT = Deviation(0.0, 1e-6, 0.0, 1e-6, 0.0, 1e-6, 0.0, 1e-6, "")


@pytest.fixture
def trusting(monkeypatch):
    monkeypatch.setattr(ladder, "StepCheck", Trusting)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)  # compiled code is tested with the step


def climb_with(monkeypatch, rungs, source=SOURCE, **options):
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: rungs)
    rows = list(climb(source, BASE, **({"warmup": 1, "steps": 7} | options)))
    assert rows[-1].kind == "control"
    return [row for row in rows if row.kind == "rung"]


def test_rungs_by_device_and_workload():
    on_cpu = [rung.name for rung in rungs_for(SOURCE, CPU, StepConfig())]
    on_gpu = [rung.name for rung in rungs_for(SOURCE, torch.device("cuda"), StepConfig())]
    assert on_cpu == ["fused attention", "fused optimizer", "bf16 autocast", "compiled blocks", "chunked loss"]
    assert on_gpu == [
        *("TF32 matmuls", "bf16 autocast", "fused attention", "our FlashAttention", "fused optimizer"),
        *("compiled blocks", "compiled model", "chunked loss", "fused RoPE", "fused loss"),
    ]
    assert [rung.name for rung in rungs_for(THEIRS, CPU, StepConfig(optimizer="sgd"))] == [
        "bf16 autocast",
        "compiled blocks",
    ]
    users = [rung.change for rung in rungs_for(THEIRS, torch.device("cuda"), StepConfig())]
    assert {"attention": "flash-triton"} in users
    assert not any("loss" in change for change in users)


def test_rungs_are_chosen_by_name_in_their_own_order():
    rungs = rungs_for(SOURCE, CPU, StepConfig())
    assert chosen(rungs, None) == rungs
    assert [rung.name for rung in chosen(rungs, "compiled blocks, fused attention")] == [
        "fused attention",
        "compiled blocks",
    ]
    with pytest.raises(UsageError, match="no rung 'fused': expected some of fused attention, fused optimizer, bf16"):
        chosen(rungs, "compiled blocks,fused")


def test_a_ladder_of_named_rungs_tries_no_others(monkeypatch):
    faked(monkeypatch, [100.0, 50.0], [(100.0, 50.0), (100.0, 50.0)])
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: pytest.fail("all that may help"))
    rows = climb(SOURCE, BASE, warmup=0, steps=7, rungs=TWO[:1])
    assert [row.rung for row in rows if row.kind == "rung"] == ["baseline", "one"]


def test_right_rungs_are_checked_timed_and_trained_on_the_same_batches(monkeypatch):
    rungs = [Rung("fused attention", {"attention": "sdpa"}), Rung("bf16 autocast", {"precision": "bf16"})]
    records = climb_with(monkeypatch, rungs)
    assert [record.status for record in records] == ["ok", "ok", "ok"]
    first, attention, bf16 = (record.values for record in records)
    assert 0 < first["gradient_error"] < first["error_budget"] < 1e-5, "float32's own, beside float64"
    assert 0 < attention["gradient_error"] < attention["error_budget"] < 1e-5
    assert 1e-4 < bf16["gradient_error"] < bf16["error_budget"] < 0.05
    assert 0 < bf16["float32_error"] < bf16["float32_allowed"] < 1e-5
    assert attention["update_error"] <= attention["update_allowed"] < 1e-3
    reference = records[0].samples["training_loss"]
    assert len(reference) == 8
    assert records[1].samples["training_loss"] == pytest.approx(reference, rel=1e-4)
    assert records[2].samples["training_loss"] == pytest.approx(reference, rel=2e-2)


def faked(monkeypatch, alone, turns=(), peaks=None):
    """Steps are taken as ever; the times (ms) and peaks that are told are these, in the order of the measurements.

    Args:
        alone: of each step measured by itself. Several times are those of its steps, in turn; None is a failure.
        turns: of the step before and of its own, each time that two take turns; None where they do not fit together.
        peaks: of each step measured by itself; None where unknown.
    """
    original, in_turns, measured, taken = ladder.measure_training_step, ladder.time_in_turns, [], []
    monkeypatch.setattr(ladder, "StepCheck", Trusting)

    def retimed(steps, ms):
        told = itertools.cycle(ms if isinstance(ms, list) else [ms])
        return tuple(dataclasses.replace(each, wall_ms=next(told)) for each in steps)

    def measure(*arguments):
        found = original(*arguments)
        measured.append(found)
        ms, memory = alone[len(measured) - 1], found.memory
        if ms is None:
            raise torch.OutOfMemoryError("no room")
        if peaks:
            peak = peaks[len(measured) - 1]
            memory = None if peak is None else dataclasses.replace(memory, peak=peak)
        timing = dataclasses.replace(found.timing, steps=retimed(found.timing.steps, ms))
        return dataclasses.replace(found, timing=timing, memory=memory)

    def take_turns(*arguments, **options):
        taken.append(in_turns(*arguments, **options))
        told = turns[len(taken) - 1]
        if told is None:
            raise torch.OutOfMemoryError("no room for both")
        return [list(retimed(each, ms)) for each, ms in zip(taken[-1], told, strict=True)]

    monkeypatch.setattr(ladder, "measure_training_step", measure)
    monkeypatch.setattr(ladder, "time_in_turns", take_turns)
    return taken


TWO = [Rung("one", {"attention": "sdpa"}), Rung("two", {"optimizer": "adamw-fused"})]


def test_the_gain_is_over_the_kept_rung_in_turns_and_the_speed_up_the_product_of_gains(monkeypatch):
    """Times taken alone at different moments say nothing: the machine became twice as fast in between."""
    faked(monkeypatch, [200.0, 50.0, 40.0], [(100.0, 50.0), (50.0, 40.0), (100.0, 40.0)])
    first, one, two = climb_with(monkeypatch, TWO)
    assert [rung.verdict for rung in (first, one, two)] == ["baseline", "faster", "faster"]
    assert (one.speedup, one.gain, one.step_ms, one.in_turns) == (2.0, 2.0, 50.0, True)
    assert (two.speedup, two.gain, two.in_turns, first.in_turns) == (2.5, 1.25, True, None)
    assert two.speedup_low < 2.5 < two.speedup_high
    assert two.gain_low < 1.25 < two.gain_high < two.speedup_low
    assert two.samples["step_before"] == [50.0] * 7


def test_turns_are_taken_with_the_rung_that_is_kept(monkeypatch, trusting):
    original, seen = ladder.time_in_turns, []

    def take_turns(steps, **options):
        seen.append([(run.__self__.step.config.attention, run.__self__.step.config.optimizer) for run in steps])
        before, own = original(steps, **options)
        own = [dataclasses.replace(each, wall_ms=1.0) for each in own]
        return [[dataclasses.replace(each, wall_ms=2.0) for each in before], own]

    monkeypatch.setattr(ladder, "time_in_turns", take_turns)
    climb_with(monkeypatch, TWO)
    plain, one, two = ("eager", "adamw-foreach"), ("sdpa", "adamw-foreach"), ("sdpa", "adamw-fused")
    assert seen == [[plain, one], [one, two], [plain, two]], "and at the end the first with the top"


def test_what_is_slower_than_the_kept_rung_is_not_kept_though_faster_than_the_first(monkeypatch):
    faked(monkeypatch, [100.0, 50.0, 80.0, 80.0], [(100.0, 50.0), (50.0, 80.0), (50.0, 80.0), (100.0, 50.0)])
    _, _, two = climb_with(monkeypatch, TWO)
    assert (two.verdict, two.kept) == ("slower", False)
    assert (two.speedup, two.gain) == (1.25, 0.625)


def test_what_slows_the_machine_for_a_while_is_in_both_of_a_pair(monkeypatch):
    """The same step was called 8.9 times faster where something else ran during the first measurement."""
    busy = [400.0, 100.0, 900.0, 100.0, 100.0, 300.0, 100.0]
    faked(monkeypatch, [900.0, 100.0], [(busy, [each / 1.5 for each in busy]), (100.0, 66.0)])
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.verdict, one.gain, one.attempts) == ("faster", pytest.approx(1.5), 1)
    assert one.gain_high / one.gain_low == pytest.approx(1.02**2)


@pytest.mark.parametrize(
    ("peak", "kept"),
    [(700, True), (970, True), (980, False), (990, False), (1000, False), (1400, False), (None, False)],
)
def test_smaller_is_by_more_than_runs_differ(monkeypatch, peak, kept):
    faked(monkeypatch, [100.0] * 4, [(100.0, 100.0)] * 3, [1000, peak, 1000, peak])
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.verdict, one.kept, one.attempts) == ("inconclusive", kept, 1)


def test_of_an_unknown_peak_nothing_is_smaller(monkeypatch):
    faked(monkeypatch, [100.0] * 4, [(100.0, 100.0)] * 3, [None, 500, None, 500])
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.verdict, one.kept) == ("inconclusive", False)


@pytest.mark.parametrize(("step", "attempts"), [(1.018, 1), (1.023, 4)])
def test_more_turns_are_taken_while_a_wide_interval_decides_nothing(monkeypatch, step, attempts):
    """The interval reaches from the smallest ratio to the largest and 2 % beyond: 8 % of 1 with steps of 2 %."""
    before = [100.0 * step, 100.0, 100.0 / step] * 3
    taken = faked(monkeypatch, [100.0] * 3, [(before, 100.0)] * 4 + [(100.0, 100.0)] * 2)
    _, one = climb_with(monkeypatch, TWO[:1], steps=9)
    assert (one.verdict, one.attempts, one.n) == ("inconclusive", attempts, 9 * attempts)
    assert len(taken) == attempts + one.kept
    assert len(one.samples["step"]) == len(one.samples["forward"]) == one.n
    assert [finding.figures for finding in measured_again([one])] == [{"rungs": ("one",)}] * (attempts > 1)


def test_only_the_first_turns_are_warmed_up(monkeypatch):
    before = [105.0, 100.0, 95.0] * 3
    faked(monkeypatch, [100.0] * 3, [(before, 100.0)] * 4 + [(100.0, 100.0)] * 2)
    retimed, warmups = ladder.time_in_turns, []

    def take_turns(*arguments, **options):
        warmups.append(options["warmup"])
        return retimed(*arguments, **options)

    monkeypatch.setattr(ladder, "time_in_turns", take_turns)
    _, one = climb_with(monkeypatch, TWO[:1], warmup=3, steps=9)
    assert warmups[: one.attempts] == [3, 0, 0, 0]


@pytest.mark.parametrize(
    ("gain", "is_open"),
    [
        (Ratio(1.07, Interval(1.0, 1.08)), False),
        (Ratio(1.0, Interval(0.95, 1.08)), True),
        (Ratio(0.93, Interval(0.92, 1.0)), True),
        (Ratio(1.5, Interval(1.2, 1.9)), False),
        (Ratio(1.5, None), False),
    ],
)
def test_an_interval_is_wide_by_its_part_of_the_gain(gain, is_open):
    assert ladder._is_open(gain) == is_open


def test_a_wide_interval_that_decides_is_enough(monkeypatch):
    faked(monkeypatch, [100.0] * 2, [([200.0, 300.0] * 4, 100.0), (100.0, 100.0)])
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.verdict, one.attempts) == ("faster", 1)


def test_two_steps_that_do_not_fit_together_are_timed_one_after_the_other(monkeypatch):
    faked(monkeypatch, [90.0, 55.0, 110.0, 45.0, 100.0, 50.0], [None, None])
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: TWO[:1])
    _, one, *controls = climb(SOURCE, BASE, warmup=1, steps=7)
    assert (one.verdict, one.gain, one.attempts, one.in_turns) == ("faster", 2.0, 2, False)
    assert "step_before" not in one.samples
    assert [row.again_ms for row in controls] == [100.0, 50.0]


def test_a_rung_that_cannot_be_measured_again_is_told_by_its_first_times(monkeypatch):
    faked(monkeypatch, [100.0, 100.0, None, None, 100.0], [None])
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.status, one.attempts, one.verdict, one.step_ms) == ("ok", 1, "inconclusive", 100.0)


def test_the_first_rung_is_one_times_itself(monkeypatch):
    faked(monkeypatch, [100.0, 50.0], [(100.0, 50.0)] * 2)
    first, one = climb_with(monkeypatch, TWO[:1])
    assert (first.speedup, first.gain, first.speedup_low, first.gain_high) == (1.0, 1.0, None, None)
    assert (first.verdict, first.kept, one.kept, first.attempts) == ("baseline", True, True, 1)


def test_a_rung_on_the_baseline_is_as_much_faster_as_its_gain_says(monkeypatch):
    """One times itself is exactly one: it widens no interval that is multiplied by it."""
    faked(monkeypatch, [100.0, 50.0], [([100.0, 104.0], [50.0, 51.0])] * 2)
    _, one = climb_with(monkeypatch, TWO[:1])
    assert one.gain_low < one.gain < one.gain_high
    found = (one.speedup, one.speedup_low, one.speedup_high)
    assert found == pytest.approx((one.gain, one.gain_low, one.gain_high), rel=1e-12)


def test_a_step_measured_twice_has_the_last_memory_and_the_first_first_step(monkeypatch):
    """Compiling is in the first of all steps alone, and what a step took while it was compiled is not its peak."""
    compiling = [9000.0] + [50.0] * 7
    faked(monkeypatch, [100.0, compiling, 100.0, 50.0, 100.0, 50.0], [None, None], [1000, 700, 1000, 500, 1000, 500])
    _, one = climb_with(monkeypatch, TWO[:1])
    assert one.peak_gib * 2**30 == pytest.approx(500)
    assert one.first_step_ms == 9000


@pytest.mark.parametrize(("peaks", "kept"), [([1000, 1200, 1000, 700], True), ([1000, 700, 600, 700], False)])
def test_smaller_is_what_was_measured_last(monkeypatch, peaks, kept):
    faked(monkeypatch, [100.0] * 6, [None, None], [*peaks, 1000, 1000])
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.verdict, one.kept, one.attempts) == ("inconclusive", kept, 2)


def test_a_step_of_which_nothing_can_be_said_gets_no_time(monkeypatch):
    class Doubting(Trusting):
        def start(self, config):
            step, found = super().start(config)
            vague = dataclasses.replace(RIGHT, gradient_allowed=0.7)
            return step, found if config == BASE else dataclasses.replace(found, own=vague)

    faked(monkeypatch, [100.0, 50.0, 100.0], [(100.0, 50.0)])
    monkeypatch.setattr(ladder, "StepCheck", Doubting)
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.status, one.verdict, one.kept, one.step_ms) == ("unsupported", "unsupported", False, None)
    assert one.reason == "rounding alone takes its gradients off by so much that 0.7 would be allowed"
    assert one.error_budget == 0.7


def test_every_part_is_told_before_it_begins(monkeypatch):
    faked(monkeypatch, [100.0, 120.0, 50.0, 40.0], [(100.0, 120.0), (100.0, 50.0), (50.0, 40.0), (100.0, 40.0)])
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    told = []
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: [Rung("blocks", {"compile": "blocks"}), TWO[0]])
    rows = climb(SOURCE, BASE, warmup=0, steps=7, on_part=told.append)
    assert next(rows).rung == "baseline"
    assert told == ["ladder: baseline, checked and timed"]
    assert [getattr(row, "rung", row.kind) for row in rows] == [
        *("blocks", "one", "blocks, on the top"),
        *("control", "control"),
    ]
    assert told[1:] == [
        "ladder: blocks, compiled, checked and timed",
        "ladder: one, checked and timed",
        "ladder: blocks, on the top, compiled, checked and timed",
        "ladder: the first rung and the top again",
    ]


def test_where_nothing_fits_there_is_no_control(monkeypatch):
    def build(step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ladder, "StepCheck", Trusting)
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: TWO)
    rows = list(climb(WorkloadSource("big", build, TOY), BASE, warmup=1, steps=1))
    assert [(row.kind, row.status, row.verdict) for row in rows] == [("rung", "out of memory", "out of memory")] * 3


def test_a_control_that_fails_is_a_row_and_medians_lie_between_the_middle_two(monkeypatch):
    alone = [[100.0, 100.0, 110.0, 110.0] * 2, 50.0, [90.0, 90.0, 120.0, 120.0] * 2, None]
    faked(monkeypatch, alone, [(100.0, 50.0), None])
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: TWO[:1])
    _, _, first, top = climb(SOURCE, BASE, warmup=1, steps=8)
    assert (first.first_ms, first.again_ms, first.ratio, first.status) == (105.0, 105.0, 1.0, "ok")
    assert (top.status, top.reason, top.attention) == ("out of memory", "no room", "sdpa")


def test_ten_steps_are_timed_after_three(monkeypatch):
    taken = faked(monkeypatch, [100.0] * 3, [(100.0, 50.0)] * 2)
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: TWO[:1])
    first, one, *_ = climb(SOURCE, BASE)
    assert (first.n, len(first.samples["training_loss"])) == (10, 13)
    assert (one.n, len(one.samples["training_loss"]), len(taken[0][0])) == (10, 13, 10)


def test_the_seconds_of_a_check_are_those_before_and_after_the_measurement(monkeypatch):
    class Slow(Trusting):
        def start(self, config):
            time.sleep(0.2)
            return super().start(config)

        def end(self, step, verdict):
            time.sleep(0.3)
            return verdict

    faked(monkeypatch, [100.0] * 2)
    monkeypatch.setattr(ladder, "StepCheck", Slow)
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: [])
    original = ladder.measure_training_step

    def measure(*arguments):
        time.sleep(3)
        return original(*arguments)

    monkeypatch.setattr(ladder, "measure_training_step", measure)
    first, _ = climb(SOURCE, BASE, warmup=1, steps=1)
    assert 0.5 <= first.check_s < 3


@pytest.mark.parametrize(
    "name",
    ["embedding.weight", "blocks.1.attention_norm.weight", "head.weight"],
)
def test_a_wrong_gradient_is_seen_in_every_parameter(monkeypatch, name):
    """Forward and loss are right; of all gradients one is a thousandth too large."""

    def build(step):
        workload = SOURCE.build(step)
        if step.attention == "sdpa":
            workload.module.get_parameter(name).register_hook(lambda gradient: 1.001 * gradient)
        return workload

    (_, wrong) = climb_with(monkeypatch, TWO[:1], WorkloadSource("bad", build, TOY), steps=1)
    assert (wrong.status, wrong.kept, wrong.worst_parameter) == ("wrong", False, name)


def test_a_rung_builds_only_on_what_was_kept(monkeypatch, trusting):
    monkeypatch.setattr(ladder, "verdict", lambda ratio: "slower")
    rungs = [Rung("one", {"attention": "sdpa"}), Rung("two", {"optimizer": "adamw-fused"})]
    records = climb_with(monkeypatch, rungs)
    assert records[2].case["attention"] == "eager"
    assert [record.values["kept"] for record in records] == [True, False, False]
    assert recommended_flags(records) == ""


def test_faster_rungs_add_up(monkeypatch, trusting):
    monkeypatch.setattr(ladder, "verdict", lambda ratio: "faster")
    rungs = [Rung("one", {"attention": "sdpa"}), Rung("two", {"optimizer": "adamw-fused"})]
    records = climb_with(monkeypatch, rungs)
    assert records[2].case["attention"] == "sdpa"
    assert recommended_flags(records) == "--attention sdpa --optimizer adamw-fused"


def test_a_wrong_rung_gets_no_speed(monkeypatch):
    """A fast path that drops one block's residual is caught by its gradients, not by its speed."""

    def build(step):
        workload = SOURCE.build(step)
        if step.attention == "sdpa":
            workload.module.blocks[1].attention.output.weight.data.mul_(1.05)
        return workload

    (_, wrong) = climb_with(monkeypatch, [Rung("bad", {"attention": "sdpa"})], WorkloadSource("bad", build, TOY))
    assert wrong.status == "wrong"
    assert "step_ms" not in wrong.values
    assert wrong.values["kept"] is False
    assert "off by" in wrong.reason
    assert wrong.gradient_error > wrong.error_budget


def test_the_first_rung_that_fits_becomes_the_reference(monkeypatch):
    def build(step):
        if step.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SOURCE.build(step)

    rungs = [Rung("sdpa", {"attention": "sdpa"}), Rung("fused", {"optimizer": "adamw-fused"})]
    records = climb_with(monkeypatch, rungs, WorkloadSource("big", build, TOY))
    assert [record.status for record in records] == ["out of memory", "ok", "ok"]
    assert records[1].values["verdict"] == "first that fits"
    assert recommended_flags(records).startswith("--attention sdpa"), "which the first rung did not have"
    assert records[1].gradient_error < records[1].error_budget < 1e-5


@pytest.mark.parametrize(
    ("plain", "is_stood_in_for", "is_taken"),
    [(BASE, False, True), (BASE, True, False), (dataclasses.replace(BASE, checkpointing="every-1"), False, False)],
    ids=["of this step", "that has none of its own", "of another step"],
)
def test_a_judge_is_taken_where_its_reference_is_this_plain_step(monkeypatch, plain, is_stood_in_for, is_taken):
    made = []

    class Given(Trusting):
        def __init__(self, source, plain):
            super().__init__(source, plain)
            self.plain, self.is_stood_in_for, self.asked = plain, is_stood_in_for, 0

        def start(self, config):
            self.asked += 1
            return super().start(config)

    monkeypatch.setattr(ladder, "StepCheck", lambda *args: made.append(Given(*args)) or made[-1])
    judge = Given(SOURCE, plain_form(plain))
    climb_with(monkeypatch, TWO[:1], judge=judge)
    assert (judge.asked > 0) is is_taken
    assert len(made) == (not is_taken)


def test_where_the_baseline_is_too_large_what_makes_room_comes_first(monkeypatch):
    """Long contexts had no bf16: its rung came before that of the attention that made room for it."""
    monkeypatch.setattr(ladder, "StepCheck", Trusting)

    def build(step):
        if step.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SOURCE.build(step)

    changes = {
        "fused": {"optimizer": "adamw-fused"},
        "bf16": {"precision": "bf16"},
        "sdpa": {"attention": "sdpa"},
        "chunked": {"loss": "chunked"},
    }
    rungs = [Rung(name, change) for name, change in changes.items()]
    records = climb_with(monkeypatch, rungs, WorkloadSource("big", build, TOY), steps=7)
    tried = [(record.rung, record.status, record.attention) for record in records]
    assert tried[:5] == [
        ("baseline", "out of memory", "eager"),
        ("sdpa", "ok", "sdpa"),
        ("fused", "ok", "sdpa"),
        ("bf16", "ok", "sdpa"),
        ("chunked", "ok", "sdpa"),
    ]
    names = [record.rung for record in climb_with(monkeypatch, rungs, SOURCE, steps=7)]
    assert names[:5] == ["baseline", *changes], "where it is not, in the order they have"


def test_what_was_too_large_for_what_was_kept_is_tried_on_a_top_that_is_smaller(monkeypatch):
    def build(step):
        if step.optimizer == "adamw-fused" and step.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SOURCE.build(step)

    monkeypatch.setattr(ladder, "_is_smaller", lambda rung, than: rung.config.attention != than.config.attention)
    faked(monkeypatch, [100.0] * 3, [(100.0, 100.0), (100.0, 50.0), (100.0, 50.0)])
    large = [TWO[1], TWO[0]]
    baseline, two, one, again = climb_with(monkeypatch, large, WorkloadSource("big", build, TOY))
    assert [(row.rung, row.status, row.kept) for row in (baseline, two, one, again)] == [
        ("baseline", "ok", True),
        ("two", "out of memory", False),
        ("one", "ok", True),
        ("two, on the top", "ok", True),
    ]


def test_no_rung_trains_by_another_algorithm(trusting):
    for optimizer, tried in (("sgd", set()), ("adamw-foreach", {"adamw-fused"})):
        base = plain_form(dataclasses.replace(BASE, optimizer=optimizer, precision="bf16"))
        assert base == dataclasses.replace(BASE, optimizer=optimizer)
        for device in (CPU, torch.device("cuda")):
            changes = [rung.change for rung in rungs_for(SOURCE, device, StepConfig(optimizer=optimizer))]
            assert {change["optimizer"] for change in changes if "optimizer" in change} == tried
    baseline, *rungs, _ = climb(SOURCE, dataclasses.replace(BASE, optimizer="sgd"), warmup=1, steps=1)
    assert {rung.case["optimizer"] for rung in (baseline, *rungs)} == {"sgd"}


@pytest.mark.parametrize(("steps", "kept"), [(3, False), (7, True)])
def test_too_few_samples_keep_nothing(monkeypatch, steps, kept):
    """Smaller and not told apart is worth keeping, but only where there is an interval to tell by."""
    monkeypatch.setattr(ladder, "verdict", lambda ratio: "inconclusive")
    monkeypatch.setattr(ladder, "_is_smaller", lambda rung, than: True)
    faked(monkeypatch, [100.0] * 4, [(100.0, 100.0)] * 5)
    records = climb_with(monkeypatch, [Rung("chunked", {"loss": "chunked"})], steps=steps)
    assert records[1].values["kept"] is kept


@pytest.mark.parametrize(("ms", "kept"), [(100.0, True), (101.0, False)])
def test_what_saves_memory_is_kept_only_where_it_is_certainly_not_slower(monkeypatch, ms, kept):
    """The interval of the gain has to lie above 0.98; before, any that reached 1 would do."""
    monkeypatch.setattr(ladder, "RUN_SPREAD", 0.02)
    faked(monkeypatch, [100.0, ms] * 2, [(100.0, ms)] * 2, [1000, 500] * 2)
    _, one = climb_with(monkeypatch, TWO[:1])
    assert (one.verdict, one.kept) == ("inconclusive", kept)


@pytest.mark.parametrize(("steps", "warmup"), [(0, 3), (10, -1)])
def test_a_ladder_without_steps_is_refused_before_anything_is_built(steps, warmup):
    with pytest.raises(UsageError, match=f"steps is {steps} and warmup {warmup}; expected at least one step"):
        next(climb(SOURCE, BASE, steps=steps, warmup=warmup))


def test_first_and_top_are_measured_again_at_the_end(monkeypatch):
    faked(monkeypatch, [100.0, 50.0], [(100.0, 50.0), (110.0, 50.0)])
    monkeypatch.setattr(ladder, "rungs_for", lambda *_: TWO[:1])
    first, one, *controls = climb(SOURCE, BASE, warmup=1, steps=7)
    assert one.kept
    assert [row.kind for row in controls] == ["control", "control"]
    assert [row.case["attention"] for row in controls] == [first.attention, one.attention] == ["eager", "sdpa"]
    assert [(row.first_ms, row.again_ms, row.ratio) for row in controls] == [(100.0, 110.0, 1.1), (50.0, 50.0, 1.0)]
    assert controls[0].ratio_low < 1.1 < controls[0].ratio_high
    assert (controls[0].speedup, controls[1].speedup) == (None, 2.2)
    assert controls[1].speedup_low < 2.2 < controls[1].speedup_high


def test_a_rejected_rung_is_tried_once_more_on_the_top(monkeypatch):
    """What brought nothing below may bring something above; what was kept, or tried on the top, is not tried again."""
    faked(monkeypatch, [100.0, 120.0, 50.0, 40.0], [(100.0, 120.0), (100.0, 50.0), (50.0, 40.0), (100.0, 40.0)])
    _, one, two, again = climb_with(monkeypatch, TWO)
    assert [one.kept, two.kept, again.kept] == [False, True, True]
    assert again.rung == "one, on the top"
    assert (again.attention, again.optimizer) == ("sdpa", "adamw-fused")
    assert again.gain == 1.25


def test_a_rejected_rung_that_would_undo_what_was_kept_since_is_not_tried_again(monkeypatch):
    both = Rung("both", {"attention": "sdpa", "loss": "chunked"})
    faked(monkeypatch, [100.0, 120.0, 50.0], [(100.0, 120.0), (100.0, 50.0), (100.0, 50.0)])
    _, one, two = climb_with(monkeypatch, [both, TWO[0]])
    assert [one.kept, two.kept] == [False, True]


@pytest.mark.gpu
def test_the_whole_ladder_on_a_gpu():
    source = builtin_source("toy", ModelConfig(d_model=256, d_ff=1024, num_layers=4, num_heads=4))
    records = list(climb(source, StepConfig(context=256), warmup=2, steps=7))
    assert [record.status for record in records] == ["ok"] * len(records), [record.reason for record in records]
    rungs = [record for record in records if record.kind == "rung"]
    assert len({rung.rung for rung in rungs}) == len(rungs)
    tried = [rung for rung in rungs if not rung.rung.endswith("on the top")]
    assert len(tried) == 1 + len(rungs_for(source, torch.device("cuda"), StepConfig()))
    assert all(rung.values["gradient_error"] <= rung.values["error_budget"] for rung in rungs)


def test_without_a_baseline_no_rung_is_tried(monkeypatch, tmp_path, capsys):
    """A compiled rung that ran was shown as the baseline, and all seemed well."""

    def build(step):
        workload = SOURCE.build(step)
        if step.attention == "eager":
            workload.loss = lambda *_: 1 / 0
        return workload

    monkeypatch.setattr(ladder, "rungs_for", lambda *_: TWO)
    rows = list(climb(WorkloadSource("broken", build, TOY), BASE, warmup=1, steps=1))
    assert [(row.rung, row.status, row.verdict, row.kept) for row in rows] == [("baseline", "failed", "failed", False)]
    step = StepRow(
        workload="broken", mode="step", warmup=5, times={name: Times(1.0, 1.0, 1.0) for name in ("step", *PHASES)}
    )
    assert run_and_report([step, *rows], tmp_path, "ladder") == 1, "though something else ran"
    printed = capsys.readouterr().out
    assert printed.index("The baseline failed. broken: failed: ZeroDivisionError") < printed.index("Time of one step")
    first, *_ = Report([step, *rows]).findings
    assert (first.id, first.figures["status"]) == ("gain.no-baseline", "failed")
    assert "no rung was tried" in first.sentence
    assert recommended_flags(rows) == ""


def test_a_baseline_that_is_too_large_is_no_mistake(tmp_path):
    why = {"status": "out of memory", "reason": "40 GiB", "verdict": "out of memory"}
    large = RungRow(workload="w", rung="baseline", precision="fp32", **why)
    fits = RungRow(workload="w", rung="bf16", precision="bf16", verdict="first that fits", kept=True, speedup=1.0)
    assert run_and_report([large, fits], tmp_path, "ladder") == 0
    first, none = Report([large, fits]).findings
    assert (first.id, first.figures) == ("gain.too-large", {"reason": "40 GiB", "first": "bf16"})
    assert none.sentence == "No change on the ladder made the step faster: bf16 is the best found."
    assert recommended_flags([large, fits]) == "--precision bf16"


def test_what_is_not_reproducible_is_not_called_wrong(monkeypatch):
    def build(step):
        torch.seed()
        return SOURCE.build(dataclasses.replace(step, seed=int(torch.randint(2**31, ()))))

    monkeypatch.setattr(ladder, "rungs_for", lambda *_: TWO)
    (row,) = climb(WorkloadSource("restless", build, TOY), BASE, warmup=1, steps=1)
    assert row.status == "unsupported"
    assert row.reason.startswith("not reproducible: built twice from one seed, ")
