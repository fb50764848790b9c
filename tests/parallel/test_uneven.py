"""Ranks with different numbers of batches: every rank's error names them, long before the timeout."""

import os
import re
import threading

import pytest
import torch
import torch.distributed as dist

from tests.parallel.training import build, loss_of, shares
from tests.workers import WorkerError, Workers
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer, rollcall
from trainstep.parallel.verdict import UNEVEN

pytestmark = pytest.mark.distributed


def leave(process, optimizer):
    process.rollcall.leave()
    dist.destroy_process_group()
    os._exit(0)


THEN = {
    "barrier": lambda process, optimizer: dist.barrier(),
    "objects": lambda process, optimizer: dist.all_gather_object([None, None], 1.0),
    "state": lambda process, optimizer: optimizer.full_state_dict(),
    "end": leave,
}


def _unevenly(process, sharded, then):
    rollcall.LOOKS_S = 0.2
    threading.Thread(target=process.rollcall._look, daemon=True).start()  # the first one has begun to wait for longer
    wrapper = DistributedDataParallel(build("Plain"))
    if sharded is None:
        optimizer = torch.optim.AdamW(wrapper.parameters())
    else:
        ddp = wrapper if sharded == "scattered" else None
        optimizer = ShardedOptimizer(wrapper.parameters(), torch.optim.AdamW, ddp=ddp)
    for step in range(4 - process.rank):
        loss_of(wrapper, shares(process.world_size, step)[process.rank]).backward()
        wrapper.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    THEN[then](process, optimizer)


@pytest.mark.parametrize(
    ("sharded", "then", "comes_to"),
    [
        (None, "barrier", "barrier"),
        (None, "objects", "all_gather"),
        ("whole", "state", "all_gather"),
        ("scattered", "barrier", "barrier"),
        ("scattered", "end", "has left"),
        (None, "end", "has left"),
    ],
)
def test_a_rank_that_is_through_with_its_batches_is_named(sharded, then, comes_to):
    with Workers(2, timeout_s=20) as workers, pytest.raises(WorkerError) as caught:
        workers.run(_unevenly, sharded, then)
    texts = caught.value.failures.values()
    (said,) = [line for text in texts for line in text.splitlines() if "CollectiveError: " in line]
    assert UNEVEN in said
    assert "Timed out" not in said, "nobody waited for the timeout"
    sent = "(all_reduce|all_to_all)"  # of gradients
    if then == "end":
        assert re.search(rf"rank 1 \(host .*?\) {comes_to} .*; rank 0 was in {sent} no\. \d+", said)
    else:
        assert "the ranks are in different collectives: " in said
        for rank, call in enumerate((sent, comes_to)):
            assert re.search(rf"rank {rank} \(host [^)]*\) is in {call} no\. \d+ at test_uneven\.py:\d+ ", said)
