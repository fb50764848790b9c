"""A policy of every block by itself changes nothing under FSDP, and never sends a gathered weight to host memory."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.nets import batch, build, loss_of
from tests.workers import Workers
from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.peers.fsdp2 import shard_fully

pytestmark = pytest.mark.distributed

STORAGES = 6
"""What a block saves: its input, the norm's two statistics and result, gelu's input and result."""
MIXED = Policy(
    {
        "blocks.0": BlockPolicy(recompute=True, host=(0,)),
        "blocks.1": BlockPolicy(recompute=True, kept=("addmm#0", "gelu#0")),
        "blocks.2": BlockPolicy(host=tuple(range(STORAGES))),
        "blocks.3": BlockPolicy(host=(0, 5)),
    }
)


def _gradients(process, policy, peer):
    """This rank's gradients of two steps."""
    module = sharded = build()
    if peer:
        mesh, blocks = init_device_mesh("cpu", (process.world_size,)), [[block] for block in module.blocks]
        shard_fully(module, mesh, None, blocks, narrow_reduce=False, fixed_order=True)
    else:
        sharded = FullyShardedDataParallel(module)
    Checkpointing(module, policy)
    found = []
    for step in range(2):
        loss_of(sharded, batch(step).chunk(process.world_size)[process.rank]).backward()
        getattr(sharded, "finish_gradient_synchronization", lambda: None)()
        gradients = [parameter.grad for parameter in sharded.parameters() if parameter.grad is not None]
        found.append([each.to_local().clone() for each in gradients])
        sharded.zero_grad()
    return found


def _compare(process, peer):
    plain, mixed = _gradients(process, "none", peer), _gradients(process, MIXED, peer)
    same = all(torch.equal(a, b) for one, two in zip(plain, mixed, strict=True) for a, b in zip(one, two, strict=True))
    try:
        _gradients(process, Policy({"blocks.2": BlockPolicy(host=(STORAGES,))}), peer)
    except UnsupportedError as error:
        return same, len(plain[0]), str(error)
    return same, len(plain[0]), ""


@pytest.mark.parametrize("peer", [False, True], ids=["ours", "FSDP2"])
def test_gradients_keep_every_bit_and_no_weight_is_counted(peer):
    with Workers(2) as two:
        for same, count, said in two.run(_compare, peer):
            assert same
            assert count > 0
            assert f"saves only {STORAGES}" in said
