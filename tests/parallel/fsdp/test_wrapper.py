"""Fully sharded training equals training in one process, whatever the module has in it, however it is run."""

import contextlib
import functools
import random

import pytest
import torch
from torch import nn

from tests.parallel.fsdp.training import (
    CASES,
    assert_same,
    descend,
    error,
    in_turn,
    poisoned,
    sharded_net,
    take_steps,
    train,
    train_cases,
)
from tests.parallel.nets import OPTIMIZERS, batch, build, loss_of, train_alone
from tests.parallel.training import delay
from tests.workers import Workers
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed


def test_two_ranks_train_as_one_process_bit_for_bit(two):
    by_rank = two.run(train_cases, list(CASES.values()))
    for (name, (options, how, dtype)), found, others in zip(CASES.items(), *by_rank, strict=True):
        assert_same(found, train_alone(options, how, 4, ranks=2, dtype=dtype), name)
        assert_same(others, found, name)


def test_four_ranks_train_as_one_process_bit_for_bit(four):
    """In a narrower dtype, where the order in which ranks are added up is ours."""
    for name, found in zip(
        ["bfloat16", "float16"], four.run(train_cases, [CASES["bfloat16"], CASES["float16"]])[3], strict=True
    ):
        options, how, dtype = CASES[name]
        assert_same(found, train_alone(options, how, 4, ranks=4, dtype=dtype), name)


def _scores():
    """A head of one row, which one rank has, in a group of its own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1, bias=False))


def _train_scores(process, transport, rows):
    sharded = FullyShardedDataParallel(module := _scores(), groups=list(module), transport=transport)
    return descend(sharded, (sharded(each.chunk(2)[process.rank]).square().mean() for each in rows))


@pytest.mark.parametrize("transport", ["collectives", "peer-copies"])
def test_a_rank_may_have_no_row_of_a_group(two, transport):
    rows = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    module = _scores()
    descend(module, (module(each).square().mean() for each in rows))
    for found in two.run(_train_scores, transport, rows):
        for name, value in module.named_parameters():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name


def test_one_rank_trains_as_plain_pytorch():
    with Workers(1) as one:
        (found, narrow) = one.run(train_cases, [CASES["unused"], CASES["bfloat16"]])[0]
    assert_same(found, train_alone({"unused": True}, "adamw", 4, ranks=1))
    assert_same(narrow, train_alone({}, "adamw", 4, ranks=1, dtype=torch.bfloat16))


def _accumulate(process, dtype, without_sync, last_outside, **settings):
    """Three rounds a step: the first two, or all, without synchronisation; or every one synchronised."""
    sharded = sharded_net({"unused": True}, dtype, **settings)
    optimizer = OPTIMIZERS["sgd"](sharded.parameters())
    for step in range(2):
        for round_ in range(3):
            apart = without_sync and (round_ < 2 or not last_outside)
            with sharded.no_sync() if apart else contextlib.nullcontext():
                loss_of(sharded, batch(step * 3 + round_).chunk(process.world_size)[process.rank]).backward()
        sharded.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return sharded.gather_full_parameters()


def _accumulate_all(process, dtypes, settings, more):
    return [_accumulate(process, dtype, *setting, **each) for dtype in dtypes for setting in settings for each in more]


def test_gradients_accumulate_with_and_without_synchronisation(two, four):
    def full(gradients):
        return in_turn([in_turn(rounds) for rounds in gradients]) / len(gradients)

    def sharded(gradients):
        if gradients[0][0].dim() < 2:
            return full(gradients)  # replicated parameters are averaged once, in the end
        return in_turn([in_turn(list(ranks)) / 2 for ranks in zip(*gradients, strict=True)])

    settings = {(True, True): full, (True, False): full, (False, False): sharded}
    dtypes = [None, torch.bfloat16]
    found = iter(two.run(_accumulate_all, dtypes, list(settings), [{}])[1])
    for dtype in dtypes:
        for setting, combine in settings.items():
            expected = train_alone({"unused": True}, "sgd", 2, ranks=2, dtype=dtype, rounds=3, combine=combine)
            assert_same(next(found), expected, f"{dtype} {setting}")
    expected = train_alone({"unused": True}, "sgd", 2, ranks=4, rounds=3, combine=full)
    hybrid = [{"shape": (2, 2), "transport": each} for each in ("auto", "peer-copies")]
    for found in four.run(_accumulate_all, [None], [(True, True), (False, False)], hybrid)[3]:
        assert error(found, expected) < 1e-6


def _compile_blocks(module):
    for block in module.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


PREPARED = {  # before sharding, and after it
    "every-1": (None, functools.partial(Checkpointing, policy="every-1")),
    "selective": (None, functools.partial(Checkpointing, policy="selective")),
    "every-1 before": (functools.partial(Checkpointing, policy="every-1"), None),
    "selective before": (functools.partial(Checkpointing, policy="selective"), None),
    "compiled": (None, _compile_blocks),
    "compiled before": (_compile_blocks, None),
    "compiled, every-1": (lambda module: (Checkpointing(module, "every-1"), _compile_blocks(module)), None),
    "compiled as a whole": (None, functools.partial(nn.Module.compile, backend="aot_eager")),
}


def _train_prepared(process, name):
    before, after = PREPARED[name]
    module = build()
    held = before and before(module)
    sharded = FullyShardedDataParallel(module)
    held = held, after and after(module)
    return take_steps(process, sharded, OPTIMIZERS["adamw"](sharded.parameters()), range(3))


@pytest.mark.thorough
@pytest.mark.parametrize("name", PREPARED)
def test_checkpointing_and_compiled_blocks_change_nothing(two, name):
    assert_same(two.run(_train_prepared, name)[0], train_alone({}, "adamw", 3, ranks=2))


def _autocast_gradients(process, tokens):
    """Gradients under autocast, weights cast by it or by us; and those of plain PyTorch, on the same halves."""
    found = {}
    for dtype in (None, torch.bfloat16):
        sharded = FullyShardedDataParallel(build(), compute_dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(sharded, tokens.chunk(2)[process.rank])
        loss.backward()
        sharded.finish_gradient_synchronization()
        gradients = {p.name: p.shard.grad for p in sharded.sharded_parameters()}
        with torch.no_grad():
            for parameter in sharded.sharded_parameters():
                parameter.shard.copy_(gradients[parameter.name])
        found[dtype] = sharded.gather_full_parameters()
    return found


def test_under_autocast(two):
    tokens = batch(0)

    def gradients(dtype, precision):
        module = build().to(precision)
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            loss = loss_of(module, tokens)
        loss.backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    oracle = gradients(None, torch.float64)
    budget = 2 * error(gradients(torch.bfloat16, torch.float32), oracle) + torch.finfo(torch.bfloat16).eps
    for dtype, found in two.run(_autocast_gradients, tokens)[0].items():
        assert 1e-4 < error(found, oracle) <= budget, dtype


def _train_late(process, repeats, dtype, **settings):
    results = []
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        with poisoned(process.device):
            for seed in range(repeats):
                late = functools.partial(delay, dice=random.Random(10 * seed + process.rank))
                results.append(train(process, {"tied": True}, "adamw", 3, dtype, late, **settings))
    finally:
        torch.use_deterministic_algorithms(False)
    return results


def _train_late_hybrid(process, dtype, transport):
    return _train_late(process, 2, dtype, shape=(2, 2), transport=transport)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_delays_change_nothing(two, four, dtype):
    expected = train_alone({"tied": True}, "adamw", 3, ranks=2, dtype=dtype)
    for found in two.run(_train_late, 5, dtype)[0]:
        assert_same(found, expected)
    first, *others = four.run(_train_late, 5, dtype)[0]
    assert all(value.isfinite().all() for value in first.values())
    for found in others:
        assert_same(found, first)
    expected = train_alone({"tied": True}, "adamw", 3, ranks=4, dtype=dtype)
    for transport in ["auto", "peer-copies"] if dtype else ["auto"]:
        (first, _), *_ = by_rank = four.run(_train_late_hybrid, dtype, transport)
        assert error(first, expected) < 1e-4
        for _, second in by_rank:
            assert_same(second, first)


def _with_a_graph(process):
    """Parameters after a step whose gradients have a graph of their own in backward, and whether the shards' have."""
    sharded = FullyShardedDataParallel(build())
    loss_of(sharded, batch(0).chunk(2)[process.rank]).backward(create_graph=True)
    sharded.finish_gradient_synchronization()
    graphs = [each.grad.requires_grad for each in sharded.parameters()]
    OPTIMIZERS["sgd"](sharded.parameters()).step()
    return sharded.gather_full_parameters(), any(graphs)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_with_a_graph_arrive_without_it(two):
    for found, have_graphs in two.run(_with_a_graph):
        assert_same(found, train_alone({}, "sgd", 1, ranks=2))
        assert not have_graphs
