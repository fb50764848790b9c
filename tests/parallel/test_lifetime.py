"""A wrapper's memory is free as soon as the wrapper is gone, without Python's collector.

The collector comes late, and it does not see through a tensor that a call to other ranks still holds. The next model
would then be built beside the last one.
"""

import gc
import time
import weakref

import pytest
import torch
from torch import nn

from tests.parallel.meshes import mesh_of
from tests.parallel.nets import Block
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Blocks, a weight that is read outside of its call too, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x) @ self.head.weight


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def _sharded_optimizer(module):
    return ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)


def _hooked(module):
    sharded = FullyShardedDataParallel(module)
    for each in sharded.parameters():
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.sum)
    return sharded


WRAPPERS = {
    "ddp": (DistributedDataParallel, _adamw),
    "ddp, flat": (lambda module: DistributedDataParallel(module, bucket_mb=float("inf"), overlap=False), _adamw),
    "ddp with the sharded optimizer": (DistributedDataParallel, None),
    "fsdp by collectives": (lambda module: FullyShardedDataParallel(module, transport="collectives"), _adamw),
    "fsdp by copies": (lambda module: FullyShardedDataParallel(module, transport="peer-copies"), _adamw),
    "fsdp in bfloat16": (lambda module: FullyShardedDataParallel(module, compute_dtype=torch.bfloat16), _adamw),
    "fsdp, two replicas": (lambda module: FullyShardedDataParallel(module, mesh=mesh_of(2, 1)), _adamw),
    "fsdp, hooked": (_hooked, _adamw),
    "fsdp, unfinished": (FullyShardedDataParallel, _adamw),
}


def _train_and_drop(name):
    """Train two steps, and return what would show that the wrapper or the optimizer is still there.

    Unfinished, it leaves gradients that nothing has synchronised, as an error in the loop does.
    """
    wrap, make = WRAPPERS[name]
    module = wrap(Net())
    optimizer = _sharded_optimizer(module) if make is None else make(module.parameters())
    for _ in range(2):
        module(torch.randn(2, 8)).square().mean().backward()
        if name == "fsdp, unfinished":
            break
        module.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return weakref.ref(module), weakref.ref(module.module), weakref.ref(optimizer)


def _tensors():
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def _alive_after(process, name):
    """What is alive after the wrapper has gone, and how many more tensors than after the one before it."""
    _train_and_drop(name)  # what is made once and kept
    gc.collect()
    gc.disable()
    try:
        before = _tensors()
        seen = _train_and_drop(name)
        patience = time.monotonic() + 5
        # a thread lets its last message go, which may hold the wrapper
        while (_tensors() > before or any(each() is not None for each in seen)) and time.monotonic() < patience:
            time.sleep(0.01)
        return [each() is not None for each in seen], _tensors() - before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", WRAPPERS)
def test_memory_is_free_when_the_wrapper_goes(two, name):
    for alive, more in two.run(_alive_after, name):
        assert alive == [False, False, False]
        assert more <= 0
