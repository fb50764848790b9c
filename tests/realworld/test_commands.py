"""What the commands measure of ten models that others wrote: every row right, figures that agree with one another."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.realworld import models
from trainstep.base.config import POLICIES, StepConfig
from trainstep.bench.allocations import allocation_records
from trainstep.bench.dtypes import dtype_records
from trainstep.bench.memory import peak_records
from trainstep.bench.residuals import measure_compiled_block, measure_residuals
from trainstep.bench.step import StepCase, run_cases
from trainstep.report.subjects.memory import cache_findings
from trainstep.rows import MemoryTimelineRow
from trainstep.rows.records import Row, of_kind
from trainstep.step.workload import Workload, WorkloadSource, factory_source

pytestmark = pytest.mark.realworld

TEN = ["llama", "gpt2", "qwen3", "mixtral", "bert", "t5", "whisper", "resnet", "lora", "unet"]
SECOND_LOOKS = ("gpt2", "bert", "t5", "unet")  # what they find the others do
CONFIG = StepConfig(device="cpu")


def source_of(name: str) -> WorkloadSource:
    pytest.importorskip(models.MODELS[name])
    return factory_source(f"tests.realworld.models:{name}")


def assert_measured(rows: list[Row]) -> None:
    assert rows
    assert [(row.status, row.reason) for row in rows if row.status != "ok"] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in SECOND_LOOKS else []) for name in TEN]
)
def test_memory_is_one_figure_however_it_is_looked_at(name: str) -> None:
    source = source_of(name)
    [step] = run_cases([StepCase(source, CONFIG, warmup=2, steps=1)], check=False)
    rows = list(allocation_records(source, CONFIG))
    policies = list(
        peak_records(source, [dataclasses.replace(CONFIG, checkpointing=name) for name in POLICIES], ["step"])
    )
    assert_measured([step, *rows, *policies])
    [timeline] = of_kind(rows, MemoryTimelineRow)
    assert step.peak_gib is not None
    assert timeline.peak_gib == pytest.approx(step.peak_gib, rel=0.01)
    assert policies[0].peak_gib == pytest.approx(step.peak_gib, rel=0.01)
    assert timeline.unknown_share == 0
    kept = measure_residuals(source, CONFIG).whole.bytes
    assert 0 < kept / 2**30 < step.peak_gib


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("mixtral", "t5", "lora"))]
)
def test_a_step_in_bf16_is_checked_and_its_dtypes_are_seen(name: str) -> None:
    source = source_of(name)
    config = dataclasses.replace(CONFIG, precision="bf16")
    [step] = run_cases([StepCase(source, config, warmup=0, steps=1)])
    dtypes = list(dtype_records(source, [config]))
    assert_measured([step, *dtypes])
    assert step.not_checked is None
    assert step.model_tflop is not None
    assert step.model_tflop > 0
    weights = {name: each.dtype for name, each in source.build(CONFIG).module.named_parameters()}
    assert set(weights.values()) == {torch.float32}
    assert {dtype for row in dtypes for dtype in row.parameters or ()} == {"fp32"}
    assert "bf16" in {dtype for row in dtypes for dtype in row.outputs or ()}


@pytest.mark.parametrize("name", [pytest.param("gpt2_eager", marks=pytest.mark.thorough), "qwen3"])
def test_a_compiled_block_keeps_no_more_than_an_eager_one(name: str) -> None:
    """Their masks and caches are made in forward, before the block is called."""
    source = source_of(name)
    compiled, eager = measure_compiled_block(source, CONFIG).bytes, measure_residuals(source, CONFIG).first_block.bytes
    assert 0 < compiled <= math.ceil(eager * 1.01)


def test_a_cache_that_training_does_not_use_is_told() -> None:
    """Keys and values of two layers, four sequences of 32 tokens, two heads of 16 numbers."""
    source = source_of("llama")

    def without_cache(step: StepConfig) -> Workload:
        workload = source.build(step)
        workload.module.config.use_cache = False
        return workload

    rows = [
        next(iter(run_cases([StepCase(each, CONFIG, warmup=1, steps=1)], check=False)))
        for each in (source, WorkloadSource("llama without a cache", without_cache))
    ]
    assert rows[0].cache_gib == 2 * 2 * 4 * 32 * 2 * 16 * 4 / 2**30
    assert rows[1].cache_gib is None
    [finding] = cache_findings(rows)
    assert finding.figures["gib"] == rows[0].cache_gib
    assert cache_findings(rows[1:]) == []
