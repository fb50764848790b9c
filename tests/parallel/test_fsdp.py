"""Fully sharded training equals training in one process, whatever the module has in it, however it is run."""

import pytest
import torch

from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of, train_alone
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed


def _train(process, options, optimizer, steps, settings):
    sharded = FullyShardedDataParallel(build(**options), **settings)
    optimizer = OPTIMIZERS[optimizer](sharded.parameters())
    for step in range(steps):
        loss_of(sharded, batch(step).chunk(process.world_size)[process.rank]).backward()
        sharded.finish_gradient_synchronization()
        for parameter in sharded.parameters():
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape
                assert parameter.grad.dtype == parameter.dtype
        optimizer.step()
        optimizer.zero_grad()
    return sharded.gather_full_parameters()


CASES = {
    "plain": ({}, "sgd", None),
    "adamw": ({}, "adamw", None),
    "tied": ({"tied": True}, "adamw", None),
    "frozen": ({"frozen": True}, "adamw", None),
    "unused": ({"unused": True}, "adamw", None),
    "bfloat16": ({}, "adamw", torch.bfloat16),
    "float16": ({"tied": True, "unused": True}, "sgd", torch.float16),
    "float64": ({"frozen": True}, "sgd", torch.float64),
}


def _train_cases(process, cases):
    return [_train(process, options, how, 4, {"compute_dtype": dtype}) for options, how, dtype in cases]


def assert_same(found, expected, case=""):
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), f"{case}: {name} differs by {(found[name] - value).abs().max():.2e}"


def test_two_ranks_train_as_one_process_bit_for_bit(two):
    by_rank = two.run(_train_cases, list(CASES.values()))
    for (name, (options, how, dtype)), found, others in zip(CASES.items(), *by_rank, strict=True):
        assert_same(found, train_alone(options, how, 4, ranks=2, dtype=dtype), name)
        assert_same(others, found, name)
