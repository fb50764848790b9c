"""What forward keeps for backward, as rows: the whole step, its first block, and the residual stream."""

import dataclasses
import shutil

import pytest

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.bench.residuals import measure_gradients, measure_residuals, residual_records
from trainstep.plan.memory import block_bytes
from trainstep.report.subjects import findings, make_tables
from trainstep.step.blocks import find_blocks
from trainstep.step.workload import builtin_source, factory_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=3, num_heads=2)
TOY = builtin_source("toy", MODEL)
STEP = StepConfig(batch=2, context=32, device="cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_block_keeps_what_the_plan_says(precision):
    config = dataclasses.replace(STEP, precision=precision)
    found = measure_residuals(TOY, config)
    assert found.first_block.bytes == block_bytes(MODEL, config, on_cuda=False).kept
    head_and_loss = found.whole.bytes - 3 * found.first_block.bytes
    assert head_and_loss > 2 * 32 * 256 * 4, "at least the log-softmax"


@pytest.mark.parametrize(
    ("source", "config", "bytes_per_parameter"),
    [
        (TOY, STEP, 4),
        (TOY, dataclasses.replace(STEP, precision="bf16"), 4),
        (TOY, dataclasses.replace(STEP, precision="bf16-pure", attention="sdpa"), 2),
        (TOY, dataclasses.replace(STEP, checkpointing="every-1"), 4),
        (factory_source("examples.own_model:workload"), StepConfig(device="cpu"), 4),
    ],
)
def test_a_block_makes_the_gradients_of_its_parameters(source, config, bytes_per_parameter):
    """By how memory changes over its backward, to the byte: what it frees was there before."""
    found = measure_gradients(source, config)
    block = find_blocks(source.build(config).module)[0]
    numbers = sum(each.numel() for each in block.parameters())
    if source is TOY:
        assert numbers == 4 * 32**2 + 3 * 32 * 64 + 2 * 32, "attention, SwiGLU, two norms"
    assert found.made == found.expected == bytes_per_parameter * numbers
    assert found.change == found.made - found.freed
    kept = measure_residuals(source, config).first_block.bytes
    assert found.freed == kept


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_counts_the_same(precision):
    """What was asked for, not what the allocator's blocks round it up to."""
    found = measure_gradients(TOY, dataclasses.replace(STEP, device="cuda", precision=precision))
    assert found.made == found.expected


@pytest.mark.parametrize(
    ("source", "changes", "says"),
    [
        (TOY, {"checkpointing": "selective"}, "use --policies none or every-1"),
        (factory_source("examples.toy_model:workload"), {}, "has no blocks"),
    ],
)
def test_where_the_gradients_of_one_block_are_not_apart(source, changes, says):
    with pytest.raises(UnsupportedError, match=says):
        measure_gradients(source, dataclasses.replace(StepConfig(device="cpu"), **changes))


def test_behind_a_frozen_embedding_the_second_block_is_measured():
    """No gradient goes beyond the first block, so nothing says when its backward is over."""

    def frozen(blocks):
        source = builtin_source("toy", dataclasses.replace(MODEL, num_layers=blocks))
        build = source.build

        def frozen(config):
            workload = build(config)
            workload.module.embedding.requires_grad_(False)
            return workload

        return dataclasses.replace(source, build=frozen)

    found, plain = measure_gradients(frozen(3), STEP), measure_gradients(TOY, STEP)
    assert (found.block, plain.block) == ("blocks.1", "")
    assert dataclasses.replace(found, block="") == plain, "blocks are alike"
    with pytest.raises(UnsupportedError, match="no block's input needs a gradient"):
        measure_gradients(frozen(1), STEP)


def rows_of(config):
    return {(row.compile, row.part, row.group, row.rank): row for row in residual_records(TOY, config)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_rows_of_residuals():
    rows = rows_of(STEP)
    whole = rows["off", "step", "all", None]
    listed = [row for row in rows.values() if (row.compile, row.part) == ("off", "step")]
    assert [(row.group, row.rank) for row in listed] == [
        *(("largest", rank) for rank in range(1, 6)), ("the rest", None), ("all", None)
    ]  # fmt: skip
    assert sum(row.mib for row in listed) == pytest.approx(2 * whole.mib)
    assert sum(row.share for row in listed) == pytest.approx(2)
    largest = [row.mib for row in listed[:5]]
    assert largest == sorted(largest, reverse=True)
    assert all(row.module and row.operation and row.tensor for row in listed[:5])
    stream = rows["off", "residual stream", "input of the first block", None]
    assert stream.mib == stream.formula_mib == 2 * 32 * 32 * 4 / 2**20
    change, made = (rows["off", "first block's backward", what, None] for what in ("change of memory", "gradients"))
    assert made.mib == made.formula_mib == 4 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) / 2**20
    assert change.mib == made.mib - rows["off", "first block", "all", None].mib
    (said,) = [each for each in findings(list(rows.values())) if each.id == "residuals.gradients"]
    assert said.figures["gib"] == made.mib / 1024
    assert rows["model", "step", "all", None].mib < whole.mib, "compiled code fuses what eager code keeps"
    eager, compiled = (rows[form, "first block", "all", None] for form in ("off", "blocks"))
    assert stream.mib < compiled.mib < eager.mib, "at least its input, and less than eager code"
    (table,) = make_tables(list(rows.values()))
    assert "share (%)" in table.columns


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_code_checkpoints_too():
    eager, compiled = (
        measure_residuals(TOY, dataclasses.replace(STEP, checkpointing="every-1", compile=compile)).whole.bytes
        for compile in ("off", "model")
    )
    assert compiled <= eager


def test_selective_checkpointing_hides_what_it_keeps():
    with pytest.raises(UnsupportedError, match="use --checkpointing none"):
        measure_residuals(TOY, dataclasses.replace(STEP, checkpointing="selective"))
