"""Bytes of each strategy against a walk over a meta model's parameters, and against what one GPU needs."""

import dataclasses

import pytest

from trainstep.base.config import SIZES, ModelConfig, StepConfig
from trainstep.base.hardware import require_device
from trainstep.plan.machine import GIB, Cluster, machine_of
from trainstep.plan.memory import peak_bytes
from trainstep.plan.strategies import (
    Layout,
    fewest_gpus,
    fits,
    kept_groups,
    largest_batch,
    largest_group,
    shared_bytes,
    strategy_memory,
)
from trainstep.step.blocks import blocks_in_runs
from trainstep.step.model.transformer import build_transformer

MODEL = ModelConfig(vocab_size=512, d_model=256, d_ff=1024, num_layers=6, num_heads=8)
STEP = StepConfig(batch=2, context=128, precision="bf16", attention="sdpa", optimizer="adamw-fused")
CLUSTER = Cluster(machine_of(require_device("H200")), 8, 1, 4e10)


def smallest_gpus(model, step, cluster, layout):
    return fewest_gpus(lambda each: strategy_memory(model, step, each), cluster, layout)


def walked(layout, optimizer_moments=2):
    """(weights, state, all gradients) on a rank: each parameter's bytes, divided as the strategy divides it."""
    n, t = layout.data // layout.replicas, layout.tensor
    divided = {"single": 0, "ddp": 0, "sharded optimizer": 1, "zero-2": 2}.get(layout.strategy, 3)
    weights = state = gradients = 0.0
    for parameter in build_transformer(MODEL, device="meta").parameters():
        bytes_ = parameter.numel() * 4 / t
        weights += bytes_ / (n if divided == 3 else 1)
        gradients += bytes_ / (n if divided >= 2 else 1)
        state += optimizer_moments * bytes_ / (n if divided >= 1 else 1)
    return weights, state, gradients


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["ddp", "sharded optimizer", "zero-2", "fsdp", "hsdp", "fsdp + tp"])
def test_what_lasts_is_what_a_walk_over_the_parameters_finds(strategy, ranks):
    replicas = 2 if strategy == "hsdp" else 1
    layout = Layout(strategy, ranks * replicas, 2 if strategy == "fsdp + tp" else 1, replicas)
    many = dataclasses.replace(STEP, batch=1, context=8, optimizer="adamw-fused")  # activations next to nothing
    memory = strategy_memory(MODEL, many, layout)
    weights, state, gradients = walked(layout)
    assert memory.weights == pytest.approx(weights, abs=1)
    assert memory.optimizer_state == pytest.approx(state, abs=1)
    if memory.moment in ("embedding", "optimizer"):
        assert memory.gradients == pytest.approx(gradients, abs=2)
    else:
        assert memory.gradients <= gradients


def test_gradients_are_all_there_when_the_optimizer_steps():
    for strategy in ("ddp", "sharded optimizer"):
        memory = strategy_memory(MODEL, dataclasses.replace(STEP, batch=1, context=8), Layout(strategy, 4))
        assert memory.moment in ("embedding", "optimizer")
        assert memory.gradients == walked(Layout(strategy, 4))[2]


@pytest.mark.parametrize("checkpointing", ["none", "every-1"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-fused", "sgd"])
def test_one_gpu_needs_what_the_formula_for_one_says(precision, checkpointing, optimizer):
    step = dataclasses.replace(STEP, precision=precision, checkpointing=checkpointing, optimizer=optimizer)
    alone = peak_bytes(MODEL, step, on_cuda=True)
    memory = strategy_memory(MODEL, step, Layout("single"))
    assert memory.total == alone.peak
    assert memory.moment == alone.moment
    assert strategy_memory(MODEL, step, Layout("ddp", 16)) == memory


@pytest.mark.parametrize("blocks", [1, 2, 3, 100])
def test_the_largest_group_is_the_largest_that_fsdp_would_gather(blocks):
    """And the last one of blocks is kept for backward, with the head."""
    for vocabulary in (512, 50_000):
        model = dataclasses.replace(MODEL, vocab_size=vocabulary)
        module = build_transformer(model, device="meta")
        groups = [*blocks_in_runs(module, blocks), [module.embedding], [module.head]]
        counted = [sum(p.numel() for part in group for p in part.parameters()) for group in groups]
        assert largest_group(model, blocks) == max(counted)
        assert kept_groups(model, blocks) == counted[-1] + counted[-3]


def test_fsdp_computes_in_half_precision_without_casts():
    """Activations are those of a model in bfloat16; the buffers are six of the largest group."""
    fsdp = strategy_memory(MODEL, STEP, Layout("fsdp", 4))
    pure = peak_bytes(MODEL, dataclasses.replace(STEP, precision="bf16-pure"), on_cuda=True)
    assert fsdp.moment == "block 5", "the last one, which backward begins with"
    assert fsdp.activations == pure.moments["block 5"] - pure.static.at_rest - pure.gradients["block 5"]
    assert fsdp.buffers == 6 * 2 * largest_group(MODEL)
    wide = strategy_memory(MODEL, dataclasses.replace(STEP, precision="fp32"), Layout("fsdp", 4))
    assert wide.buffers == 6 * 4 * largest_group(MODEL)
    hybrid = strategy_memory(MODEL, STEP, Layout("hsdp", 8, replicas=2))
    assert hybrid.total - fsdp.total == hybrid.buffers - fsdp.buffers == 4 * largest_group(MODEL) // 4


def test_tensor_parallelism_divides_activations_of_the_groups_batch():
    step = dataclasses.replace(STEP, batch=4)
    whole = strategy_memory(MODEL, step, Layout("fsdp", 4))
    halves = strategy_memory(MODEL, dataclasses.replace(step, batch=2), Layout("fsdp + tp", 4, 2))
    assert halves.activations == pytest.approx(whole.activations / 2, abs=1)


@pytest.mark.parametrize("strategy", ["single", "sharded optimizer", "fsdp", "fsdp + tp"])
def test_the_largest_batch_fits_and_one_more_does_not(strategy):
    layout = Layout(strategy, 1 if strategy == "single" else 4, 2 if strategy == "fsdp + tp" else 1)
    model, step = SIZES["2.7B"], dataclasses.replace(STEP, context=512)
    most = largest_batch(model, step, CLUSTER, layout)
    memories = [strategy_memory(model, dataclasses.replace(step, batch=most + more), layout) for more in (0, 1)]
    assert [fits(memory, CLUSTER) for memory in memories] == [True, False]
    assert largest_batch(SIZES["10B"], step, CLUSTER, Layout("single")) == 0


@pytest.mark.parametrize(("strategy", "tensor"), [("sharded optimizer", 1), ("fsdp", 1), ("fsdp + tp", 4)])
def test_the_fewest_gpus_fit_and_fewer_do_not(strategy, tensor):
    model, step = SIZES["10B"], dataclasses.replace(STEP, context=512, batch=1)
    few = Cluster(dataclasses.replace(CLUSTER.machine, memory_bytes=110 * GIB), 8, 1, 4e10)
    gpus = smallest_gpus(model, step, few, Layout(strategy, 1, tensor))
    assert gpus is not None
    assert gpus % tensor == 0
    assert fits(strategy_memory(model, step, Layout(strategy, gpus // tensor, tensor)), few)
    if gpus > tensor:
        assert not fits(strategy_memory(model, step, Layout(strategy, gpus // tensor - 1, tensor)), few)


def test_replicas_take_as_many_gpus_each_as_one_alone():
    model, step = SIZES["10B"], dataclasses.replace(STEP, context=512, batch=1)
    few = Cluster(dataclasses.replace(CLUSTER.machine, memory_bytes=110 * GIB), 8, 1, 4e10)
    one, three = (smallest_gpus(model, step, few, Layout("hsdp", each, replicas=each)) for each in (1, 3))
    assert one == smallest_gpus(model, step, few, Layout("fsdp"))
    assert three is not None
    assert three >= 3 * one > 3, "and there are buffers between them"
    assert three % 3 == 0
    assert fits(strategy_memory(model, step, Layout("hsdp", three, replicas=3)), few)
    assert not fits(strategy_memory(model, step, Layout("hsdp", three - 3, replicas=3)), few)


def test_where_no_number_of_gpus_helps():
    tight = Cluster(dataclasses.replace(CLUSTER.machine, memory_bytes=8 * GIB), 8, 1, 4e10)
    assert smallest_gpus(SIZES["2.7B"], STEP, tight, Layout("ddp", 8)) is None
    assert smallest_gpus(SIZES["10B"], STEP, tight, Layout("sharded optimizer", 8)) is None
    assert smallest_gpus(MODEL, STEP, tight, Layout("ddp", 8)) == 1


@pytest.mark.parametrize("strategy", ["ddp", "sharded optimizer"])
def test_averages_by_copies_stage_a_bucket_and_this_ranks_means(strategy):
    plain, staged = (
        strategy_memory(MODEL, STEP, Layout(strategy, 4, by_copies=by_copies)) for by_copies in (False, True)
    )
    bucket = 25 * 10**6 + 4 * 256 * 1024  # the least, and the largest matrix
    assert staged.total - plain.total == bucket + bucket // 4
    large = [strategy_memory(SIZES["2.7B"], STEP, Layout(strategy, 4, by_copies=each)).total for each in (False, True)]
    assert large[1] - large[0] == 5 * 2**27, "no more than there is room for"
    assert strategy_memory(MODEL, STEP, Layout("ddp", 1, by_copies=True)).buffers == 0
    whole = strategy_memory(MODEL, STEP, Layout("fsdp", 4, by_copies=True))
    assert whole == strategy_memory(MODEL, STEP, Layout("fsdp", 4)), "counted as by collectives"


def test_the_fewest_gpus_stage_only_where_they_are_of_one_node():
    """With what copies stage one GPU may be enough and two are not, and more than a node's need less than a node's."""
    layout, plain = Layout("sharded optimizer", 8, by_copies=True), Layout("sharded optimizer", 1)
    large = dataclasses.replace(STEP, optimizer="sgd")  # which has no state to divide
    needed = strategy_memory(SIZES["medium"], large, plain).total + GIB
    tight = Cluster(dataclasses.replace(CLUSTER.machine, memory_bytes=needed), 8, 1, 4e10)
    assert smallest_gpus(SIZES["medium"], large, tight, layout) == 1
    nine = strategy_memory(SIZES["medium"], STEP, Layout("sharded optimizer", 9)).total + GIB
    eight = strategy_memory(SIZES["medium"], STEP, Layout("sharded optimizer", 8, by_copies=True)).total + GIB
    assert nine < eight
    tight = Cluster(dataclasses.replace(CLUSTER.machine, memory_bytes=nine), 8, 2, 4e10)
    assert smallest_gpus(SIZES["medium"], STEP, tight, layout) == 9


def test_before_backward_fsdp_has_what_it_keeps_and_what_is_staged():
    model = dataclasses.replace(MODEL, vocab_size=60_000)  # whose loss is the peak
    memory = strategy_memory(model, STEP, Layout("fsdp", 4))
    assert memory.moment == "log-softmax"
    head, block = 60_000 * 256, 4 * 256**2 + 3 * 256 * 1024 + 2 * 256
    assert memory.buffers == 2 * (block + head + head), "in bfloat16; the head is the largest group"
    assert memory.buffers < shared_bytes(model, STEP, Layout("fsdp", 4)).buffers == 2 * 6 * head
