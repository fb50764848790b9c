"""Clipping sees every element of the gradients once, and gradient scaling the overflow of any rank."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.parallel.fsdp.training import error
from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of, train_alone
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed


def _clip(process, norm_type, max_norm):
    sharded = FullyShardedDataParallel(build(frozen=True))
    loss_of(sharded, batch(0).chunk(process.world_size)[process.rank]).backward()
    sharded.finish_gradient_synchronization()
    norm = sharded.clip_grad_norm_(max_norm, norm_type)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    return norm.item(), sharded.gather_full_parameters()


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.05), (float("inf"), 0.01), (1.0, 1e6)])
def test_clipping_counts_every_element_once(four, norm_type, max_norm):
    clipped = {}

    def clip(module):
        clipped["norm"] = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type).item()
        clipped["gradients"] = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    train_alone({"frozen": True}, "sgd", 1, ranks=4, change=clip)
    by_rank = four.run(_clip, norm_type, max_norm)
    assert len({norm for norm, _ in by_rank}) == 1
    norm, gradients = by_rank[3]
    assert norm == pytest.approx(clipped["norm"], rel=1e-5)
    assert error(gradients, clipped["gradients"]) < 1e-5
    assert not gradients["blocks.1.up.weight"].any(), "a frozen parameter has no gradient"


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


def _scale(process):
    """An overflow on rank 1 alone: no rank may step."""
    sharded = FullyShardedDataParallel(build(), compute_dtype=torch.float16)
    optimizer = OPTIMIZERS["sgd"](sharded.parameters())
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10, process_group=process.group)
    before = sharded.gather_full_parameters()
    moved = []
    for step in range(2):
        loss = scaler.scale(loss_of(sharded, batch(step).chunk(2)[process.rank]))
        loss.backward()
        sharded.finish_gradient_synchronization()
        if step == 0 and process.rank == 1:
            next(p for p in sharded.parameters() if p.numel() > 0).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = sharded.gather_full_parameters()
        moved.append(any(not torch.equal(after[name], before[name]) for name in before))
    return moved, scaler.get_scale()


def test_gradient_scaling_skips_a_step_on_all_ranks(two):
    assert two.run(_scale) == [([False, True], 2.0**9)] * 2
