"""Hybrid sharding on GPUs: two as 2×1 and 1×2, four as 2×2 and 4×1, train as one process without the host waiting."""

import pytest
import torch

from tests.parallel.fsdp.test_gpu import _poisoned, _steps_without_waiting
from tests.parallel.fsdp.training import error
from tests.parallel.meshes import mesh_of
from tests.parallel.nets import build, train_alone
from tests.workers import Workers
from trainstep.parallel import FullyShardedDataParallel

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]
SHAPES = [(2, 1), (1, 2), (2, 2), (4, 1)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            shape,
            marks=pytest.mark.skipif(shape[0] * shape[1] > GPUS, reason=f"{shape} needs more GPUs than {GPUS}"),
            id=str(shape),
        )
        for shape in SHAPES
    ],
)
def gpus(request):
    """Workers with one GPU each, and the shape of their mesh."""
    replicas, ranks = request.param
    with Workers(replicas * ranks, device="cuda", timeout_s=120, limit_s=600) as workers:
        yield workers, request.param


def _transports(process, shape):
    mesh = mesh_of(*shape, device="cuda")
    sharded = FullyShardedDataParallel(build(), device=process.device, mesh=mesh)
    return sharded.transport, sharded.transport_between


def test_trains_as_one_process_however_late_a_gpu_is(gpus):
    """On time, and with GPUs that are late, gathered memory starting as NaN."""
    workers, shape = gpus
    for within, between in workers.run(_transports, shape):
        assert within == ("peer-copies" if shape[1] > 1 else "collectives"), "between GPUs of a row"
        assert between == ("collectives" if shape[0] > 1 else None)
    for dtype in (torch.float32, torch.bfloat16):
        oracle = train_alone({"tied": True}, "sgd", 3, ranks=1, trained=torch.float64)
        own = error(train_alone({"tied": True}, "sgd", 3, ranks=shape[0] * shape[1], dtype=dtype), oracle)
        cases = [({"tied": True}, "sgd", dtype, False, late, "auto", shape) for late in (None, 1, 2, 3)]
        (first, *late), *others = workers.run(_poisoned, cases)
        assert 0 < error(first, oracle) <= 2 * own + torch.finfo(torch.float32).eps, dtype
        assert all(error(found, first) < 1e-6 for found in late)
        for found, *_ in others:
            assert all(torch.equal(found[name], value) for name, value in first.items())


def _without_waiting(process, shape):
    return _steps_without_waiting(process, mesh_of(*shape, device="cuda"))


def test_the_host_never_waits_and_nothing_stays(gpus):
    workers, shape = gpus
    for at_rest, on_device in workers.run(_without_waiting, shape):
        assert on_device, "from meta, the mesh's device"
        assert len(set(at_rest[2:])) == 1, "bytes at rest are the same after every step"
