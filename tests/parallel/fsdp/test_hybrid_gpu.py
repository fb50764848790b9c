"""Hybrid sharding on GPUs: two as 2×1 and 1×2, four as 2×2 and 4×1, train as one process without the host waiting."""

import pytest
import torch

from tests.parallel.fsdp.test_gpu import _late, _steps_without_waiting, error
from tests.parallel.meshes import mesh_of
from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of, train_alone
from tests.workers import Workers
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.fsdp.group import GatherGroup

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


def _train(process, shape, dtype, late):
    mesh = mesh_of(*shape, device="cuda")
    sharded = FullyShardedDataParallel(build(tied=True), device=process.device, compute_dtype=dtype, mesh=mesh)
    if late is not None:
        hook = _late(torch.Generator().manual_seed(1000 * late + process.rank))
        for module in [sharded.module.embedding, *sharded.module.blocks, sharded.module.head]:
            module.register_forward_pre_hook(hook)
            module.register_full_backward_hook(hook)
    optimizer = OPTIMIZERS["sgd"](sharded.parameters())
    for step in range(3):
        tokens = batch(step).chunk(process.world_size)[process.rank].to(process.device)
        loss_of(sharded, tokens).backward()
        sharded.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return sharded.gather_full_parameters(device="cpu"), (sharded.transport, sharded.transport_between)


def _train_all(process, shape):
    """By dtype: on time, and with GPUs that are late, gathered memory starting as NaN."""
    original = GatherGroup._copy_own

    def copy_own(group):
        torch.empty(0, dtype=torch.uint8, device=process.device).set_(group._storage).fill_(255)
        original(group)

    GatherGroup._copy_own = copy_own
    try:
        return {
            dtype: [_train(process, shape, dtype, late) for late in (None, 1, 2, 3)]
            for dtype in (torch.float32, torch.bfloat16)
        }
    finally:
        GatherGroup._copy_own = original


def test_trains_as_one_process_however_late_a_gpu_is(gpus):
    workers, shape = gpus
    by_rank = workers.run(_train_all, shape)
    ranks = shape[0] * shape[1]
    for dtype in (torch.float32, torch.bfloat16):
        oracle = train_alone({"tied": True}, "sgd", 3, ranks=1, trained=torch.float64)
        own = error(train_alone({"tied": True}, "sgd", 3, ranks=ranks, dtype=dtype), oracle)
        (first, transports), *late = by_rank[0][dtype]
        assert 0 < error(first, oracle) <= 2 * own + torch.finfo(torch.float32).eps, dtype
        assert transports[0] == ("peer-copies" if shape[1] > 1 else "collectives"), "between GPUs of a row"
        assert transports[1] == ("collectives" if shape[0] > 1 else None)
        assert all(error(found, first) < 1e-6 for found, _ in late)
        for found in by_rank[1:]:
            assert all(torch.equal(found[dtype][0][0][name], value) for name, value in first.items())


def _without_waiting(process, shape):
    return _steps_without_waiting(process, mesh_of(*shape, device="cuda"))


def test_the_host_never_waits_and_nothing_stays(gpus):
    workers, shape = gpus
    for at_rest, on_device in workers.run(_without_waiting, shape):
        assert on_device, "from meta, the mesh's device"
        assert len(set(at_rest[2:])) == 1, "bytes at rest are the same after every step"
