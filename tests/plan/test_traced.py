"""What a traced step holds and takes under each strategy, by hand."""

import dataclasses

import pytest

from trainstep.base.errors import UnsupportedError
from trainstep.base.hardware import require_device
from trainstep.plan.limits import data_axis_tokens, intensity
from trainstep.plan.machine import Cluster, machine_of
from trainstep.plan.roofline import FUSED_ATTENTION, product_seconds
from trainstep.plan.strategies import Layout
from trainstep.plan.traced import Moment, TracedCase, TracedOperator, TracedStep, operator_seconds

MACHINE = machine_of(require_device("H200"))
CLUSTER = Cluster(MACHINE, 8, 1, 4e10)
PARAMETERS, TOKENS = 1_000_000, 4096
PRODUCT = (1, TOKENS, 1000, 1000)


def operator(phase, name="aten::mm", count=1, flops=0.0, moved=1000.0, product=None, **more):
    return TracedOperator(phase, name, count, flops, moved, False, product, **more)


STEP = TracedStep(
    parameters=PARAMETERS,
    parameter_bytes=4 * PARAMETERS,
    trained_bytes=3 * PARAMETERS,  # a quarter is frozen
    weights=4 * PARAMETERS + 800,
    gradients=3 * PARAMETERS,
    optimizer_state=6 * PARAMETERS,
    batch=1000,
    largest_group=PARAMETERS // 2,
    largest_gradient=PARAMETERS // 4,
    groups=8,
    kept_groups=PARAMETERS,
    moments={
        "forward": (Moment(0, 900_000),),
        "backward": (Moment(0, 1_000_000), Moment(3 * PARAMETERS, 5000)),
        "optimizer": (Moment(3 * PARAMETERS, 1000 + 800_000),),
    },
    operators=(
        operator("forward", flops=2.0 * TOKENS * PARAMETERS, product=PRODUCT),
        operator("backward", flops=4.0 * TOKENS * PARAMETERS, product=PRODUCT),
        operator("optimizer", "aten::_fused_adamw_", moved=28.0 * PARAMETERS),
    ),
    flops=6 * TOKENS * PARAMETERS,
    tokens=TOKENS,
    basis="by hand",
)
CASE = TracedCase(STEP, "fp32", STEP)


def split(strategy, gpus, case=CASE):
    return case.memory(Layout(strategy, gpus))


def test_one_gpu_holds_everything():
    found = split("single", 1)
    assert (found.weights, found.gradients, found.optimizer_state) == (STEP.weights, STEP.gradients, 6 * PARAMETERS)
    assert (found.activations, found.buffers, found.moment) == (801_000, 0, "optimizer")
    assert found.total == STEP.peak
    assert STEP.moment == "optimizer"
    assert split("ddp", 4).total == found.total
    staged = CASE.memory(Layout("ddp", 4, by_copies=True))
    assert staged.total - found.total == staged.buffers == STEP.gradients + STEP.gradients // 4, "one bucket's"
    large = TracedCase(dataclasses.replace(STEP, gradients=10**8), "fp32", STEP)
    bucket = 25 * 10**6 + STEP.largest_gradient
    assert large.memory(Layout("ddp", 4, by_copies=True)).buffers == bucket + bucket // 4


def test_what_is_sharded_is_divided():
    state = split("sharded optimizer", 4)
    assert (state.weights, state.gradients, state.optimizer_state) == (STEP.weights, STEP.gradients, 1_500_000)
    assert (state.moment, state.activations) == ("optimizer", 1000 + 200_000)
    gradients = split("zero-2", 4)
    assert gradients.moment == "backward"
    assert gradients.buffers == STEP.largest_group
    whole = split("fsdp", 4)
    assert whole.weights == STEP.weights // 4, "frozen ones too"
    assert whole.buffers == 6 * STEP.largest_group
    assert whole.optimizer_state == 1_500_000
    assert split("fsdp", 1).buffers == 0


def test_under_autocast_fsdp_holds_what_the_narrow_step_holds():
    narrow = dataclasses.replace(
        STEP,
        weights=STEP.weights // 2,
        gradients=STEP.gradients // 2,
        moments={"backward": (Moment(STEP.gradients // 2, 400_000),), "optimizer": (Moment(0, 1000),)},
    )
    found = split("fsdp", 4, TracedCase(STEP, "bf16", narrow))
    assert (found.gradients, found.activations) == (STEP.gradients // 4, 400_000)
    assert found.buffers == 6 * STEP.largest_group // 2


def test_what_is_sent():
    n = 4
    trained, gradients = STEP.trained_bytes, STEP.gradients
    assert CASE.rank_bytes(Layout("ddp", n)).sent == 2 * (n - 1) * gradients // n
    assert CASE.rank_bytes(Layout("sharded optimizer", n)).sent == (n - 1) * (gradients + trained) // n
    gathered = 2 * STEP.parameter_bytes - STEP.kept_groups  # the last groups stay from forward to backward
    assert CASE.rank_bytes(Layout("fsdp", n)).sent == (n - 1) * (gradients + gathered) // n
    half = TracedCase(STEP, "bf16", STEP).rank_bytes(Layout("fsdp", n))
    assert half.sent == (n - 1) * (gradients + gathered) // 2 // n, "frozen weights are gathered"


def test_replicas_are_divided_and_send_as_one_and_their_parts_of_gradients():
    layout = Layout("hsdp", 8, replicas=2)
    found, one = (CASE.rank_bytes(each) for each in (layout, Layout("fsdp", 4)))
    assert (found.weights, found.gradients, found.optimizer_state) == (one.weights, one.gradients, one.optimizer_state)
    assert found.sent == one.sent + STEP.gradients // 4, "2 (r - 1) / r is 1"
    assert found.buffers == one.buffers + STEP.largest_group // 4
    assert CASE.memory(layout).total == CASE.memory(Layout("fsdp", 4)).total + STEP.largest_group // 4
    plan, alone = CASE.plan(CLUSTER, layout), CASE.plan(CLUSTER, Layout("single"))
    assert plan.compute.optimizer.total == pytest.approx(alone.compute.optimizer.total / 4)


def test_seconds_of_operators():
    _batch, m, n, k = PRODUCT
    by_tiles = product_seconds(m, n, k, MACHINE.matmul_flops["fp32"], MACHINE.multiprocessors, fp32=True)
    assert operator_seconds(STEP.operators[0], MACHINE, "fp32") == by_tiles
    moved = operator("forward", "aten::add", moved=MACHINE.copy_bytes_per_s)
    assert operator_seconds(moved, MACHINE, "bf16") == pytest.approx(1.0)
    assert operator_seconds(dataclasses.replace(moved, flops=1.0), MACHINE, "bf16") == pytest.approx(1.0)
    rate = MACHINE.matmul_flops["bf16"]
    fused = TracedOperator("forward", "aten::_scaled_dot_product_flash_attention", 1, rate, 1.0, True)
    assert operator_seconds(fused, MACHINE, "bf16") == pytest.approx(1 / FUSED_ATTENTION)
    assert operator_seconds(dataclasses.replace(fused, name="aten::convolution"), MACHINE, "bf16") == pytest.approx(1.0)
    wide = dataclasses.replace(fused, name="aten::convolution", is_half=False)
    assert operator_seconds(wide, MACHINE, "bf16") == pytest.approx(rate / MACHINE.matmul_flops["fp32"])


def test_plans():
    single, ddp, fsdp = (CASE.plan(CLUSTER, Layout(name, n)) for name, n in (("single", 1), ("ddp", 8), ("fsdp", 8)))
    assert single.step_s == pytest.approx(single.compute.total)
    assert single.communication_s == 0
    assert single.compute.optimizer.traffic == pytest.approx(28 * PARAMETERS / MACHINE.copy_bytes_per_s)
    assert fsdp.compute.optimizer.total == pytest.approx(single.compute.optimizer.total / 8)
    assert ddp.tokens == 8 * TOKENS
    assert ddp.flops == 8 * STEP.flops
    assert ddp.compute.total == pytest.approx(single.compute.total)
    assert ddp.exposed_s > 0
    untold = TracedCase(dataclasses.replace(STEP, tokens=None, flops=None), "fp32", STEP)
    plan = untold.plan(CLUSTER, Layout("ddp", 8))
    assert plan.tokens_per_s is None
    assert plan.utilisation(1e12) is None
    assert plan.step_s == ddp.step_s
    with pytest.raises(UnsupportedError, match="tensor parallelism"):
        CASE.plan(CLUSTER, Layout("fsdp + tp", 4, 2))


def test_the_limits_are_those_of_matrices():
    all_trained = dataclasses.replace(STEP, gradients=4 * PARAMETERS)
    data, fsdp = TracedCase(all_trained, "fp32", all_trained).least_tokens(MACHINE, 3e11)
    assert data == fsdp == pytest.approx(data_axis_tokens(intensity(MACHINE.matmul_flops["fp32"], 3e11, 4)))
