"""On GPUs every scheme, torch's own included, is judged to train what one process would, with the fused optimizer."""

import pytest
import torch

from tests.workers import Workers
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.check import compare_with_one_process
from trainstep.config import ModelConfig, StepConfig
from trainstep.schemes import SCHEMES
from trainstep.workload import builtin_source

MODEL = ModelConfig(vocab_size=512, d_model=128, d_ff=256, num_layers=2, num_heads=2, max_context=64)
CONFIG = StepConfig(context=64, batch=2, device="cuda", precision="bf16", attention="sdpa", optimizer="adamw-fused")


def _judged(process):
    cases = [
        ParallelCase(builtin_source("two blocks", MODEL), CONFIG, scheme)
        for scheme in SCHEMES.values()
        if scheme.in_bench
    ]
    found = compare_with_one_process(cases, process).schemes
    return {scheme.name: str(each) for scheme, each in found.items() if each is not None}


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch finds none")
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_scheme_trains_what_one_process_would(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, and there are {torch.cuda.device_count()}")
    with Workers(ranks, device="cuda", timeout_s=120, limit_s=400) as workers:
        judged = workers.run(_judged)[0]
    wanted = {name for name, scheme in SCHEMES.items() if scheme.in_bench and scheme.communicates}
    assert judged == dict.fromkeys(wanted, "")
