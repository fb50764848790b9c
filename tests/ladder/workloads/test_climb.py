"""Which rungs are tried, judged and built upon."""

import dataclasses

import pytest
import torch

import trainstep.ladder.ladder as rule
import trainstep.ladder.steps as ladder
from tests.ladder.workloads import BASE, SOURCE, TOY, TWO, Trusting, change, climb_with
from trainstep.base.config import PHASES, ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.stats import Interval, Ratio
from trainstep.bench.analysis import plain_form
from trainstep.commands.output import run_and_report
from trainstep.ladder.change import changes_of_step, chosen
from trainstep.ladder.ladder import is_open
from trainstep.ladder.steps import climb
from trainstep.report.page import Report
from trainstep.report.subjects.climbs import recommended_flags
from trainstep.rows import FINAL, ChangeRow, StepRow
from trainstep.rows.records import Times
from trainstep.step.workload import WorkloadSource, builtin_source

pytestmark = pytest.mark.usefixtures("small_pool")
THEIRS = WorkloadSource("theirs", SOURCE.build)
CPU = torch.device("cpu")


def test_rungs_by_device_and_workload():
    on_cpu = [rung.name for rung in changes_of_step(SOURCE, "cpu", StepConfig())]
    on_gpu = [rung.name for rung in changes_of_step(SOURCE, "cuda", StepConfig())]
    assert on_cpu == ["fused attention", "fused optimizer", "bf16 autocast", "compiled blocks", "chunked loss"]
    assert on_gpu == [
        *("TF32 matmuls", "bf16 autocast", "fused attention", "our FlashAttention", "fused optimizer"),
        *("compiled blocks", "compiled model", "CUDA graph", "chunked loss", "fused RoPE", "fused loss"),
    ]
    assert [rung.name for rung in changes_of_step(THEIRS, "cpu", StepConfig(optimizer="sgd"))] == [
        "bf16 autocast",
        "compiled blocks",
    ]
    users = [each.step for each in changes_of_step(THEIRS, "cuda", StepConfig())]
    assert {"attention": "flash-triton"} in users
    assert not any("loss" in change for change in users)


def test_rungs_are_chosen_by_name_in_their_own_order():
    rungs = changes_of_step(SOURCE, "cpu", StepConfig())
    assert chosen(rungs, None) == rungs
    assert [rung.name for rung in chosen(rungs, "compiled blocks, fused attention")] == [
        "fused attention",
        "compiled blocks",
    ]
    with pytest.raises(UsageError, match="unknown change 'fused'; expected some of fused attention, fused"):
        chosen(rungs, "compiled blocks,fused")


def test_right_rungs_are_checked_timed_and_trained_on_the_same_batches(monkeypatch):
    rungs = [change("fused attention", {"attention": "sdpa"}), change("bf16 autocast", {"precision": "bf16"})]
    records = climb_with(rungs)
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


def test_turns_are_taken_with_the_rung_that_is_kept(monkeypatch, trusting):
    original, seen = ladder.time_in_turns, []

    def take_turns(steps, **options):
        seen.append([(run.__self__.step.config.attention, run.__self__.step.config.optimizer) for run in steps])
        before, own = original(steps, **options)
        own = [dataclasses.replace(each, wall_ms=1.0) for each in own]
        return [[dataclasses.replace(each, wall_ms=2.0) for each in before], own]

    monkeypatch.setattr(ladder, "time_in_turns", take_turns)
    climb_with(TWO)
    plain, one, two = ("eager", "adamw-foreach"), ("sdpa", "adamw-foreach"), ("sdpa", "adamw-fused")
    assert seen == [[plain, one], [one, two], [plain, two]], "and at the end the first with the top"


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (Ratio(1.07, Interval(1.0, 1.08)), False),
        (Ratio(1.0, Interval(0.95, 1.08)), True),
        (Ratio(0.93, Interval(0.92, 1.0)), True),
        (Ratio(1.5, Interval(1.2, 1.9)), False),
        (Ratio(1.5, None), False),
    ],
)
def test_an_interval_is_wide_by_its_part_of_the_gain(gain, expected):
    assert is_open(gain) is expected


def test_where_nothing_fits_there_is_no_control(monkeypatch):
    def build(step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ladder, "StepCheck", Trusting)
    rows = list(climb(WorkloadSource("big", build, TOY), BASE, changes=TWO, warmup=1, steps=1))
    assert [(row.kind, row.status, row.verdict) for row in rows] == [("change", "out of memory", "out of memory")] * 3


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.1.attention_norm.weight", "head.weight"])
def test_a_wrong_gradient_is_seen_in_every_parameter(monkeypatch, name):
    """Forward and loss are right; of all gradients one is a thousandth too large."""

    def build(step):
        workload = SOURCE.build(step)
        if step.attention == "sdpa":
            workload.module.get_parameter(name).register_hook(lambda gradient: 1.001 * gradient)
        return workload

    (_, wrong) = climb_with(TWO[:1], WorkloadSource("bad", build, TOY), steps=1)
    assert (wrong.status, wrong.accepted, wrong.worst_parameter) == ("wrong", False, name)


def test_a_rung_builds_only_on_what_was_kept(monkeypatch, trusting):
    monkeypatch.setattr(rule, "verdict", lambda ratio: "slower")
    rungs = [change("one", {"attention": "sdpa"}), change("two", {"optimizer": "adamw-fused"})]
    records = climb_with(rungs)
    assert records[2].case["attention"] == "eager"
    assert [record.values["accepted"] for record in records] == [True, False, False]
    assert recommended_flags(records) == ""


def test_faster_rungs_add_up(monkeypatch, trusting):
    monkeypatch.setattr(rule, "verdict", lambda ratio: "faster")
    rungs = [change("one", {"attention": "sdpa"}), change("two", {"optimizer": "adamw-fused"})]
    records = climb_with(rungs)
    assert records[2].case["attention"] == "sdpa"
    assert recommended_flags(records) == "--attention sdpa --optimizer adamw-fused"


def test_a_wrong_rung_gets_no_speed(monkeypatch):
    """A fast path that drops one block's residual is caught by its gradients, not by its speed."""

    def build(step):
        workload = SOURCE.build(step)
        if step.attention == "sdpa":
            workload.module.blocks[1].attention.output.weight.data.mul_(1.05)
        return workload

    (_, wrong) = climb_with([change("bad", {"attention": "sdpa"})], WorkloadSource("bad", build, TOY))
    assert wrong.status == "wrong"
    assert "step_ms" not in wrong.values
    assert wrong.values["accepted"] is False
    assert "off by" in wrong.reason
    assert wrong.gradient_error > wrong.error_budget


def test_the_first_rung_that_fits_becomes_the_reference(monkeypatch):
    def build(step):
        if step.attention == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SOURCE.build(step)

    rungs = [change("sdpa", {"attention": "sdpa"}), change("fused", {"optimizer": "adamw-fused"})]
    records = climb_with(rungs, WorkloadSource("big", build, TOY))
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
    climb_with(TWO[:1], judge=judge)
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
    rungs = [change(*each) for each in changes.items()]
    records = climb_with(rungs, WorkloadSource("big", build, TOY), steps=7)
    tried = [(record.change, record.status, record.attention) for record in records]
    assert tried[:5] == [
        ("baseline", "out of memory", "eager"),
        ("sdpa", "ok", "sdpa"),
        ("fused", "ok", "sdpa"),
        ("bf16", "ok", "sdpa"),
        ("chunked", "ok", "sdpa"),
    ]
    names = [record.change for record in climb_with(rungs, SOURCE, steps=7)]
    assert names[:5] == ["baseline", *changes], "where it is not, in the order they have"


def test_no_rung_trains_by_another_algorithm(trusting):
    for optimizer, tried in (("sgd", set()), ("adamw-foreach", {"adamw-fused"})):
        base = plain_form(dataclasses.replace(BASE, optimizer=optimizer, precision="bf16"))
        assert base == dataclasses.replace(BASE, optimizer=optimizer)
        for device in ("cpu", "cuda"):
            changes = [each.step for each in changes_of_step(SOURCE, device, StepConfig(optimizer=optimizer))]
            assert {change["optimizer"] for change in changes if "optimizer" in change} == tried
    baseline, *rungs, _ = climb(SOURCE, dataclasses.replace(BASE, optimizer="sgd"), warmup=1, steps=1)
    assert {rung.case["optimizer"] for rung in (baseline, *rungs)} == {"sgd"}


@pytest.mark.parametrize(("steps", "warmup"), [(0, 3), (10, -1)])
def test_a_ladder_without_steps_is_refused_before_anything_is_built(steps, warmup):
    with pytest.raises(UsageError, match=f"steps is {steps} and warmup {warmup}; expected at least one step"):
        next(climb(SOURCE, BASE, steps=steps, warmup=warmup))


@pytest.mark.gpu
def test_the_whole_ladder_on_a_gpu():
    source = builtin_source("toy", ModelConfig(d_model=256, d_ff=1024, num_layers=4, num_heads=4))
    records = list(climb(source, StepConfig(context=256), warmup=2, steps=7))
    assert [record.status for record in records] == ["ok"] * len(records), [record.reason for record in records]
    rungs = [record for record in records if record.change != FINAL]
    assert len({rung.change for rung in rungs}) == len(rungs)
    tried = [rung for rung in rungs if not rung.change.endswith("on the top")]
    assert len(tried) == 1 + len(changes_of_step(source, "cuda", StepConfig()))
    assert all(rung.values["gradient_error"] <= rung.values["error_budget"] for rung in rungs)


def test_without_a_baseline_no_rung_is_tried(monkeypatch, tmp_path, capsys):
    """A compiled rung that ran was shown as the baseline, and all seemed well."""

    def build(step):
        workload = SOURCE.build(step)
        if step.attention == "eager":
            workload.loss = lambda *_: 1 / 0
        return workload

    rows = list(climb(WorkloadSource("broken", build, TOY), BASE, warmup=1, steps=1))
    assert [(row.change, row.status, row.verdict, row.accepted) for row in rows] == [
        ("baseline", "failed", "failed", False)
    ]
    step = StepRow(
        workload="broken", mode="step", warmup=5, times={name: Times(1.0, 1.0, 1.0) for name in ("step", *PHASES)}
    )
    assert run_and_report([step, *rows], tmp_path, "ladder") == 1, "though something else ran"
    printed = capsys.readouterr().out
    assert printed.startswith("The baseline failed. broken: failed: ZeroDivisionError"), "before the answer"
    first, *_ = Report([step, *rows]).findings
    assert (first.id, first.figures["status"]) == ("gain.no-baseline", "failed")
    assert "no change was tried" in first.sentence
    assert recommended_flags(rows) == ""


def test_a_baseline_that_is_too_large_is_no_mistake(tmp_path):
    why = {"status": "out of memory", "reason": "40 GiB", "verdict": "out of memory"}
    large = ChangeRow(workload="w", change="baseline", precision="fp32", **why)
    fits = ChangeRow(
        workload="w", change="bf16", precision="bf16", verdict="first that fits", accepted=True, speedup=1.0
    )
    assert run_and_report([large, fits], tmp_path, "ladder") == 0
    first, none = Report([large, fits]).findings
    assert (first.id, first.figures) == ("gain.too-large", {"reason": "40 GiB", "first": "bf16"})
    assert none.sentence == "No change was timed, so nothing is known of what is faster than bf16."
    assert recommended_flags([large, fits]) == "--precision bf16"


def test_what_is_not_reproducible_is_not_called_wrong(monkeypatch):
    def build(step):
        torch.seed()
        return SOURCE.build(dataclasses.replace(step, seed=int(torch.randint(2**31, ()))))

    (row,) = climb(WorkloadSource("restless", build, TOY), BASE, warmup=1, steps=1)
    assert row.status == "unsupported"
    assert row.reason.startswith("not reproducible: built twice from one seed, ")
