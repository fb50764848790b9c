"""The same on two GPUs: waits are a stream's, and gathers are told by events."""

import dataclasses

import pytest
import torch

from tests.bench.parallel.test_gathers import MODEL as DEEPER
from tests.bench.parallel.test_waits import MODEL, WAITS_IN, waits_seen
from tests.workers import Workers
from trainstep.base.config import StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.gathers import gather_rows
from trainstep.bench.parallel.run import Timed, measure, parallel_row
from trainstep.rows import ParallelRow
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


def _gathers(process):
    config = StepConfig(context=16, batch=2, device="cuda")
    source = builtin_source("little", DEEPER)
    cases = [ParallelCase(source, config, SCHEMES[name]) for name in ("fsdp", "fsdp-collectives", "torch-fsdp2")]
    return list(gather_rows(cases, {case: ParallelRow(**case.columns(2)) for case in cases}, process))


def test_gathers_are_told_by_events(gpus):
    rows, _ = gpus.run(_gathers)
    for scheme, count in (("fsdp", 10), ("fsdp-collectives", 10), ("torch-fsdp2", 9)):
        own = [row for row in rows if row.scheme == scheme]
        assert len(own) == count, [(row.phase, row.block, row.reason) for row in own]
        for row in own:
            assert 0 <= row.started_ms <= row.ended_ms
            assert row.exposed_ms == pytest.approx(max(0.0, row.ended_ms - row.needed_ms))
            assert row.profiled_exposed_ms is not None
        assert [row.needed_ms for row in own] == sorted(row.needed_ms for row in own)
