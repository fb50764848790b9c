"""examples/step8b.py: the leaderboard's step on two ranks, and the reduced model by which an arm is checked."""

import dataclasses

import pytest

from examples.step8b import Step8b, checkpointing_of, reduced, source_of
from tests.torchrun import torchrun
from trainstep.base.config import SIZES, ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import DoBench, ParallelCase
from trainstep.rows import ParallelRow
from trainstep.rows.records import of_kind, read_records

MODEL = ModelConfig(vocab_size=300, d_model=16, d_ff=20, num_layers=5, num_heads=2)


@pytest.mark.distributed
def test_the_whole_script(tmp_path):
    toml, out = tmp_path / "small.toml", tmp_path / "out"
    toml.write_text("[model]\n" + "\n".join(f"{name} = {value}" for name, value in vars(MODEL).items()))
    step = "--context 32 --attention sdpa --peer-attention sdpa --loss chunked --fused none --precision bf16"
    how = "--device cpu --compile off --warmup 1 --rep 40 --trace --checkpoint-blocks 3"
    found = torchrun("examples.step8b", "--size", toml, *step.split(), *how.split(), "--out", out)
    assert found.returncode == 0, found.stdout + found.stderr
    records = read_records(out / "results.jsonl")
    rows = of_kind(records, ParallelRow)
    file = f"@{out / 'first-3-of-5.json'}"
    assert [(row.scheme, row.checkpointing) for row in rows] == [(name, file) for name in ("torch-fsdp2", "fsdp")]
    for row in rows:
        assert (row.status, row.batch, row.context, row.precision) == ("ok", 1, 32, "bf16"), row.reason
        assert row.gradient_error <= row.gradient_allowed
        assert row.float32_error <= row.float32_allowed < 1e-5
        assert row.n == len(row.samples["step"]) >= 1
    assert [row.kind for row in records].count("parallel ratio") == 1
    assert (out / "trace-fsdp.json.gz").exists()
    assert found.stdout.count(" ms | |\n") == 2, "a line to paste for each arm"


def test_arms_are_judged_on_a_small_model_with_heads_as_wide(tmp_path):
    arms = Step8b(scheme=("fsdp", "torch-fsdp2"), checkpoint_blocks=(12, 34), out=tmp_path).arms()
    assert [(arm.scheme.name, arm.config.attention) for arm in arms] == 2 * [
        ("fsdp", "flash-triton"),
        ("torch-fsdp2", "sdpa-cudnn"),
    ]
    config = StepConfig(context=32_768, precision="bf16", attention="flash-triton", compile="blocks", loss="fused")
    whole, some = (dataclasses.replace(config, checkpointing=checkpointing_of(n, 34, tmp_path)) for n in (0, 12))
    whole, some = (
        reduced(ParallelCase(source_of("8B", SIZES["8B"]), each, SCHEMES["fsdp"]), tmp_path) for each in (whole, some)
    )
    model = some.source.model
    assert (model.num_layers, model.num_heads, model.head_dim) == (4, 8, SIZES["8B"].head_dim)
    assert (whole.config.checkpointing, some.config.checkpointing) == ("none", f"@{tmp_path / 'first-2-of-4.json'}")
    assert (some.config.context, some.config.loss, some.config.compile) == (2048, "fused", "blocks")
    assert (some.float32.precision, some.float32.attention, some.float32.compile) == ("fp32", "eager", "off")
    with pytest.raises(UsageError, match="--checkpoint-blocks is 6; expected 0 to 5"):
        checkpointing_of(6, 5, tmp_path)


def test_do_bench_takes_as_many_steps_as_fit_and_one_at_least():
    assert [DoBench(10_000, 30_000).counts(ms) for ms in (4_400, 5_000, 31_000)] == [(2, 6), (2, 6), (1, 1)]
