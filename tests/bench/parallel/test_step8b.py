"""`trainstep bench step8b`: the whole command on two ranks, its rules, and arms that fail."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.bench.parallel import agreement
from tools.trust.planted.parallel import quick
from trainstep.base.config import SIZES, ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.schemes import SCHEMES
from trainstep.bench import parallel
from trainstep.bench.parallel import DoBench, ParallelCase, step8b
from trainstep.bench.parallel.step8b import checkpointing_of, leaderboard_lines, reduced, reduced_model, source_of
from trainstep.checkpointing.policies import policy_of
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.commands.bench_ranks import BenchStep8b
from trainstep.rows import ParallelRow
from trainstep.rows.records import of_kind, read_records

REPOSITORY = Path(__file__).parents[3]
MODEL = ModelConfig(vocab_size=300, d_model=16, d_ff=20, num_layers=5, num_heads=2)
TOML = "[model]\n" + "\n".join(f"{name} = {getattr(MODEL, name)}" for name in
                               ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads"))  # fmt: skip
ON_CPUS = ["--attention", "sdpa", "--loss", "chunked", "--peer-attention", "sdpa", "--fused", "none",
           "--precision", "bf16", "--device", "cpu"]  # fmt: skip


@pytest.mark.distributed
def test_the_whole_command(tmp_path):
    (tmp_path / "small.toml").write_text(TOML)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "trainstep", "bench", "step8b", *ON_CPUS, "--size", str(tmp_path / "small.toml")]
    command += ["--context", "32", "--checkpoint-blocks", "3", "--compile", "off", "--warmup", "1", "--rep", "40"]
    found = subprocess.run(
        [*command, "--trace", "--out", str(out)], cwd=REPOSITORY, capture_output=True, text=True, timeout=560
    )
    assert found.returncode == 0, found.stdout + found.stderr
    records = read_records(out / "results.jsonl")
    rows = of_kind(records, ParallelRow)
    file = f"@{out / 'first-3-of-5.json'}"
    assert [(row.scheme, row.checkpointing) for row in rows] == [(name, file) for name in ("torch-fsdp2", "fsdp")]
    for row in rows:
        assert (row.status, row.batch, row.context, row.precision) == ("ok", 1, 32, "bf16"), row.reason
        assert row.gradient_error <= row.gradient_allowed
        assert row.float32_error <= row.float32_allowed < 1e-5
        assert row.ranks_agree
        assert row.sent_gib == pytest.approx(row.sent_floor_gib, rel=0.02), "the head, which the loss calls, once"
        assert row.n == len(row.samples["step"]) >= 1
    kinds = [row.kind for row in records]
    assert kinds.count("parallel ratio") == 1
    assert (kinds.count("parallel trace"), (out / "trace-fsdp.json.gz").exists()) == (1, True)
    assert found.stdout.count(" ms | |\n") == 2, "a line to paste for each arm"
    assert found.stdout.count("is judged, reduced") == 2
    assert "torch-fsdp2, sdpa, chunked loss, compile off, first-3-of-5 checkpointed: is built and timed" in found.stdout


def arms(**flags):
    flags = {"peer_attention": "sdpa"} | flags
    return BenchStep8b(size="tiny", context=8, attention="sdpa", loss=("chunked",), device="cpu", compile=("off",),
                       fused=("none",), warmup=0.0, rep=1.0, **flags).arms()  # fmt: skip


def _out_of_memory_once(process, folder):
    """The rows of two arms, of which the first cannot be built at full size."""
    cases = arms(scheme=("fsdp", "torch-fsdp2"), checkpoint_blocks=(1,), out=Path(folder))
    built, right = [], parallel.build

    def build(scheme, *arguments, **options):
        built.append(scheme.name)
        if built == ["fsdp"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB.")
        return right(scheme, *arguments, **options)

    judged = dict.fromkeys(cases, None if process.rank else agreement())
    said = []
    with (
        quick(),
        mock.patch.object(parallel, "build", build),
        mock.patch.object(step8b, "_judged", return_value=judged),
    ):
        rows = list(step8b.run_arms(cases, process, Path(folder), on_part=said.append))
    return [(row.kind, row.status, row.reason) for row in rows], built, said


@pytest.mark.distributed
def test_an_arm_that_runs_out_of_memory_is_a_row_and_the_next_is_timed(two, tmp_path):
    (rows, *_), (nothing, built, _) = two.run(_out_of_memory_once, str(tmp_path))
    first, second = rows
    assert first[:2] == ("parallel", "out of memory")
    assert "1.16 GiB" in first[2]
    assert second == ("parallel", "ok", "")
    assert (nothing, built) == ([], ["fsdp", "torch-fsdp2"])


def _wrong(process, folder):
    cases = arms(scheme=("fsdp",), checkpoint_blocks=(0,), peer_attention="sdpa-cudnn", out=Path(folder))
    judged = dict.fromkeys(cases, agreement(ranks_agree=False))
    with mock.patch.object(step8b, "_judged", return_value=judged):
        rows = list(step8b.run_arms(cases, process, Path(folder)))
    return [(row.status, row.reason, row.step_ms) for row in rows]


@pytest.mark.distributed
def test_an_arm_that_is_wrong_shows_no_speed(two, tmp_path):
    rows, nothing = two.run(_wrong, str(tmp_path))
    assert rows == [("wrong", "its ranks have different parameters", None)]
    assert nothing == []


def test_arms_are_every_number_of_blocks_by_every_scheme_ours_with_each_of_our_losses(tmp_path):
    flags = {"scheme": ("fsdp", "torch-fsdp2"), "checkpoint_blocks": (12, 34), "loss": ("fused", "chunked")}
    cases = BenchStep8b(**flags, fused=("rope",), out=tmp_path).arms()
    twelve, ours = f"@{tmp_path / 'first-12-of-34.json'}", ("flash-triton", "rope")
    assert [
        (each.config.checkpointing, each.scheme.name, each.config.loss, each.config.attention, each.config.fused)
        for each in cases
    ] == [
        (policy, *arm)
        for policy in (twelve, "every-1")
        for arm in (
            ("fsdp", "fused", *ours),
            ("fsdp", "chunked", *ours),
            ("torch-fsdp2", "chunked", "sdpa-cudnn", "none"),
        )
    ]
    for each in cases:
        config = each.config
        assert (config.batch, config.context, config.precision) == (1, 32_768, "bf16-pure")
        assert (config.compile, config.optimizer) == ("blocks-recompute", "adamw-fused")
        assert each.do_bench == DoBench(10_000, 30_000)
    assert cases[0].source.model == SIZES["8B"]


def test_do_bench_takes_as_many_steps_as_fit_and_one_at_least():
    rules = DoBench(10_000, 30_000)
    assert [rules.counts(ms) for ms in (4_400, 5_000, 31_000)] == [(2, 6), (2, 6), (1, 1)]


def test_an_arm_is_judged_on_a_small_model_with_heads_as_wide(tmp_path):
    model = reduced_model(SIZES["8B"])
    assert (model.num_layers, model.num_heads, model.head_dim) == (4, 8, SIZES["8B"].head_dim)
    assert model.d_ff / model.d_model == SIZES["8B"].d_ff / SIZES["8B"].d_model
    config = StepConfig(context=32_768, precision="bf16", attention="flash-triton", compile="blocks", loss="fused")
    kinds = {}
    for first in (0, 12, 34):
        own = ParallelCase(source_of("8B", SIZES["8B"]), config, SCHEMES["fsdp"])
        own = dataclasses.replace(
            own, config=dataclasses.replace(config, checkpointing=checkpointing_of(first, 34, tmp_path))
        )
        kinds[first] = reduced(own, tmp_path)
    assert kinds[0].config.checkpointing == "none"
    assert kinds[12].config == kinds[34].config
    assert kinds[12].config.checkpointing == f"@{tmp_path / 'first-2-of-4.json'}"
    assert (kinds[12].config.context, kinds[12].config.loss, kinds[12].config.compile) == (2048, "fused", "blocks")
    in_float32 = kinds[12].float32
    assert (in_float32.precision, in_float32.attention, in_float32.compile) == ("fp32", "eager", "off")
    assert in_float32.loss == "fused"


def test_the_first_blocks_are_computed_again(tmp_path):
    assert (checkpointing_of(0, 5, tmp_path), checkpointing_of(5, 5, tmp_path)) == ("none", "every-1")
    policy = policy_of(checkpointing_of(2, 5, tmp_path))
    assert {name for name, block in policy.blocks.items() if block.recompute} == {"blocks.0", "blocks.1"}
    Checkpointing(source_of("small", MODEL).build(StepConfig(batch=1, context=8, device="cpu")).module, policy)
    for wrong in (-1, 6):
        with pytest.raises(UsageError, match=f"--checkpoint-blocks is {wrong}; expected 0 to 5"):
            checkpointing_of(wrong, 5, tmp_path)


def test_batches_are_random_ids_of_the_whole_vocabulary_the_same_again_for_a_seed():
    def first(seed):
        step = StepConfig(batch=3, context=400, device="cpu", seed=seed)
        return next(iter(source_of("small", MODEL).build(step).batches))

    ids, targets = first(0)
    assert ids.shape == targets.shape == (3, 400)
    assert (int(ids.min()), int(ids.max())) == (0, MODEL.vocab_size - 1)
    assert not torch.equal(ids[:, 1:], targets[:, :-1]), "targets are other ids, not the next"
    assert torch.equal(ids, first(0)[0])
    assert not torch.equal(ids, first(1)[0])


def test_a_line_of_the_leaderboard_has_the_mean_as_do_bench_and_the_fastest_is_first():
    def row(scheme, *samples):
        case = {"scheme": scheme, "world_size": 2, "attention": "sdpa", "loss": "chunked", "workload": "8B"}
        times = {"step": mock.Mock(median=samples[0])} if samples else {}
        return mock.Mock(
            **case,
            spec=[],
            fused=None,
            compile="blocks",
            checkpointing="@a/first-12-of-34.json",
            step_ms=times or None,
            samples={"step": samples},
            environment={"device": "NVIDIA H200"},
        )

    lines = leaderboard_lines([row("torch-fsdp2", 5000.0, 5301.0), row("torch-hsdp"), row("fsdp", 4000.4)])
    said = "sdpa, chunked loss, compile blocks, first-12-of-34 checkpointed, 2 × NVIDIA H200"
    assert lines == [f"| trainstep: fsdp, {said} | 4000 ms | |", f"| trainstep: torch-fsdp2, {said} | 5150 ms | |"]


@pytest.mark.parametrize("flags", [{"warmup": -1.0}, {"rep": 0.0}, {"rep": float("inf")}])
def test_times_that_make_no_steps(flags):
    with pytest.raises(UsageError, match="expected 0 or more, and more than 0"):
        BenchStep8b(**flags).arms()
