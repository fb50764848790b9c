"""Casts and moves of a wrapped module: those that change nothing do nothing, at any point of a step."""

from operator import methodcaller

import pytest
import torch

from tests.parallel.training import build, loss_of, shares, state
from trainstep.base.errors import UsageError
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.distributed

MOVES = (
    methodcaller("to", "cpu"),
    methodcaller("to", torch.device("cpu"), torch.float32, non_blocking=True),
    methodcaller("to", torch.float32, memory_format=torch.channels_last),
    methodcaller("float"),
    methodcaller("cpu"),
    methodcaller("type", torch.float32),
)
"""As Accelerate, Lightning and Trainer call them, of the wrapper and of the module in it."""
SCHEMES = {
    "ddp": {},
    "ddp after backward": {"overlap": False},
    "sharded optimizer": {},
    "scattered": {},
    "gathered beside": {"overlap_gather": True},
}


def _train(process, scheme, moves):
    wrapper = DistributedDataParallel(build("Transposed"), **(SCHEMES[scheme] if "ddp" in scheme else {}))
    if "ddp" in scheme:
        optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
    else:
        more = {} if scheme == "sharded optimizer" else {"ddp": wrapper, **SCHEMES[scheme]}
        optimizer = ShardedOptimizer(wrapper.parameters(), torch.optim.AdamW, lr=0.01, **more)

    def move():
        for each in moves:
            for module in (wrapper, wrapper.module.last):
                assert each(module) is module

    for step in range(3):
        inputs = shares(process.world_size, step)[process.rank]
        move()
        with wrapper.no_sync():
            loss_of(wrapper, inputs[:1]).backward()
        move()
        loss_of(wrapper, inputs[1:]).backward()
        move()
        wrapper.finish_gradient_synchronization()
        move()
        optimizer.step()
        move()
        optimizer.zero_grad()
    getattr(optimizer, "wait_for_parameters", lambda: None)()
    return state(wrapper.module)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_move_that_changes_nothing_does_nothing(two, scheme):
    expected = two.run(_train, scheme, ())[0]
    for found in two.run(_train, scheme, MOVES):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _cast_in_slices(process):
    wrapper = DistributedDataParallel(build("Plain"))
    ShardedOptimizer(wrapper.parameters(), torch.optim.AdamW, ddp=wrapper)
    loss_of(wrapper, shares(process.world_size, 0)[process.rank]).backward()
    wrapper.finish_gradient_synchronization()
    for each in (methodcaller("bfloat16"), methodcaller("to", torch.float64), methodcaller("to", "meta")):
        with pytest.raises(UsageError, match=r"of a module with the gradient of first.weight in slices.*zero_grad\(\)"):
            each(wrapper)


def test_a_move_of_gradients_in_slices_is_refused(two):
    two.run(_cast_in_slices)
