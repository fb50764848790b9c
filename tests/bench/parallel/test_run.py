"""`trainstep bench parallel`: schemes agree with one process, a wrong one shows no speed, bytes are counted."""

import dataclasses
import itertools
import os
import signal
from unittest import mock

import pytest
import torch
from torch import nn

from tests.workers import WorkerError, Workers
from tools.trust.planted.parallel import quick
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench import parallel
from trainstep.bench.parallel import ParallelCase, run
from trainstep.bench.parallel.run import run_cases
from trainstep.check.ranks import Comparison
from trainstep.check.reference import Reference
from trainstep.commands.output import run_and_report
from trainstep.parallel import DistributedDataParallel
from trainstep.rows.records import SoFar, read_records
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=2, num_heads=2, max_context=16)
CONFIG = StepConfig(context=16, batch=2, device="cpu")


def with_a_frozen_embedding(step):
    workload = builtin_source("little", MODEL).build(step)
    workload.module.embedding.requires_grad_(False)
    return workload


def _records(process, schemes, precision, broken, source=None):
    kept = DistributedDataParallel.finish_gradient_synchronization
    if broken:
        DistributedDataParallel.finish_gradient_synchronization = lambda self: self._reset()
    try:
        source = source or builtin_source("little", MODEL)
        config = dataclasses.replace(CONFIG, precision=precision)
        cases = [ParallelCase(source, config, SCHEMES[scheme], warmup=1, steps=6) for scheme in schemes]
        with quick():
            rows = run_cases(cases, process)
            found = [row for row in rows if not isinstance(row, SoFar) and row.kind == "parallel"]
            return [(row.case, row.values, row.status, row.reason) for row in found]
    finally:
        DistributedDataParallel.finish_gradient_synchronization = kept


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_schemes_agree_with_one_process_and_are_timed(two, precision):
    schemes = (
        "single",
        "flat",
        "bucketed-25",
        "sharded-optimizer",
        "sharded-optimizer-1000",
        "fsdp",
        "torch-ddp",
        "torch-zero",
        "torch-zero-1000",
        "torch-fsdp2",
        "torch-fsdp2-bf16-reduce",
    )
    rows, nothing = two.run(_records, schemes, precision, False)
    assert nothing == [], "only the first rank has the records"
    assert [case["scheme"] for case, *_ in rows] == list(schemes)
    found = {}
    for case, values, status, reason in rows:
        if (case["scheme"], precision) == ("torch-fsdp2-bf16-reduce", "fp32"):
            assert (status, "fp32 has none; use bf16" in reason) == ("unsupported", True)
            continue
        assert status == "ok", f"{case['scheme']}: {reason}"
        assert values["step_ms"] > 0
        found[case["scheme"]] = values
        if case["scheme"] == "single":
            assert (values["exposed_communication_ms"], "speedup" in values) == (0, False)
            continue
        for part in ("update", "gradient", "float32", "optimizer"):
            assert values[f"{part}_error"] <= values[f"{part}_allowed"], (case["scheme"], part)
        assert values["float32_allowed"] < 4.5e-6
        assert values["speedup"] == pytest.approx(2 * found["single"]["step_ms"] / values["step_ms"])
        assert 0 < values["exposed_communication_ms"] < values["step_ms"]
    assert found["flat"]["update_error"] == 0, "two halves add up exactly"
    assert found["flat"]["collectives"] == 1
    for scheme, values in found.items():
        assert values["sent_gib"] == pytest.approx(values["sent_floor_gib"], rel=0.01), scheme
    assert found["sharded-optimizer"]["before_step_optimizer_state_gib"] == pytest.approx(
        found["flat"]["before_step_optimizer_state_gib"] / 2, rel=0.01
    )
    assert found["fsdp"]["before_step_weights_gib"] == pytest.approx(
        found["flat"]["before_step_weights_gib"] / 2, rel=0.02
    )
    for scheme, values in found.items():
        parts = sum(values[f"before_step_{kind}_gib"] for kind in ("weights", "gradients", "optimizer_state"))
        if "sharded-optimizer" not in scheme:  # slices of gradients whose whole is still allocated
            assert parts == pytest.approx(values["predicted_before_step_gib"], rel=0.05), scheme


def _by_blocks(process):
    source = builtin_source("little", dataclasses.replace(MODEL, num_layers=3))
    schemes = [each for name in ("fsdp", "torch-fsdp2") for each in SCHEMES[name].by_blocks((1, 2))]
    with quick():
        rows = list(run_cases([ParallelCase(source, CONFIG, each, warmup=1, steps=6) for each in schemes], process))
    return [row for row in rows if not isinstance(row, SoFar)]


@pytest.mark.distributed
def test_blocks_that_are_gathered_together_take_fewer_calls_and_are_a_row_of_their_own(two):
    rows = two.run(_by_blocks)[0]
    found = {row.label: row for row in rows if row.kind == "parallel"}
    assert list(found) == ["fsdp", "fsdp by 2 blocks", "torch-fsdp2", "torch-fsdp2 by 2 blocks"]
    assert [row.status for row in found.values()] == ["ok"] * 4
    one, pairs, *peers = found.values()
    assert pairs.blocks_per_group == 2
    assert pairs.sent_gib == pytest.approx(pairs.sent_floor_gib, rel=0.01)
    assert pairs.sent_gib == pytest.approx(one.sent_gib, rel=1e-3), "as much stays for backward"
    assert one.collectives - pairs.collectives == 3 * 2, "two gathers and a reduction, and a message before each"
    assert peers[1].collectives < peers[0].collectives
    ratios = {row.blocks_per_group: row for row in rows if row.kind == "parallel ratio"}
    assert set(ratios) == {None, 2}


@pytest.mark.distributed
def test_what_is_frozen_is_not_planned_as_sent(two):
    source = WorkloadSource("frozen", with_a_frozen_embedding)
    rows, _ = two.run(_records, ("flat", "sharded-optimizer"), "fp32", False, source)
    trained = MODEL.num_parameters - MODEL.vocab_size * MODEL.d_model
    for case, values, status, reason in rows:
        assert status == "ok", f"{case['scheme']}: {reason}"
        assert values["sent_floor_gib"] == pytest.approx(trained * 4 / 2**30, rel=1e-3), "there and back, half each"
        assert values["sent_gib"] == pytest.approx(values["sent_floor_gib"], rel=0.01)


@pytest.mark.distributed
def test_a_scheme_that_trains_something_else_shows_no_speed(two):
    rows, _ = two.run(_records, ("naive", "torch-ddp"), "fp32", True)
    (_, values, status, reason), (_, _, fine, _) = rows
    assert status == "wrong"
    assert "step_ms" not in values
    assert "the gradients off by" in reason
    assert fine == "ok"


def _rounds(process, fails_on):
    built = []

    def build(scheme, *arguments, **options):
        built.append(scheme.name)
        if built.count("flat") == fails_on and scheme.name == "flat":
            raise RuntimeError("the second time it does not fit")
        return right(scheme, *arguments, **options)

    right, source = parallel.build, builtin_source("little", MODEL)
    schemes = ("single", "flat", "torch-ddp", "bucketed-1")
    cases = [ParallelCase(source, CONFIG, SCHEMES[scheme], warmup=1, steps=2) for scheme in schemes]
    right_ones = dict.fromkeys(cases)
    known = Comparison(right_ones, 1, 0, False)
    with (
        quick(),
        mock.patch.object(parallel, "build", build),
        mock.patch.object(run, "compare_with_one_process") as judge,
    ):
        judge.return_value = known
        rows = [row for row in run_cases(cases, process, rounds=4) if not isinstance(row, SoFar)]
    return built, rows


@pytest.mark.distributed
def test_schemes_are_timed_in_turns_in_an_order_drawn_anew(two):
    (built, rows), (elsewhere, nothing) = two.run(_rounds, 0)
    assert (built, nothing) == (elsewhere, [])
    orders = [built[start : start + 4] for start in range(0, 16, 4)]
    assert len(built) == 16
    assert {tuple(sorted(order)) for order in orders} == {("bucketed-1", "flat", "single", "torch-ddp")}
    assert len(set(map(tuple, orders))) > 1
    timed = [row for row in rows if row.kind == "parallel"]
    assert [row.scheme for row in timed] == ["single", "flat", "torch-ddp", "bucketed-1"], "as they were asked for"
    assert {(row.rounds, row.n, len(row.samples["step"])) for row in timed} == {(4, 8, 8)}
    ratios = {row.scheme: row for row in rows if row.kind == "parallel ratio"}
    assert list(ratios) == ["flat", "bucketed-1"]
    assert all(row.ratio_low < row.ratio < row.ratio_high for row in ratios.values())


def _killed_in_the_second_round(process, path):
    rounds = itertools.count(1)

    def fails_later(case, process):
        if len(measured) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        measured.append(next(rounds))
        return measure(case, process)

    measure, measured, source = run.measure, [], builtin_source("little", MODEL)
    cases = [ParallelCase(source, CONFIG, SCHEMES[scheme], warmup=1, steps=6) for scheme in ("flat", "torch-ddp")]
    known = Comparison(dict.fromkeys(cases), 1, 0, False)
    with (
        quick(),
        mock.patch.object(run, "measure", fails_later),
        mock.patch.object(run, "compare_with_one_process", return_value=known),
    ):
        records = run_cases(cases, process, rounds=3)
        if process.rank == 0:
            run_and_report(records, path, "bench parallel")
        else:
            list(records)


@pytest.mark.distributed
def test_a_run_that_is_killed_after_a_round_leaves_its_rows(tmp_path):
    with Workers(2, timeout_s=10) as workers, pytest.raises(WorkerError, match="the process ended"):
        workers.run(_killed_in_the_second_round, tmp_path)
    rows = read_records(tmp_path / "results.jsonl")
    assert [(row.kind, row.scheme, row.rounds) for row in rows] == [
        ("parallel", "flat", 1), ("parallel", "torch-ddp", 1), ("parallel ratio", "flat", 1),
    ]  # fmt: skip
    assert [row.n for row in rows if row.kind == "parallel"] == [6, 6]


@pytest.mark.distributed
def test_a_scheme_that_fails_in_one_round_has_no_time(two):
    (built, rows), _ = two.run(_rounds, 2)
    found = {row.scheme: row for row in rows if row.kind == "parallel"}
    assert (found["flat"].status, found["flat"].times) == ("failed", {})
    assert "does not fit" in found["flat"].reason
    assert built.count("flat") == 2, "it is not tried again"
    assert [row.rounds for name, row in found.items() if name != "flat"] == [4, 4, 4]


class _Unlike(nn.Module):
    """Dropout, a tied parameter, and one that nothing uses."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.dropout = nn.Linear(8, 8), middle, nn.Dropout(0.4)
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x):
        inner = self.middle(self.first(x))
        return self.last(self.dropout(inner[0] if isinstance(inner, tuple) else inner))


def _unlike(step, make):
    torch.manual_seed(step.seed)

    def optimizer(parameters):
        matrices, others = [], []
        for parameter in parameters:
            (matrices if parameter.dim() > 1 else others).append(parameter)
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)

    data = torch.utils.data.TensorDataset(torch.randn(12, 4, 8))
    return Workload(
        module=_Unlike(make()),
        batches=torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),  # three batches: a second epoch begins
        loss=lambda out, batch: out.square().mean(),
        optimizer=optimizer,
    )


def _own(process, schemes, make, precision="fp32"):
    source, config = WorkloadSource("unlike", lambda step: _unlike(step, make)), StepConfig(device="cpu")
    config = dataclasses.replace(config, precision=precision)
    cases = [ParallelCase(source, config, SCHEMES[scheme], warmup=1, steps=1) for scheme in schemes]
    with quick():
        rows = run_cases(cases, process)
        found = [row for row in rows if not isinstance(row, SoFar) and row.kind == "parallel"]
        return [(row.scheme, row.status, row.reason) for row in found]


def _linear():
    return nn.Linear(8, 8)


def _lstm():
    return nn.LSTM(8, 8, batch_first=True)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("precision", "schemes"),
    [
        ("fp32", ("naive", "sharded-optimizer", "fsdp", "torch-ddp", "torch-zero", "torch-fsdp2")),
        ("bf16", ("sharded-optimizer", "fsdp")),
    ],
)
def test_a_model_with_dropout_unused_parameters_and_groups_agrees(two, precision, schemes):
    rows, _ = two.run(_own, schemes, _linear, precision)
    assert [(scheme, status) for scheme, status, _ in rows] == [(scheme, "ok") for scheme in schemes], rows


def _first_comparison_fails(process):
    compare, calls = Reference.compare, itertools.count()

    def fails_first(self, *arguments, **options):
        if next(calls) == 0:
            raise RuntimeError("rank 0 alone")
        return compare(self, *arguments, **options)

    with mock.patch.object(Reference, "compare", fails_first):
        return _own(process, ("naive", "torch-ddp"), _linear)


@pytest.mark.distributed
def test_what_fails_on_the_first_rank_alone_leaves_no_other_waiting(two):
    (_, failed, reason), (_, fine, _) = two.run(_first_comparison_fails)[0]
    assert (failed, fine) == ("failed", "ok")
    assert "rank 0 alone" in reason


@pytest.mark.distributed
def test_what_one_scheme_cannot_train_is_its_row_and_the_others_go_on(two):
    (_, sharded, reason), (_, plain, _) = two.run(_own, ("fsdp", "naive"), _lstm)[0]
    assert (sharded, plain) == ("unsupported", "ok")
    assert "cannot be sharded" in reason
