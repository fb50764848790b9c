"""Over Gloo, and over NCCL beside it or alone, tensors of GPUs train as one process does; also two ranks on one GPU.

Of Gloo's own there is little to see on a CPU: that copies to the host and back stand in the right order on the streams.
"""

import pytest
import torch

from tests.parallel import test_collectives, test_ddp, test_gloo
from tests.parallel.fsdp import test_gpu
from tests.parallel.fsdp.training import error
from tests.parallel.nets import batch, loss_of, train_alone
from tests.parallel.nets import build as build_net
from tests.parallel.training import OPTIMIZERS, differing, reference
from tests.parallel.zero import test_optimizer
from tests.workers import Workers
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.collectives import all_reduce_mean
from trainstep.parallel.gloo import host_waits

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and there are {GPUS}")

GROUPS = [
    pytest.param(("gloo", 1), id="gloo on one GPU"),
    pytest.param(("gloo", 2), id="gloo on two GPUs", marks=two_gpus),
    pytest.param(("cpu:gloo,cuda:nccl", 2), id="gloo and nccl", marks=two_gpus),
    pytest.param(("nccl", 2), id="nccl alone", marks=two_gpus),
]
MODELS = ["Plain", "Tied", "Frozen", "Uneven", "Transposed", "Mixed"]


@pytest.fixture(scope="module", params=GROUPS)
def ranks(request):
    """Two ranks of a backend on a number of GPUs; `ranks.gpus` says how many."""
    backend, gpus = request.param
    with Workers(2, device="cuda", backend=backend, gpus=gpus, timeout_s=60, limit_s=600) as workers:
        workers.gpus = gpus
        workers.waits = backend == "gloo"
        yield workers


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=two_gpus)], ids=["one GPU", "two GPUs"])
def four_ranks(request):
    """Four ranks over Gloo that share the GPUs."""
    with Workers(4, device="cuda", backend="gloo", gpus=request.param, timeout_s=60, limit_s=600) as workers:
        workers.gpus = request.param
        yield workers


def _waits(process):
    return host_waits(process.group, process.device), process.device.index


def test_the_host_waits_over_gloo_alone(ranks):
    assert ranks.run(_waits) == [(ranks.waits, rank % ranks.gpus) for rank in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_collective(ranks, dtype):
    test_collectives.check(ranks, dtype)


def _sent(process):
    return test_gloo._sent(process, process.device)


def test_broadcast_and_all_to_all_over_gloo(four_ranks):
    test_gloo.check_sent(four_ranks.run(_sent))


def _late(process, waits):
    """Means of what a stream makes late, read at once by the stream that waits, ten times; beside another stream."""
    found = []
    side = torch.cuda.Stream()
    for step in range(10):
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(2_000_000)
            tensors = [torch.full((1 << 20,), float(process.rank + step), device="cuda") for _ in range(2)]
            call = all_reduce_mean(tensors, process.group)
            if waits:
                tensors[0].fill_(-1.0)  # the copies were taken before this
            call.wait()
            made = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.fill_(float("nan"))  # behind the copies back
        torch.cuda.synchronize()
        found += [tensor.unique().tolist() for tensor in made]
    return found


def test_copies_come_after_what_was_given_before_and_before_what_comes_next(ranks):
    expected = [[step + 0.5] for step in range(10) for _ in range(2)]
    assert ranks.run(_late, ranks.waits) == [expected, expected]


def _ddp(process, name):
    return [test_ddp.train(process, name, "AdamW", scheme) for scheme in test_ddp.SCHEMES]


@pytest.mark.parametrize("name", [*MODELS, "Branches"])
def test_ddp_trains_like_one_process(ranks, name):
    expected = reference(name, "AdamW", 2, device="cuda")
    for scheme, first, second in zip(test_ddp.SCHEMES, *ranks.run(_ddp, name), strict=True):
        assert not differing(second, first), scheme
        assert not differing(first, expected, relative=1e-6), scheme


@pytest.mark.parametrize("scheme", ["overlapped", "bucketed"])
def test_ddp_with_late_ranks_and_layers(ranks, scheme):
    expected = reference("Branches", "SGD", 2, device="cuda")
    for results in ranks.run(test_ddp._train_delayed, scheme):
        assert not any(differing(each, expected, relative=1e-6) for each in results)


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("name", [*MODELS, "Unused"])
def test_sharded_optimizer_trains_like_one_process(ranks, name, scattered):
    first, second = ranks.run(test_optimizer.train, name, *OPTIMIZERS["AdamW"], scattered)
    assert not differing(second, first)
    assert not differing(first, reference(name, "AdamW", 2, device="cuda"), relative=1e-6)


FSDP_CASES = {
    "float32": ({"frozen": True, "unused": True}, "sgd", None),
    "bfloat16": ({"tied": True}, "sgd", torch.bfloat16),
}


def _fsdp(process, lates):
    """By case, transport and lateness; gathered memory starts as NaN."""
    return [
        [
            test_gpu._poisoned(process, [(*case, False, late, transport) for late in lates])
            for transport in ("collectives", "auto")
        ]
        for case in FSDP_CASES.values()
    ]


def _budget(options, how, dtype, ranks):
    """What training in one process gives in float64, and how far ours may be from it (see `fsdp/test_gpu.py`)."""
    oracle = train_alone(options, how, 3, ranks=1, trained=torch.float64)
    own = error(train_alone(options, how, 3, ranks=ranks, dtype=dtype), oracle)
    return oracle, 2 * own + torch.finfo(torch.float32).eps


def test_fsdp_trains_as_one_process_however_late_a_gpu_is(ranks):
    first, second = ranks.run(_fsdp, (None, 1, 2))
    for (name, (options, how, dtype)), found, other in zip(FSDP_CASES.items(), first, second, strict=True):
        oracle, budget = _budget(options, how, dtype, 2)
        for by_lateness, of_other in zip(found, other, strict=True):
            assert 0 < error(by_lateness[0], oracle) <= budget, name
            assert all(error(late, by_lateness[0]) < 1e-6 for late in by_lateness[1:]), name
            assert not differing(of_other[0], by_lateness[0]), name


def _carriers(process):
    return FullyShardedDataParallel(build_net(), device=process.device).transport


def test_peers_are_copied_to_where_each_has_a_gpu(ranks):
    assert ranks.run(_carriers) == ["peer-copies" if ranks.gpus == 2 else "collectives"] * 2


def _check_hybrid(workers, shape, transport):
    for name, case in FSDP_CASES.items():
        first, *others = workers.run(test_gpu._train, *case, False, None, transport, shape)
        oracle, budget = _budget(*case, workers.world_size)
        assert 0 < error(first, oracle) <= budget, name
        assert not any(differing(other, first) for other in others), name


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=str)
def test_hybrid_of_two_ranks_trains_as_one_process(ranks, shape):
    _check_hybrid(ranks, shape, "auto")


@pytest.mark.parametrize("transport", ["collectives", "auto"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_hybrid_of_four_ranks_trains_as_one_process(four_ranks, shape, transport):
    _check_hybrid(four_ranks, shape, transport)


def _in_another_order(process):
    sharded = FullyShardedDataParallel(build_net(), device=process.device, transport="collectives")
    if process.rank == 1:
        blocks = sharded.module.blocks
        blocks[1], blocks[2] = blocks[2], blocks[1]
    try:
        loss_of(sharded, batch(0)[:2].to(process.device))
    except Exception as error:
        return str(error)
    return None


def test_ranks_that_part_ways_over_gloo_are_told_before_bytes_are_mixed_up(four_ranks):
    for message in four_ranks.run(_in_another_order):
        assert "the ranks are not at the same point: rank 0 comes to gather" in message
