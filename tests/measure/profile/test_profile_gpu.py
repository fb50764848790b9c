"""Profiles of a real GPU: all kernels found where they belong, FLOPs exact, sums no larger than the phases."""

import pytest

from trainstep.attention.eager import pieces_announced
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import MATMULS, profile_of
from trainstep.measure.profile.overlap import busy_us
from trainstep.measure.profile.ranges import announce, record_steps
from trainstep.measure.timing import device_clock
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(vocab_size=1024, d_model=256, d_ff=512, num_layers=4, num_heads=4)
BATCH, CONTEXT, STEPS = 4, 256, 3


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32", "attention": "eager"},
        {"precision": "bf16", "attention": "sdpa-flash", "optimizer": "adamw-fused"},
        {"precision": "bf16", "attention": "flash-triton", "checkpointing": "every-1"},
        {"precision": "bf16", "attention": "sdpa", "compile": "blocks"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_kernels_are_where_they_belong(tmp_path, settings):
    step = build_step(builtin_source("toy", MODEL), StepConfig(batch=BATCH, context=CONTEXT, **settings))
    batch = step.next_batch()
    for _ in range(3):
        step(batch)

    def profiled():
        trace = tmp_path / "trace.json.gz"
        return record_steps(
            lambda phase: step(batch, phase=phase), device_clock(step.device), STEPS, trace, step.module
        )

    if settings["attention"] == "eager":
        with pieces_announced(lambda piece: announce("attention", piece)):
            timing = profiled()
    else:
        timing = profiled()
    profile = profile_of(read_chrome_trace(tmp_path / "trace.json.gz"))

    assert profile.steps == STEPS
    unknown = {(each.name, each.operator, each.phase) for each in profile.kernels if not (each.phase and each.module)}
    assert profile.share(lambda each: bool(each.phase and each.module)) >= 0.98, unknown
    for index, kernels in enumerate(profile.by_step.values()):
        laps = timing.samples[index].laps
        for phase, lap in laps.items():
            own = [each for each in kernels if each.phase == phase]
            assert busy_us(own) / 1e3 <= lap.ms * 1.02 + 0.02, phase

    def product_flops(phase, module):
        chosen = (each for each in profile.kernels if each.family in MATMULS and each.flops)
        return sum(each.flops for each in chosen if (each.phase, each.module) == (phase, module)) / STEPS

    linear = 2 * BATCH * CONTEXT * MODEL.d_model**2
    if settings.get("compile") is None:
        again = 1 if settings.get("checkpointing") else 0
        assert product_flops("forward", "blocks.1.attention.query") == linear
        assert product_flops("backward", "blocks.1.attention.query") == (2 + again) * linear
    else:
        assert product_flops("backward", "blocks.1") == 2 * product_flops("forward", "blocks.1") > 4 * linear
    families = {each.family for each in profile.kernels}
    assert "optimizer" in families
    if settings["precision"] == "fp32":
        assert "FP32 SIMT matmul" in families
        assert "tensor-core matmul" not in families
        assert {"scores", "softmax", "weighted sum"} <= {each.piece for each in profile.kernels}
        assert "softmax" in families
    else:
        assert {"tensor-core matmul", "fused attention"} <= families
        assert "FP32 SIMT matmul" not in families
