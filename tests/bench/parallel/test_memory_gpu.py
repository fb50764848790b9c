"""On two GPUs a scheme's turn leaves nothing of its memory to the next one's."""

from functools import partial

import pytest
import torch

from tests.bench.parallel.test_trace_gpu import CONFIG, MODEL
from tests.workers import Workers
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.run import measure
from trainstep.measure.outcome import attempt_on_all_ranks
from trainstep.step.workload import builtin_source

NAMES = ("single", "torch-ddp-1000", "torch-zero-1000", "torch-fsdp2", "bucketed-1000", "fsdp")


def _left(process):
    """Bytes after each turn."""

    def held():
        return torch.cuda.memory_allocated(process.device)

    found = []
    for name in NAMES:
        case = ParallelCase(builtin_source("eight blocks", MODEL), CONFIG, SCHEMES[name], warmup=1, steps=2)
        assert len(attempt_on_all_ranks(partial(measure, case, process), process)) == process.world_size
        found.append(max(attempt_on_all_ranks(held, process)))
    return found


@pytest.mark.gpu
@pytest.mark.distributed
def test_a_turn_leaves_nothing_to_the_next():
    """torch's DDP left its buckets, as large as all weights, until the next collective of the group. What cuBLAS works
    in stays from the first turn on."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, and there are {torch.cuda.device_count()}")
    with Workers(2, device="cuda", timeout_s=120) as workers:
        first, *after = workers.run(_left)[0]
    left = {name: each - first for name, each in zip(NAMES[1:], after, strict=True)}
    assert max(left.values()) < MODEL.num_parameters * 4 / 10, left
