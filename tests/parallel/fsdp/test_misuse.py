"""What users get wrong around FullyShardedDataParallel: an error on every rank that says what to do, and no hang."""

import copy
import functools

import pytest
import torch
from torch import nn

from tests.parallel.mistakes import check, told
from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of
from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed


def test_not_initialised():
    with pytest.raises(UsageError, match=r"torch.distributed is not initialised; start with torchrun"):
        FullyShardedDataParallel(build())


def _arguments():
    sharded = FullyShardedDataParallel(build())
    lazy = nn.Sequential(nn.LazyLinear(3))
    return {
        "module is a function": lambda: FullyShardedDataParallel(lambda x: x),
        "expected a floating-point dtype": lambda: FullyShardedDataParallel(build(), compute_dtype=torch.int8),
        "prefetch is 3; expected 0 to 2": lambda: FullyShardedDataParallel(build(), prefetch=3),
        "transport is 'nccl'; expected one of auto, collectives, peer-copies": lambda: FullyShardedDataParallel(
            build(), transport="nccl"
        ),
        "sharded already": lambda: FullyShardedDataParallel(sharded),
        "0.weight has no shape yet": lambda: FullyShardedDataParallel(lazy),
        "0 is an nn.LSTM, which keeps": lambda: FullyShardedDataParallel(nn.Sequential(nn.LSTM(2, 2))),
        "cannot be copied; build another": lambda: copy.deepcopy(sharded),
        "head.weight shares the memory of embedding.weight": lambda: FullyShardedDataParallel(_tied_by_memory(build())),
        "was moved or cast; give": lambda: FullyShardedDataParallel(build()).to(torch.bfloat16),
    }


def _optimizer_before():
    module = build()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    sharded = FullyShardedDataParallel(module)
    loss_of(sharded, batch(0)).backward()
    sharded.finish_gradient_synchronization()
    optimizer.step()


def _optimizer_of_another_module():
    """Not refused: an optimizer that has nothing to do with the sharded module."""
    sharded = FullyShardedDataParallel(build())
    other = nn.Linear(2, 2)
    optimizer = OPTIMIZERS["sgd"](other.parameters())
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    del sharded


def _tied_by_memory(net):
    net.head.weight = nn.Parameter(net.embedding.weight.data[:])
    return net


def _insert(net, *more):
    net.blocks[1] = nn.Sequential(net.blocks[1], *more)


LATE = {  # how the module is changed once it is sharded
    "parameter blocks.1.up.extra was added after": lambda net: setattr(net.blocks[1].up, "extra", _ones(2, 2)),
    "parameter blocks.5.weight was added after": lambda net: net.blocks.append(nn.Linear(12, 12)),
    "parameter head.weight was added after": lambda net: setattr(net, "head", nn.Linear(12, 23)),
    "parameter blocks.1.1.weight was added after": lambda net: _insert(net, nn.Linear(12, 12)),
    "a ModuleList was changed after FullyShardedDataParallel was built": lambda net: net.blocks.pop(3),
    "head.weight was replaced or removed after": lambda net: setattr(net.head, "weight", _ones(23, 12)),
    "requires_grad of head.weight was True when it was sharded and is False now": (
        lambda net: net.head.weight.requires_grad_(False)
    ),
    "no error": _insert,
}


def _ones(*shape):
    return nn.Parameter(torch.ones(shape))


def _changed(change):
    sharded = FullyShardedDataParallel(build())
    change(sharded.module)
    loss_of(sharded, batch(0)).backward()
    sharded.finish_gradient_synchronization()


OPTIMIZERS_BESIDE = {
    "as it was before sharding; build the optimizer after": _optimizer_before,
    "no error": _optimizer_of_another_module,
}


def _all(process):
    """(expected, message) of every mistake; the last are of ranks that differ."""
    rank = process.rank
    attempts = _arguments() | {
        "rank 1 has blocks.0.up.weight (float32 (20, 12))": lambda: FullyShardedDataParallel(build(inner=19 + rank)),
        "rank 1 has compute_dtype": lambda: FullyShardedDataParallel(build(), compute_dtype=[BF16, FP16][rank]),
        "rank 1 has groups": lambda: FullyShardedDataParallel(net := build(), groups=[net.blocks[0].up][:rank] or None),
    }
    late = {expected: functools.partial(_changed, change) for expected, change in LATE.items()}
    return [*told(attempts), *told(OPTIMIZERS_BESIDE), *told(late)]


BF16, FP16 = torch.bfloat16, torch.float16


def test_every_mistake_is_named(two):
    by_rank = two.run(_all)
    assert by_rank[0] == by_rank[1]
    check(by_rank)
