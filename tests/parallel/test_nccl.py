"""The same on GPUs, over NCCL: what Gloo cannot show (streams, means made on the way, grouped calls).

Collectives and data parallel training over NCCL are in `test_gloo_gpu`, whose groups have it beside Gloo and alone.
"""

import time

import pytest
import torch

from tests.parallel import test_ddp
from tests.parallel.training import OPTIMIZERS, build, differing, loss_of, reference, shares, state
from tests.parallel.zero import test_arrivals, test_optimizer, test_state
from tests.workers import WorkerError, Workers
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.fixture(scope="module")
def gpus():
    """Two NCCL workers, each with a GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Workers(2, device="cuda", timeout_s=60) as workers:
        yield workers


def test_ddp_under_autocast(gpus):
    first, second = gpus.run(test_ddp.train_how, "autocast-bf16")
    assert not differing(second, first)
    assert not differing(first, reference("Plain", "SGD", 2, device="cuda", autocast=torch.bfloat16), relative=1e-6)


def _sharded(process, name, optimizer, scattered, transport):
    return test_optimizer.train(process, name, *OPTIMIZERS[optimizer], scattered, transport=transport)


@pytest.mark.parametrize("transport", ["peer-copies", "collectives"])
@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["Plain", "Tied", "Frozen", "Uneven", "Transposed", "Mixed", "Unused"])
def test_sharded_optimizer_trains_like_one_process(gpus, name, optimizer, scattered, transport):
    first, second = gpus.run(_sharded, name, optimizer, scattered, transport)
    assert not differing(second, first)
    assert not differing(first, reference(name, optimizer, 2, device="cuda"), relative=1e-6)


@pytest.mark.parametrize("case", test_state.CHECKPOINTED)
def test_sharded_state_is_saved_and_loaded(gpus, tmp_path, case):
    gpus.run(test_state._continue, case, tmp_path, range(2), None, "checkpoint")
    (trained, full), _ = gpus.run(test_state._continue, case, tmp_path, range(2, 4), "checkpoint", None)
    expected, expected_state = test_state._undivided(case, range(4), device="cuda")
    assert not differing(trained, expected, relative=1e-4)
    assert full["state"].keys() == expected_state["state"].keys()


@pytest.mark.parametrize("transport", ["peer-copies", "collectives"])
def test_parameters_gathered_beside_the_next_forward(gpus, transport):
    first, second = gpus.run(test_arrivals.train, transport)
    for name, trained in first.items():
        assert not differing(second[name], trained), name
        assert not differing(trained, reference(name, "AdamW", 2, device="cuda"), relative=1e-6), name


class _Layers(torch.nn.Module):
    """Blocks that take time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _large(process, transport="auto", overlap_gather=False):
    """Layers large enough that communication is still under way when backward ends; and what is held in memory."""
    model = _Layers().to(process.device)
    ddp = DistributedDataParallel(model, process_group=process.group, transport=transport)
    ours = {"ddp": ddp, "overlap_gather": overlap_gather, "exchange_mb": 64}
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, fused=True, **ours)
    x = torch.randn(
        16, 4096, device=process.device, generator=torch.Generator(process.device).manual_seed(process.rank)
    )
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        with recorded_collectives() as calls:
            ddp(x).pow(2).mean().backward()
            started = len(calls)
            ddp.finish_gradient_synchronization()
            optimizer.step()
    optimizer.wait_for_parameters()
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    return state(model), started, torch.cuda.max_memory_allocated() / weights


def _large_alone():
    model = _Layers().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    xs = [torch.randn(16, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(rank)) for rank in (0, 1)]
    for _ in range(3):
        optimizer.zero_grad()
        for x in xs:
            (model(x).pow(2).mean() / 2).backward()
        optimizer.step()
    return state(model)


@pytest.mark.parametrize("overlap_gather", [False, True])
@pytest.mark.parametrize("transport", ["peer-copies", "collectives"])
def test_layers_that_take_time(gpus, transport, overlap_gather):
    (first, started, weights), (second, _, _) = gpus.run(_large, transport, overlap_gather)
    assert started == 8, "every layer's gradients were sent during backward"
    assert not differing(second, first)
    assert not differing(first, _large_alone(), relative=1e-5)
    staged = 0.4 if transport == "peer-copies" else 0.0  # two layers' gradients and half of it, and half a layer
    assert weights < 3.2 + staged, "weights, gradients, and half of two moments: nothing is held twice"


def _hang(process):
    """Rank 1 hangs in backward; the GPU of rank 0 waits for its copies."""
    ddp = DistributedDataParallel(build("Plain").to(process.device), bucket_mb=0, transport="peer-copies")
    if process.rank == 1:
        ddp.module.first.weight.register_hook(lambda _: time.sleep(60))
    loss_of(ddp, shares(2, 0)[process.rank]).backward()
    ddp.finish_gradient_synchronization()
    torch.cuda.synchronize()


def test_a_rank_that_hangs_under_copies_is_named():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Workers(2, device="cuda", timeout_s=10) as workers, pytest.raises(WorkerError) as caught:
        workers.run(_hang)
    said = caught.value.failures[0]
    assert "rank 1" in said, said
    assert "hangs or is late: it is at" in said, said
    assert "(_hang)" in said, said  # where its own thread is: backward runs on another


def test_an_overflow_anywhere_skips_the_step_everywhere(gpus):
    assert gpus.run(test_ddp._infinite) == [([], 2.0), ([], 2.0)]
