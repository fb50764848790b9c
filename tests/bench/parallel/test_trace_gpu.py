"""Traced steps on two GPUs: NCCL's kernels lie after backward or under it, and copies between GPUs are seen as such."""

import pytest
import torch

from tests.workers import Workers
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.run import run_cases
from trainstep.rows import ParallelTraceRow
from trainstep.rows.records import of_kind
from trainstep.step.workload import builtin_source

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

MODEL = ModelConfig(vocab_size=4096, d_model=1024, d_ff=4096, num_layers=8, num_heads=16, max_context=512)
# so much for the GPUs that no host is late, which would leave nothing for copies to lie under
CONFIG = StepConfig(context=512, batch=32, device="cuda", precision="bf16", attention="sdpa", optimizer="adamw-fused")
NAMES = ("single", "flat", "bucketed-25", "fsdp", "fsdp-collectives")


def _records(process, folder):
    source = builtin_source("eight blocks", MODEL)
    cases = [ParallelCase(source, CONFIG, SCHEMES[scheme], warmup=2, steps=6) for scheme in NAMES]
    return list(run_cases(cases, process, folder))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Workers(2, device="cuda", timeout_s=120) as workers:
        rows, _ = workers.run(_records, tmp_path_factory.mktemp("traces"))
    found = {row.case["scheme"]: row for row in of_kind(rows, ParallelTraceRow)}
    assert {scheme: (row.status, row.reason) for scheme, row in found.items()} == dict.fromkeys(NAMES, ("ok", ""))
    return found


def communicating(row):
    """Names of the kernels and copies that communicate."""
    families = [row.series["family_names"][index] for index in row.series["family"]]
    names = [row.series["kernel_names"][index] for index in row.series["kernel"]]
    return {name for name, family in zip(names, families, strict=True) if family == "communication"}


def test_sums_fit_together(traced):
    for row in traced.values():
        values = row.values
        assert values["on_cpu"] is False
        parts = values["computation_ms"] + values["exposed_communication_ms"] + values["idle_ms"]
        assert parts == pytest.approx(values["span_ms"], rel=1e-4)
    assert traced["single"].values["communication_ms"] == 0


def test_overlap_hides_what_lies_after_backward_without_it(traced):
    flat, bucketed = traced["flat"].values, traced["bucketed-25"].values
    assert any(name.startswith("ncclDevKernel_AllReduce") for name in communicating(traced["flat"]))
    assert flat["hidden_share"] < 0.02
    assert bucketed["hidden_share"] > flat["hidden_share"] + 0.1, bucketed


def test_copies_between_gpus_are_communication(traced):
    assert any(name.startswith("ncclDevKernel") for name in communicating(traced["fsdp-collectives"]))
    assert any(name.startswith("Memcpy PtoP") for name in communicating(traced["fsdp"]))
