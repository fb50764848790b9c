"""`trainstep bench parallel` with replicas: judged and counted as other schemes, each beside torch's of as many."""

import dataclasses

import pytest
import torch

from tools.trust.planted.parallel import quick
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.schemes import BENCH_SCHEMES, SCHEMES, usual_replicas
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.ratios import ratio_rows
from trainstep.bench.parallel.run import run_cases
from trainstep.commands.bench_ranks import FIRST_LOOK, BenchParallel
from trainstep.parallel.process import Process
from trainstep.parallel.transport.by_collectives import Collectives
from trainstep.rows import ParallelRatioRow, ParallelRow
from trainstep.rows.records import SoFar, make_row, of_kind
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=1, num_heads=2, max_context=16)
CONFIG = StepConfig(context=16, batch=2, device="cpu")


def _rows(process, named):
    """Rows of (scheme, replicas)."""
    config, source = dataclasses.replace(CONFIG, precision="bf16"), builtin_source("little", MODEL)
    schemes = [SCHEMES[name].on(process.world_size, process.hosts, replicas) for name, replicas in named]
    cases = [ParallelCase(source, config, scheme, warmup=1, steps=6) for scheme in schemes]
    with quick():
        return [row for row in run_cases(cases, process) if not isinstance(row, SoFar)]


def _some_apart(process, named):
    """The same, but four replicas' gradients are not averaged between them."""
    average = Collectives.average

    def unless_four(between, tensors):
        return average(between, tensors) if between._group.size() < 4 else lambda: None

    Collectives.average = unless_four
    try:
        return _rows(process, named)
    finally:
        Collectives.average = average


@pytest.mark.distributed
@pytest.mark.thorough
def test_replicas_agree_with_one_process_and_send_what_is_planned(four):
    named = [("hsdp", None), ("torch-hsdp", None), ("hsdp", 3), ("hsdp", 4)]
    rows, *nothing = four.run(_some_apart, named)
    assert nothing == [[]] * 3
    *found, odd, apart = of_kind(rows, ParallelRow)
    assert (apart.status, apart.step_ms) == ("wrong", None), apart.reason
    assert "in float32, the gradients off by" in apart.reason
    assert "its ranks have different parameters" in apart.reason
    assert (odd.status, odd.reason.split(";")[0]) == ("unsupported", "4 ranks do not divide into 3 replicas")
    assert [(row.scheme, row.replicas) for row in found] == [("hsdp", 2), ("torch-hsdp", 2)]
    for row in found:
        assert row.status == "ok", f"{row.scheme} {row.replicas}: {row.reason}"
        assert row.float32_error <= row.float32_allowed < apart.float32_error / 1e5, apart.float32_error
        parts = row.before_step_weights_gib + row.before_step_gradients_gib + row.before_step_optimizer_state_gib
        assert parts == pytest.approx(row.predicted_before_step_gib, rel=0.05)
    ours, _ = found
    assert ours.sent_gib == pytest.approx(ours.sent_floor_gib, rel=0.01), "without the groups that stay for backward"
    pairs = [(row.scheme, row.replicas, row.peer) for row in of_kind(rows, ParallelRatioRow)]
    assert pairs == [("hsdp", 2, "torch-hsdp")]


@pytest.mark.distributed
def test_two_ranks_of_one_host_are_told_that_they_make_no_replicas(two):
    rows, _ = two.run(_rows, [("hsdp", None), ("torch-hsdp", None)])
    for row in rows:
        assert (row.status, row.replicas) == ("unsupported", None)
        assert "2 ranks cannot be laid out as replicas of several ranks each: start 4" in row.reason


def _mistaken(process):
    with pytest.raises(UsageError, match="--replicas is 0; expected 1 or more"):
        BenchParallel(replicas=(2, 0)).schemes(process)
    with pytest.raises(UsageError, match="--blocks-per-group is -1; expected 1 or more"):
        BenchParallel(blocks_per_group=(-1,)).schemes(process)
    for many, blocks in ((5, 4), (1000, 4), (3, 2)):
        grouped = BenchParallel(size="tiny", model={"num_layers": blocks}, blocks_per_group=(1, many))
        with pytest.raises(UsageError, match=f"--blocks-per-group is {many}; the model has {blocks} blocks"):
            grouped.schemes(process)
    both = BenchParallel(scheme=("flat", "hsdp"), replicas=(2,), blocks_per_group=(1, 2)).schemes(process)
    assert [scheme.label for scheme in both] == ["flat", "hsdp-2", "hsdp-2 by 2 blocks"]
    named = BenchParallel(scheme=("fsdp", "hsdp"), replicas=(2, 1, 2)).schemes(process)
    return [(scheme.name, scheme.replicas, scheme.label) for scheme in named]


@pytest.mark.distributed
def test_each_number_of_replicas_is_a_case_of_hybrid_schemes(two):
    expected = [("fsdp", None, "fsdp"), ("hsdp", 2, "hsdp-2"), ("hsdp", 1, "hsdp-1")]
    assert two.run(_mistaken) == [expected] * 2


def test_there_are_as_many_replicas_as_hosts_or_two():
    found = {(ranks, hosts): usual_replicas(ranks, hosts) for ranks in (1, 2, 3, 4, 6, 16) for hosts in (1, 2, 3)}
    assert {key for key, replicas in found.items() if replicas is None} == {
        (1, 1), (2, 1), (3, 1), (1, 2), (3, 2), (1, 3), (2, 3), (4, 3), (16, 3)
    }  # fmt: skip
    assert {key: found[key] for key in ((4, 1), (6, 1), (2, 2), (16, 2), (6, 3))} == {
        (4, 1): 2, (6, 1): 2, (2, 2): 2, (16, 2): 2, (6, 3): 3
    }  # fmt: skip
    assert SCHEMES["fsdp"].on(8, 2) is SCHEMES["fsdp"]
    with pytest.raises(UnsupportedError, match="1 rank cannot be laid out"):
        SCHEMES["hsdp"].on(1, 1).check(1)


def test_a_peer_stands_beside_ours_with_as_many_replicas():
    def row(scheme, replicas, step_ms):
        case = {"workload": "large", "world_size": 8, "scheme": scheme, "replicas": replicas}
        return make_row(ParallelRow, case, {"step_ms": step_ms}, samples={"step": [step_ms] * 8})

    rows = [row("hsdp", 2, 6.0), row("hsdp", 4, 8.0), row("fsdp", None, 9.0)]
    rows += [row("torch-hsdp", 4, 16.0), row("torch-hsdp", 2, 24.0), row("torch-fsdp2", None, 9.0)]
    found = [(each.scheme, each.replicas, each.peer, each.ratio) for each in ratio_rows(rows)]
    assert found == [
        ("hsdp", 4, "torch-hsdp", 0.5), ("hsdp", 2, "torch-hsdp", 0.25), ("fsdp", None, "torch-fsdp2", 1.0)
    ]  # fmt: skip


def test_a_first_look_is_small_on_cpus_where_nothing_names_a_model(tmp_path):
    toml = tmp_path / "own.toml"
    toml.write_text("[model]\nnum_layers = 2\n")
    usual, cpu = StepConfig(), {"device": "cpu"}
    for told, expected in (
        ({"step": cpu}, (1, 32)),
        ({"step": cpu | {"batch": 8}}, (8, 32)),
        ({"step": cpu | {"context": 100}, "scheme": ("fsdp",)}, (1, 100)),
        ({"step": cpu, "size": "small"}, (usual.batch, usual.context)),
        ({"step": cpu, "config": toml}, (usual.batch, usual.context)),
    ):
        step = BenchParallel(**told).step_config()
        assert (step.batch, step.context) == expected, told
    two = Process(0, 2, torch.device("cpu"), None)
    assert [each.name for each in BenchParallel().schemes(two)] == list(FIRST_LOOK)
    assert [each.name for each in BenchParallel(scheme=("fsdp", "all")).schemes(two)] == list(BENCH_SCHEMES)
