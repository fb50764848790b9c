"""Traffic against simulated rings, seconds against running through the calls, meshes and their limits."""

import dataclasses
import math

import pytest

from tests.plan.test_communication import run_through, simulate
from trainstep.base.config import SIZES, ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.hardware import require_device
from trainstep.plan.communication import LEAST_BUCKET_BYTES, Link
from trainstep.plan.flops import step_flops
from trainstep.plan.machine import LINK_HOP_S, NETWORK_HOP_S, NETWORK_OVERHEAD_S, Cluster, machine_of
from trainstep.plan.parallelism import gpu_counts, scaled, strategy_plan
from trainstep.plan.strategies import Layout, mesh_of, tensor_parallel_choices

MODEL = SIZES["2.7B"]
STEP = StepConfig(batch=4, context=512, precision="bf16", attention="sdpa", optimizer="adamw-fused")
H200 = machine_of(require_device("H200"))
BLOCK = 4 * MODEL.d_model**2 + 3 * MODEL.d_model * MODEL.d_ff + 2 * MODEL.d_model
HEAD = MODEL.vocab_size * MODEL.d_model
AGAIN = 1 - (BLOCK + HEAD) / MODEL.num_parameters
"""The part of the parameters that FSDP gathers again for backward: all but the last block and the head."""


def cluster(gpus_per_node=8, nodes=1, network=4e10, **machine):
    return Cluster(dataclasses.replace(H200, **machine), gpus_per_node, nodes, network)


def ring_bytes(collective, payload, ranks):
    """Sent by one rank on average, counted by moving chunks."""
    return simulate(collective, 8 * ranks, ranks).sent.total() / (8 * ranks) / ranks * payload


@pytest.mark.parametrize("n", [2, 8])
def test_bytes_sent_are_those_of_the_rings(n):
    parameters = MODEL.num_parameters
    expected = {
        "ddp": ring_bytes("all-reduce", 4 * parameters, n),
        "sharded optimizer": ring_bytes("reduce-scatter", 4 * parameters, n)
        + ring_bytes("all-gather", 4 * parameters, n),
        "fsdp": (1 + AGAIN) * ring_bytes("all-gather", 2 * parameters, n)
        + ring_bytes("reduce-scatter", 2 * parameters, n),
    }
    expected["zero-2"] = expected["sharded optimizer"]
    for strategy, sent in expected.items():
        plan = strategy_plan(MODEL, STEP, cluster(n), Layout(strategy, n))
        assert plan.sent == pytest.approx(sent, rel=1e-6), strategy


@pytest.mark.parametrize(("nodes", "replicas"), [(2, 2), (1, 4), (1, 8)])
def test_replicas_send_what_their_ranks_do_and_parts_of_gradients(nodes, replicas):
    plan = strategy_plan(MODEL, STEP, cluster(8, nodes), Layout("hsdp", 8 * nodes, replicas=replicas))
    ranks = 8 * nodes // replicas
    inside = strategy_plan(MODEL, STEP, cluster(ranks), Layout("fsdp", ranks))
    between = ring_bytes("all-reduce", 4 * MODEL.num_parameters / ranks, replicas)
    assert plan.sent == pytest.approx(inside.sent + between, rel=1e-6)
    assert plan.compute.optimizer.total == inside.compute.optimizer.total


def test_what_goes_between_nodes_hides_beside_what_goes_within_them():
    """On one node it shares their links; between nodes the slower of the two decides, and the last group's follow."""
    quick, wide = {"link": Link(1e-9, 1e15), "interference": 0.0}, dataclasses.replace(STEP, precision="fp32")
    alone = strategy_plan(MODEL, wide, cluster(8, **quick), Layout("fsdp", 8))
    for network in (1e8, 1e9, 1e10, 1e13):
        plan = strategy_plan(MODEL, wide, cluster(8, 2, network, **quick), Layout("hsdp", 16, replicas=2))
        transfer = 4 * MODEL.num_parameters / 8 / network  # 2 (r - 1) / r is 1
        overhead = NETWORK_OVERHEAD_S + 2 * NETWORK_HOP_S
        expected = run_through(transfer, overhead, plan.compute.backward.total, MODEL.num_layers + 2)
        hops = 20 * LINK_HOP_S  # of the calls within, which are in one of the two alone
        assert plan.exposed_s == pytest.approx(expected + alone.exposed_s, rel=1e-3, abs=hops), network
    flat = strategy_plan(MODEL, STEP, cluster(8, 2, 1e10), Layout("fsdp", 16))
    hybrid = strategy_plan(MODEL, STEP, cluster(8, 2, 1e10), Layout("hsdp", 16, replicas=2))
    assert hybrid.exposed_s < flat.exposed_s, "a slow network carries an eighth of the gradients, and no weights"
    one, two = (
        strategy_plan(
            MODEL, STEP, cluster(8, interference=0.0, link=Link(1e-9, 1e10)), Layout("hsdp", 8, replicas=each)
        )
        for each in (1, 2)
    )
    links = one.communication_s - two.communication_s
    assert one.exposed_s - two.exposed_s == pytest.approx(links, rel=1e-3), "all of it is exposed there"


def test_gradients_in_half_precision_are_exchanged_between_nodes_one_by_one():
    """By its own connection each GPU sends every other node's GPUs their rows; in float32 rings add up on the way."""
    parameters, network = MODEL.num_parameters, 1e9
    quick = {"link": Link(1e-9, 1e15), "interference": 0.0}
    narrow, wide = (
        strategy_plan(
            MODEL, dataclasses.replace(STEP, precision=each), cluster(8, 2, network, **quick), Layout("fsdp", 16)
        )
        for each in ("bf16", "fp32")
    )
    gathered = 2 * 15 / 16 * parameters / (8 * network)
    exchanged = 2 * parameters * 8 / 16 / network
    assert narrow.communication_s == pytest.approx((1 + AGAIN) * gathered + exchanged, rel=0.01)
    assert wide.communication_s == pytest.approx((2 + AGAIN) * 2 * gathered, rel=0.01)


def test_tensor_parallelism_sends_activations():
    """Ten collectives a block and four around embedding and head, of the group's tokens in bfloat16."""
    plan = strategy_plan(MODEL, STEP, cluster(), Layout("fsdp + tp", 1, 8))
    payload = 2 * (8 * STEP.batch * STEP.context) * MODEL.d_model
    calls = 10 * MODEL.num_layers + 4
    assert plan.sent == pytest.approx(calls * ring_bytes("all-gather", payload, 8))
    link = H200.link
    each = link.overhead_s + 6 * LINK_HOP_S + 7 / 8 * payload / link.bus_bytes_per_s
    assert plan.exposed_s == plan.communication_s == pytest.approx(calls * each)
    again = strategy_plan(MODEL, dataclasses.replace(STEP, checkpointing="every-1"), cluster(), plan.layout)
    assert again.sent == pytest.approx(plan.sent * (14 * MODEL.num_layers + 4) / calls)


def test_ddp_exposes_what_running_through_its_buckets_leaves():
    plan = strategy_plan(MODEL, STEP, cluster(2, link=Link(30e-6, 2e11), interference=0.0), Layout("ddp", 2))
    transfer = 4 * MODEL.num_parameters / 2e11
    most = math.ceil(4 * MODEL.num_parameters / LEAST_BUCKET_BYTES)
    tried = {k: run_through(transfer, 30e-6, plan.compute.backward.total, k) for k in range(1, most + 1)}
    assert plan.exposed_s == pytest.approx(min(tried.values()), rel=0.01)
    assert plan.step_s == plan.compute.total + plan.exposed_s


def test_of_little_more_than_a_bucket_little_is_left():
    """What is a fifth more than a bucket goes in two calls, of which the first begins when it is full."""
    model = ModelConfig(vocab_size=64, d_model=256, d_ff=1024, num_layers=7, num_heads=4)
    payload = 4 * model.num_parameters
    assert 1.1 < payload / LEAST_BUCKET_BYTES < 1.3
    plan = strategy_plan(model, STEP, cluster(2, link=Link(1e-6, 1e9), interference=0.0), Layout("ddp", 2))
    backward, full = plan.compute.backward.total, LEAST_BUCKET_BYTES / payload
    shares = [full, 1 - full]
    assert plan.exposed_s == pytest.approx(run_through(payload / 1e9, 1e-6, backward, shares))
    assert plan.exposed_s > 1.01 * run_through(payload / 1e9, 1e-6, backward, 2), "alike, more would hide"


def test_fsdp_hides_behind_forward_and_backward():
    free = strategy_plan(MODEL, STEP, cluster(8, link=Link(1e-9, 1e15), interference=0.0), Layout("fsdp", 8))
    assert free.exposed_s < 1e-3 * free.step_s, "hops within the node alone"
    slow = strategy_plan(MODEL, STEP, cluster(8, link=Link(1e-9, 1e10), interference=0.0), Layout("fsdp", 8))
    transfers = (2 + AGAIN) * 7 / 8 * 2 * MODEL.num_parameters / 1e10
    assert slow.communication_s == pytest.approx(transfers, rel=1e-3)
    hidden = slow.compute.forward.total + slow.compute.backward.total
    assert slow.exposed_s == pytest.approx(transfers - hidden, rel=0.05)
    assert slow.limit == "communication"
    assert free.limit == "matrix products"


def test_hidden_communication_slows_what_hides_it():
    for strategy in ("ddp", "sharded optimizer", "fsdp"):
        free, half = (
            strategy_plan(MODEL, STEP, cluster(2, interference=each), Layout(strategy, 2)) for each in (0, 0.5)
        )
        assert half.exposed_s == pytest.approx(free.exposed_s + (free.communication_s - free.exposed_s) / 2)
        assert half.communication_s == free.communication_s > half.exposed_s


def test_equal_work_and_utilisation():
    for layout in (Layout("single"), Layout("ddp", 8), Layout("fsdp + tp", 2, 4)):
        plan = strategy_plan(MODEL, STEP, cluster(), layout)
        assert plan.tokens == layout.gpus * STEP.batch * STEP.context
        assert plan.flops == layout.gpus * step_flops(MODEL, STEP.batch, STEP.context, "step")
        rate = plan.flops / plan.step_s / layout.gpus
        assert plan.utilisation(989.4e12) == pytest.approx(rate / 989.4e12)
        assert 0 < plan.utilisation(989.4e12) < 1


def test_one_rank_exchanges_nothing():
    for strategy in ("single", "ddp", "sharded optimizer", "zero-2", "fsdp", "hsdp"):
        plan = strategy_plan(MODEL, STEP, cluster(1), Layout(strategy))
        assert plan.sent == plan.communication_s == plan.exposed_s == plan.memory.buffers == 0


def test_links_of_groups():
    """Eight GPUs of a node send through eight network connections; two of them through two."""
    one, many = cluster(8, 1), cluster(8, 4)
    assert one.group_link("all-gather", 8).bus_bytes_per_s == H200.link.bus_bytes_per_s
    assert many.group_link("all-gather", 32).bus_bytes_per_s == min(H200.link.bus_bytes_per_s, 8 * 4e10)
    assert many.group_link("all-gather", 8, stride=4).bus_bytes_per_s == 2 * 4e10
    assert many.group_link("all-gather", 4, stride=8).bus_bytes_per_s == 4e10
    own = cluster(8, by_collective={"all-gather": Link(1e-3, 5e9)})
    assert own.group_link("all-gather", 2) == Link(1e-3, 5e9)
    assert own.group_link("all-reduce", 2) == cluster(8).group_link("all-reduce", 2)
    overhead = many.group_link("all-gather", 32).overhead_s
    assert overhead == pytest.approx(NETWORK_OVERHEAD_S + 27 * LINK_HOP_S + 3 * NETWORK_HOP_S)
    tree = many.group_link("all-reduce", 32).overhead_s
    assert tree == pytest.approx(NETWORK_OVERHEAD_S + 2 * (6 * LINK_HOP_S + 2 * NETWORK_HOP_S))


def test_more_nodes_never_help_a_gpu():
    for strategy in ("ddp", "sharded optimizer", "zero-2", "fsdp"):
        plans = [strategy_plan(MODEL, STEP, scaled(cluster(), n), Layout(strategy, n)) for n in gpu_counts() if n >= 8]
        exposed = [plan.exposed_s for plan in plans]
        assert exposed == sorted(exposed), strategy
        assert exposed[-1] > exposed[0]


def test_meshes():
    assert mesh_of(16, 4, MODEL) == Layout("fsdp + tp", 4, 4)
    assert tensor_parallel_choices(cluster(8), MODEL) == [2, 4, 8]
    assert tensor_parallel_choices(cluster(8), SIZES["2025/xl"]) == [], "25 heads"
    for tensor, words in ((3, "3 is impossible: it does not divide 16 GPUs; choose among 1, 2, 4, 8, 16"), (0, "0")):
        with pytest.raises(UsageError, match=words):
            mesh_of(16, tensor, MODEL)
    with pytest.raises(UsageError, match="25 heads; choose among 1"):
        mesh_of(16, 2, SIZES["2025/xl"])


@pytest.mark.parametrize("settings", [{"gpus_per_node": 0}, {"nodes": -1}, {"network": 0.0}, {"network": math.inf}])
def test_impossible_clusters(settings):
    with pytest.raises(UsageError, match="expected a positive number"):
        cluster(**settings)


def test_the_host_sets_the_pace_where_it_is_slower():
    alone = strategy_plan(MODEL, STEP, cluster(4), Layout("fsdp", 4))
    slow, fast = (
        strategy_plan(MODEL, STEP, cluster(4, scheme_launch_s={("fsdp", "off", "bf16", 1): seconds}), Layout("fsdp", 4))
        for seconds in (2 * alone.step_s / MODEL.num_layers, alone.step_s / MODEL.num_layers / 2)
    )
    assert (slow.step_s, slow.limit) == (pytest.approx(2 * alone.step_s), "launches")
    assert (fast.step_s, fast.limit) == (alone.step_s, alone.limit) != (alone.step_s, "launches")
    keys = (("fsdp", "blocks", "bf16", 1), ("fsdp", "off", "fp32", 1), ("fsdp", "off", "bf16", 2))
    others = cluster(4, scheme_launch_s=dict.fromkeys(keys, 1.0))
    assert strategy_plan(MODEL, STEP, others, Layout("fsdp", 4)).step_s == alone.step_s


def test_a_strategy_that_was_not_measured_launches_what_it_does_more_than():
    measured = {"single": 1.0, "sharded optimizer": 2.0, "fsdp": 3.0}
    machine = dataclasses.replace(H200, scheme_launch_s={(key, "off", "bf16", 1): s for key, s in measured.items()})
    expected = {"zero-2": 2.0, "fsdp + tp": 3.0, "hsdp": 1.0, "ddp": 1.0, **measured}
    found = {each: machine.scheme_launch_seconds(each, "off", "bf16", 10) / 10 for each in expected}
    assert found == expected
    assert machine.scheme_launch_seconds("fsdp", "model", "bf16", 10) == 0
    assert machine.scheme_launch_seconds("fsdp", "off", "bf16", 10, 2) == 10, "of two blocks a group only the model's"
