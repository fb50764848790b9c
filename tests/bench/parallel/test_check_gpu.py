"""On GPUs sharded schemes and torch's own are judged to train what one process would, with the fused optimizer."""

import pytest
import torch

from tests.bench.parallel import by_scheme
from tests.workers import Workers
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.check.ranks import compare_with_one_process
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=512, d_model=128, d_ff=256, num_layers=2, num_heads=2, max_context=64)
CONFIG = StepConfig(context=64, batch=2, device="cuda", precision="bf16", attention="sdpa", optimizer="adamw-fused")


NAMES = ("sharded-optimizer", "fsdp", "torch-ddp", "torch-zero", "torch-fsdp2", "torch-fsdp2-bf16-reduce")


def _judged(process):
    cases = [ParallelCase(builtin_source("two blocks", MODEL), CONFIG, SCHEMES[name]) for name in NAMES]
    found = by_scheme(compare_with_one_process(cases, process))
    return {scheme.name: str(each) for scheme, each in found.items()}


@pytest.mark.gpu
@pytest.mark.distributed
def test_our_schemes_and_torchs_train_what_one_process_would():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and there are {torch.cuda.device_count()}")
    with Workers(2, device="cuda", timeout_s=120, limit_s=400) as workers:
        assert workers.run(_judged)[0] == dict.fromkeys(NAMES, "")
