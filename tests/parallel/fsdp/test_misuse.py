"""What users get wrong around FullyShardedDataParallel: an error on every rank that says what to do, and no hang."""

import copy

import pytest
import torch
from torch import nn

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


def _added_parameter():
    sharded = FullyShardedDataParallel(build())
    sharded.module.blocks[1].up.extra = nn.Parameter(torch.ones(2, 2))
    loss_of(sharded, batch(0))


def _added_module():
    sharded = FullyShardedDataParallel(build())
    sharded.module.blocks.append(nn.Linear(12, 12))
    loss_of(sharded, batch(0))


def _replaced_parameter():
    sharded = FullyShardedDataParallel(build())
    sharded.module.head.weight = nn.Parameter(torch.ones(23, 12))
    loss_of(sharded, batch(0))


def _frozen_later():
    sharded = FullyShardedDataParallel(build())
    sharded.module.head.weight.requires_grad_(False)
    loss_of(sharded, batch(0))


def _message(attempt):
    try:
        attempt()
    except UsageError as error:
        return str(error)
    return "no error"


LATE = {
    "as it was before sharding; build the optimizer after": _optimizer_before,
    "no error": _optimizer_of_another_module,
    "parameter blocks.1.up.extra was added after": _added_parameter,
    "parameter blocks.5.weight was added after": _added_module,
    "head.weight was replaced or removed after": _replaced_parameter,
    "requires_grad of head.weight was True when it was sharded and is False now": _frozen_later,
}


def _all(process):
    attempts = _arguments() | LATE
    return [(expected, _message(attempt)) for expected, attempt in attempts.items()]


def test_every_mistake_is_named(two):
    by_rank = two.run(_all)
    assert by_rank[0] == by_rank[1]
    for expected, message in by_rank[0]:
        assert expected in message


def _disagree(process, how):
    rank = process.rank
    return _message(
        {
            "width": lambda: FullyShardedDataParallel(build(inner=19 + rank)),
            "dtype": lambda: FullyShardedDataParallel(build(), compute_dtype=torch.bfloat16 if rank else torch.float16),
            "groups": lambda: FullyShardedDataParallel(
                module := build(), groups=[module.blocks[0].up] if rank else None
            ),
        }[how]
    )


@pytest.mark.parametrize(
    ("how", "expected"),
    [("width", "blocks.0.up.weight (float32 (20, 12))"), ("dtype", "compute_dtype"), ("groups", "groups")],
)
def test_ranks_that_differ(two, how, expected):
    messages = two.run(_disagree, how)
    assert messages[0] == messages[1]
    assert "FullyShardedDataParallel: the ranks disagree: rank 1" in messages[0]
    assert expected in messages[0]
