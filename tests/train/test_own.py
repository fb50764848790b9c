"""A user's workload under every scheme: one curve, wherever it is interrupted and on however many ranks."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.train.runs import alone as train_alone
from tests.train.runs import far_apart, losses, names, rows
from tests.train.runs import on_rank as train_on_rank
from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.hardware import DEVICES
from trainstep.commands.train import Train
from trainstep.rows.records import read_records
from trainstep.step.workload import factory_source
from trainstep.train import metrics
from trainstep.train.config import OF_WORKLOADS, OwnRun, division

pytestmark = pytest.mark.distributed

SCHEMES = ("ddp", "sharded-optimizer", "fsdp", "hsdp")
RUN = dataclasses.replace(OF_WORKLOADS, steps=8, eval_every=4, save_every=3, tensorboard=False)


def own(name, *, step=None, **changes):
    """A run of one of the small workloads, and its source."""
    source = factory_source(name if ":" in name else f"tests.train.own_models:{name}")
    config = dataclasses.replace(StepConfig(device="cpu"), **(step or {}))
    return OwnRun(source.name, config, dataclasses.replace(RUN, **changes))


def on_rank(process, run, out, **options):
    return train_on_rank(process, run, out, data=factory_source(run.name), **options)


def alone(run, out, **options):
    return train_alone(run, out, data=factory_source(run.name), **options)


def changed(name, change):
    """The source of a small workload, `change` applied to each that it builds."""
    source = factory_source(f"tests.train.own_models:{name}")

    def build(step):
        made = source.build(step)
        change(made)
        return made

    return dataclasses.replace(source, build=build)


def _runs(process, runs):
    for run, out in runs:
        on_rank(process, run, out)


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("examples.own_model:workload", 1),  # its rows are divided
        ("tied", 2),  # dropout: whole batches, so that both ranks draw what one process draws
        ("encoder", 2),
        ("batch_norm", 2),  # statistics of whole batches
        ("two_losses", 2),
    ],
)
def test_each_schemes_curve_is_that_of_one_process(two, tmp_path, name, batches):
    def run(scheme):
        return own(name, scheme=scheme, replicas=2 * (scheme == "hsdp"), batches_per_update=batches, steps=5)

    alone(run("single"), tmp_path / "single")
    curve = losses(tmp_path / "single")
    assert len(set(curve)) == 5
    runs = [(run(scheme), tmp_path / scheme) for scheme in SCHEMES]
    two.run(_runs, runs)
    for _, out in runs:
        assert far_apart(curve, losses(out)) < 1e-5, out.name
        for ours, theirs in zip(rows(tmp_path / "single"), rows(out), strict=True):
            assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
            assert ours["tokens"] == theirs["tokens"]
            if ours["validation_loss"] is not None and name != "batch_norm":
                assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)


def _buffers(process, run, out):
    """The running statistics of each rank after a run."""
    from trainstep.train.learner import Learner

    seen = []
    validate = Learner.validate

    def noting(self):
        seen.append({name: value.clone() for name, value in self.step.module.named_buffers()})
        before = [each.training for each in self.step.module.modules()]
        loss = validate(self)
        assert [each.training for each in self.step.module.modules()] == before
        return loss

    Learner.validate = noting
    try:
        on_rank(process, run, out)
    finally:
        Learner.validate = validate
    return seen


def test_buffers_that_training_changes_are_rank_0s_on_every_rank(two, tmp_path):
    """Ranks that divide a batch have statistics of their rows; validation and checkpoints must not depend on which."""
    run = own("batch_norm", scheme="ddp")
    first, second = two.run(_buffers, run, tmp_path / "run")
    assert len(first) == 2
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert int(first[-1]["norm.num_batches_tracked"]) == 8
    assert not torch.equal(first[0]["norm.running_mean"], first[1]["norm.running_mean"])
    validated = [row["validation_loss"] for row in rows(tmp_path / "run")]
    assert [value is not None for value in validated] == [False, False, False, True] * 2


@pytest.mark.parametrize("name", ["tied", "two_losses", "counting", "endless", "batch_norm"])
def test_a_run_that_was_killed_goes_on_to_the_bit(name, tmp_path):
    """The newest checkpoint is of update 3, metrics have more when the process is gone."""
    run = own(name, batches_per_update=2, clip_norm=1.0)
    alone(run, tmp_path / "whole")
    out = tmp_path / "killed"
    alone(run, out, stop_after=5)
    shutil.rmtree(out / "checkpoints" / names(out)[-1])
    assert names(out) == ["step-00000003"]
    assert alone(run, out).is_finished
    assert losses(out) == losses(tmp_path / "whole")
    assert [row["since_start"] for row in rows(out)] == [1, 2, 3, 1, 2, 3, 4, 5]
    for key in ("gradient_norm", "learning_rate", "tokens", "validation_loss"):
        assert [row[key] for row in rows(out)] == [row[key] for row in rows(tmp_path / "whole")], key


def _until(process, run, out, step):
    return on_rank(process, run, out, stop_after=step).step


def test_it_goes_on_under_another_scheme_on_other_ranks(two, four, tmp_path):
    def run(scheme):
        return own("two_losses", batches_per_update=4, scheme=scheme)

    alone(run("single"), tmp_path / "whole")
    assert two.run(_until, run("fsdp"), tmp_path / "run", 3) == [3, 3]
    assert alone(run("single"), tmp_path / "run", stop_after=5).step == 5
    four.run(on_rank, run("hsdp"), tmp_path / "run")
    assert far_apart(losses(tmp_path / "whole"), losses(tmp_path / "run")) < 1e-5
    assert [row["world_size"] for row in rows(tmp_path / "run")] == [2] * 3 + [1] * 2 + [4] * 3


def test_batches_that_are_others_after_a_restart_stop_it(tmp_path):
    run = own("unseeded", save_every=2)
    alone(run, tmp_path / "run", stop_after=2)
    identity = json.loads((tmp_path / "run" / "run.json").read_text())["identity"]
    with pytest.raises(UsageError, match=r"another run .*data.first_batch"):
        alone(run, tmp_path / "run")
    # The first batch is as before, a later one is not.
    run = own("counting", save_every=2)
    alone(run, tmp_path / "other", stop_after=2)

    def skips(made):
        made.batches = [made.batches[0], made.batches[2], *made.batches[2:]]

    with pytest.raises(UsageError, match=r"batch 1 of the workload, drawn again, is not the one that was trained on"):
        train_alone(run, tmp_path / "other", data=changed("counting", skips))
    assert identity["workload"] == "tests.train.own_models:unseeded"


def test_an_optimizer_that_is_made_otherwise_is_another_run(tmp_path):
    run = own("two_losses")
    alone(run, tmp_path / "run", stop_after=3)

    def slower(made):
        optimizer = made.optimizer

        def make(parameters):
            found = optimizer(parameters)
            found.param_groups[1]["lr"] = 5e-4
            return found

        made.optimizer = make

    with pytest.raises(UsageError, match=r"made otherwise .*group 1 lr: 0.001 → 0.0005"):
        train_alone(run, tmp_path / "run", data=changed("two_losses", slower))


def test_rates_are_the_optimizers_own_unless_a_schedule_is_asked_for(tmp_path):
    alone(own("two_losses", steps=4), tmp_path / "own")
    assert [row["learning_rate"] for row in rows(tmp_path / "own")] == [1e-2] * 4
    alone(own("two_losses", steps=4, warmup=0.5, min_learning_rate=0.1), tmp_path / "scheduled")
    assert [row["learning_rate"] for row in rows(tmp_path / "scheduled")] == pytest.approx([5e-3, 1e-2, 5.5e-3, 1e-3])
    assert losses(tmp_path / "own")[0] == losses(tmp_path / "scheduled")[0]
    assert losses(tmp_path / "own")[2] != losses(tmp_path / "scheduled")[2]


def test_what_is_written_of_a_run(tmp_path):
    alone(own("batch_norm", batches_per_update=2), tmp_path / "run")
    (record,) = read_records(tmp_path / "run" / "results.jsonl")
    assert record.workload == "tests.train.own_models:batch_norm"
    assert (record.batch, record.global_batch, record.batches_per_update) == (None, None, 2)
    assert record.tokens_per_s is None, "pictures have no tokens"
    assert record.validation_loss == pytest.approx(rows(tmp_path / "run")[-1]["validation_loss"], rel=1e-5)
    assert record.n == 8


def test_flops_are_counted_once_where_a_peak_is_known(tmp_path, monkeypatch):
    gpu = next(iter(DEVICES.values()))
    monkeypatch.setattr(metrics, "find_device", lambda name: gpu)
    alone(own("two_losses", batches_per_update=2, clip_norm=1.0), tmp_path / "counted")
    monkeypatch.undo()
    alone(own("two_losses", batches_per_update=2, clip_norm=1.0), tmp_path / "plain")
    assert losses(tmp_path / "counted") == losses(tmp_path / "plain"), "counting changes nothing"
    made = factory_source("tests.train.own_models:two_losses").build(StepConfig())
    with FlopCounterMode(display=False) as counter:
        batch = next(iter(made.batches))
        made.loss(made.module(batch[0]), batch).backward()
    peak = 1e12 * gpu.peak_tflops("fp32")
    for row in rows(tmp_path / "counted"):
        assert row["utilisation"] * peak * row["step_ms"] / 1e3 == pytest.approx(2 * counter.get_total_flops())
    assert {row["utilisation"] for row in rows(tmp_path / "plain")} == {None}


def _message(process, run, out):
    with pytest.raises(UsageError) as error:
        on_rank(process, run, out)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("uneven", {}, r"shape \(3, 3, 8, 8\) cannot be divided among 2 ranks"),
        ("unseeded", {}, "gives rank 1 another batch 0 than rank 0. .* without a DistributedSampler"),
        ("unused", {}, "2 parameters got no gradient on rank .: unused.weight, unused.bias.*--allow-unused"),
        ("lstm", {"scheme": "fsdp"}, "nn.LSTM, .* use DistributedDataParallel"),
        ("counting", {"scheme": "single"}, "would train 2 models"),
    ],
)
def test_what_cannot_be_trained_on_two_ranks_is_said(two, tmp_path, name, changes, message):
    import re

    for said in two.run(_message, own(name, **changes), tmp_path / "run"):
        assert re.search(message, said), said


def test_parameters_that_get_no_gradient_are_allowed_on_request(two, tmp_path):
    alone(own("unused", batches_per_update=2), tmp_path / "single")
    two.run(on_rank, own("unused", batches_per_update=2, scheme="ddp", allow_unused=True), tmp_path / "ddp")
    assert far_apart(losses(tmp_path / "single"), losses(tmp_path / "ddp")) < 1e-5


def test_an_optimizer_with_a_closure_is_refused(tmp_path):
    with pytest.raises(UsageError, match="LBFGS evaluates the loss several times an update"):
        alone(own("by_lbfgs"), tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"train": {"global_batch": 8}}, "--global-batch is for the built-in models.*give --batches-per-update"),
        ({"train": {"weight_decay": 0.0}}, "its own optimizer has one"),
        ({"train": {"validation_fraction": 0.1}}, r"Workload\.validation"),
        ({"step": {"learning_rate": 1e-3}}, "fixes its own learning-rate"),
        ({"step": {"batch": 2}}, "fixes its own batch"),
        ({"size": "tiny"}, "brings its own model and data"),
    ],
)
def test_flags_that_say_nothing_of_a_workload(flags, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        Train(workload="tests.train.own_models:counting", out=tmp_path / "run", **flags).run()
    assert not (tmp_path / "run").exists()


def test_flags_that_only_a_workload_takes():
    with pytest.raises(UsageError, match="--batches-per-update is for a --workload, and none is named"):
        Train(train={"batches_per_update": 2}).run_config()


def test_a_workloads_optimizer_is_taken_as_it_is_by_default():
    run = Train(workload="tests.train.own_models:counting", train={"steps": 3}).run_config()
    assert (run.train.warmup, run.train.min_learning_rate, run.train.clip_norm) == (0.0, 1.0, math.inf)
    assert not run.train.is_scheduled
    assert (type(run), run.train.steps) == (OwnRun, 3)


@pytest.mark.parametrize(
    ("batches", "ranks", "expected"),
    [(1, 1, (1, 1)), (1, 4, (1, 4)), (4, 4, (1, 1)), (2, 4, (1, 2)), (6, 4, (3, 2)), (8, 2, (4, 1)), (3, 2, (3, 2))],
)
def test_ranks_divide_as_little_as_they_can(batches, ranks, expected):
    assert division(batches, ranks) == expected


def test_a_restart_of_a_list_draws_only_what_it_needs(tmp_path):
    asked = []

    class Counted(list):
        def __getitem__(self, number):
            asked.append(number)
            return super().__getitem__(number)

    def counted(made):
        made.batches = Counted(made.batches)

    source = changed("counting", counted)
    train_alone(own("counting", steps=12, save_every=20), tmp_path / "run", data=source, stop_after=10)
    asked.clear()
    train_alone(own("counting", steps=12, save_every=20), tmp_path / "run", data=source)
    # The first is the run's identity; the tenth was trained on last; two updates; and the last one's print is saved.
    assert asked == [0, 9 % 5, 10 % 5, 11 % 5, 11 % 5]
