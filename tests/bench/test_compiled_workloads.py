"""Workloads that compile code of their own, and insist on it, are measured; what ran eagerly for that is said."""

import dataclasses
import functools
import shutil

import pytest
import torch

from tests.realworld import models, written
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.bench.allocations import allocation_records
from trainstep.bench.dtypes import dtype_records
from trainstep.bench.memory import peak_records
from trainstep.bench.profile import profile_records
from trainstep.bench.residuals import residual_records
from trainstep.bench.step import StepCase, run_cases
from trainstep.check.step import StepCheck
from trainstep.measure.collectives import recorded_collectives
from trainstep.report.subjects.memory import uncompiled_findings
from trainstep.step.training_step import build_step, uncompiled
from trainstep.step.workload import WorkloadSource, builtin_source

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")

CONFIG = StepConfig(device="cpu")
POLICIES = [StepConfig(device="cpu", checkpointing=name) for name in ("none", "every-1", "selective")]


def parts(step):
    """Compiled functions, submodules and an optimizer's arithmetic as a whole, as nanochat's."""
    torch.manual_seed(step.seed)
    return dataclasses.replace(models.compiled_parts(), optimizer=written.MuonAdamW)


SOURCE = WorkloadSource("parts", parts)


def found(records):
    rows = list(records)
    assert [row.reason for row in rows if row.status != "ok"] == []
    return rows


@pytest.mark.parametrize(
    "records",
    [
        functools.partial(peak_records, configs=POLICIES, modes=["step"]),
        functools.partial(allocation_records, config=CONFIG),
        functools.partial(dtype_records, configs=[CONFIG]),
        functools.partial(residual_records, config=CONFIG),
        functools.partial(profile_records, config=CONFIG, warmup=1, steps=1, profiled_steps=1),
    ],
    ids=["peaks", "timeline", "dtypes", "residuals", "profile"],
)
def test_every_instrument_measures_it(records):
    assert found(records(SOURCE))


@pytest.mark.thorough
def test_its_step_has_the_flops_and_the_peak_of_eager_code_and_says_so():
    [own] = found(run_cases([StepCase(SOURCE, CONFIG, warmup=1, steps=1)]))
    with uncompiled():
        [eager] = found(run_cases([StepCase(SOURCE, CONFIG, warmup=1, steps=1)]))
    assert own.model_tflop == eager.model_tflop > 0
    assert own.backward_peak_gib == eager.backward_peak_gib > 0
    assert (own.uncompiled, eager.uncompiled) == (True, None)
    assert [each.figures["count"] for each in uncompiled_findings([own, eager])] == [1]
    assert uncompiled_findings([eager]) == []


def test_its_rounding_is_measured():
    assert StepCheck(SOURCE, CONFIG).judge(StepConfig(device="cpu", precision="bf16")).is_right


def test_recording_collectives_leaves_it_compiled():
    with recorded_collectives() as calls:
        normed = written._normed(torch.full((4,), 2.0))
    assert calls == []
    torch.testing.assert_close(normed, torch.ones(4))


def _kept(compile):
    """Of a step of our model: the bytes that backward finds, without weights, and the gradients."""
    model = ModelConfig(vocab_size=256, d_model=32, d_ff=96, num_layers=2, num_heads=2)
    config = StepConfig(batch=2, context=64, precision="bf16-pure", attention="sdpa", compile=compile, device="cpu")
    step = build_step(builtin_source("small", model), config)
    weights = {each.untyped_storage().data_ptr() for each in step.module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(128).view(2, 64) % 256
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.module(ids).float().logsumexp(-1).mean()
    loss.backward()
    return sum(kept.values()), [each.grad.float() for each in step.module.parameters()]


def test_blocks_that_recompute_keep_less_and_have_the_same_gradients():
    plain, expected = _kept("blocks")
    less, gradients = _kept("blocks-recompute")
    per_block = 128 * (32 + 32 + 96) * 2  # both norms' results and the SwiGLU's product, bf16
    assert plain - less >= 2 * per_block
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=2**-6, atol=float(wanted.abs().max()) * 2**-7)
