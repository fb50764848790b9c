"""The same on two GPUs, where waits are a stream's."""

import dataclasses

import pytest
import torch

from tests.bench.parallel.test_waits import MODEL, WAITS_IN, waits_seen
from tests.workers import Workers
from trainstep.base.config import StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.run import Timed, measure, parallel_row
from trainstep.step.workload import WorkloadSource, builtin_source

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CYCLES = 1_000_000_000  # half a second and more, at 2 GHz at most

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and there are {GPUS}"),
]


@pytest.fixture(scope="module")
def gpus():
    with Workers(2, device="cuda", timeout_s=120, limit_s=600) as workers:
        yield workers


def late_in_the_loss(rank):
    workload = builtin_source("little", MODEL)

    def build(step):
        built = workload.build(step)

        def loss(outputs, batch):
            if rank:
                torch.cuda._sleep(CYCLES)
            return built.loss(outputs, batch)

        return dataclasses.replace(built, loss=loss)

    return WorkloadSource("late", build, MODEL)


def _measured(process, schemes):
    found = {}
    for name in ("single", *schemes):
        config = StepConfig(context=16, batch=2, device="cuda")
        case = ParallelCase(late_in_the_loss(process.rank), config, SCHEMES[name], warmup=1, steps=2)
        rank = measure(case, process)
        found[name] = rank, parallel_row(case, process, Timed([[rank]], None), num_parameters=MODEL.num_parameters)
    return found


def test_a_stream_waits_for_a_late_one_wherever_its_scheme_waits(gpus):
    found, _ = gpus.run(_measured, tuple(WAITS_IN))
    assert found.keys() == {"single", *WAITS_IN}
    for name, (rank, row) in found.items():
        waits_seen(name, rank, row, slack=1.01)
