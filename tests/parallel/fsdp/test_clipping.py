"""Clipping sees every element of the gradients once, and scaling the overflow of any rank, with replicas too."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.parallel.fsdp.training import error, gradients_of, sharded_net
from tests.parallel.nets import OPTIMIZERS, batch, loss_of, train_alone
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed


def _clip(process, shape, norm_type, max_norm):
    sharded = sharded_net({"frozen": True}, shape=shape)
    loss_of(sharded, batch(0).chunk(process.world_size)[process.rank]).backward()
    sharded.finish_gradient_synchronization()
    return sharded.clip_grad_norm_(max_norm, norm_type).item(), gradients_of(sharded)


@pytest.mark.parametrize("shape", [None, (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.05), (float("inf"), 0.01), (1.0, 1e6)])
def test_clipping_counts_every_element_of_one_replica_once(four, shape, norm_type, max_norm):
    clipped = {}

    def clip(module):
        clipped["norm"] = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type).item()
        clipped["gradients"] = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    train_alone({"frozen": True}, "sgd", 1, ranks=4, change=clip)
    norms, by_rank = zip(*four.run(_clip, shape, norm_type, max_norm), strict=True)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(clipped["norm"], rel=1e-5)
    for gradients in by_rank:
        for name, (rows, found) in gradients.items():
            whole = clipped["gradients"].get(name)
            if whole is None:
                assert found is None, "a frozen parameter has no gradient"
            else:
                assert error({name: found}, {name: whole[rows]}) < 1e-5 or not whole[rows].any(), name


def _clip_by_the_largest(process):
    torch.manual_seed(0)
    sharded = FullyShardedDataParallel(nn.Linear(3, 2))
    sharded(torch.ones(4, 3)).square().sum().backward()
    sharded.finish_gradient_synchronization()
    rows = len(sharded.sharded_parameters()[0].shard)
    return rows, sharded.clip_grad_norm_(1e6, float("inf")).item()


def test_clipping_by_the_largest_element_where_ranks_have_no_rows(four):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    module(torch.ones(4, 3)).square().sum().backward()
    largest = max(parameter.grad.abs().max().item() for parameter in module.parameters())
    rows, norms = zip(*four.run(_clip_by_the_largest), strict=True)
    assert rows == (1, 1, 0, 0)
    assert norms == pytest.approx([largest] * 4)


def _scale(process, shape):
    """An overflow on the last rank alone: no rank may step."""
    sharded = sharded_net({}, torch.float16, shape)
    optimizer = OPTIMIZERS["sgd"](sharded.parameters())
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10, process_group=process.group)
    before = sharded.gather_full_parameters()
    moved = []
    for step in range(2):
        scaler.scale(loss_of(sharded, batch(step).chunk(process.world_size)[process.rank])).backward()
        sharded.finish_gradient_synchronization()
        if step == 0 and process.rank == process.world_size - 1:
            next(p for p in sharded.parameters() if p.numel() > 0).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = sharded.gather_full_parameters()
        moved.append(any(not torch.equal(after[name], before[name]) for name in before))
    return moved, scaler.get_scale()


@pytest.mark.parametrize(("workers", "shape"), [("two", None), ("four", (2, 2))])
def test_gradient_scaling_skips_a_step_on_all_ranks(request, workers, shape):
    found = request.getfixturevalue(workers).run(_scale, shape)
    assert found == [([False, True], 2.0**9)] * len(found)
