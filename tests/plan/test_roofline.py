"""FLOPs against torch's own counter on a meta model, bytes against every operator's inputs and outputs."""

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from trainstep.base.config import SIZES, ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.base.hardware import DEVICES, require_device
from trainstep.plan.machine import machine_of
from trainstep.plan.roofline import OPTIMIZER_BYTES, product_seconds, step_seconds
from trainstep.step.model import transformer

EVEN = ModelConfig(vocab_size=512, d_model=512, d_ff=1024, num_layers=2, num_heads=2, max_context=256)
"""Whole tiles everywhere: with one multiprocessor, no round is partly idle."""
STEP = StepConfig(batch=2, context=256, precision="bf16", attention="eager")
H200 = machine_of(require_device("H200"))
ONE_FLOP = dataclasses.replace(
    H200, multiprocessors=1, matmul_flops=dict.fromkeys(H200.matmul_flops, 1.0), copy_bytes_per_s=math.inf
)
ONE_BYTE = dataclasses.replace(
    H200, matmul_flops=dict.fromkeys(H200.matmul_flops, math.inf), copy_bytes_per_s=1.0, multiprocessors=1
)


def counted(model, step):
    module = transformer.build_transformer(model, device="meta")
    tokens = torch.zeros(step.batch, step.context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as forward:
        logits = module(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_products_are_those_that_torch_counts(precision):
    step = dataclasses.replace(STEP, precision=precision)
    found = step_seconds(EVEN, step, ONE_FLOP)
    assert (found.forward.products, found.backward.products) == pytest.approx(counted(EVEN, step))
    again = step_seconds(EVEN, dataclasses.replace(step, checkpointing="every-1"), ONE_FLOP)
    head = 2 * step.batch * step.context * EVEN.d_model * EVEN.vocab_size
    assert again.backward.products - found.backward.products == pytest.approx(found.forward.products - head)


def test_tensor_parallelism_divides_the_products():
    whole = step_seconds(EVEN, STEP, ONE_FLOP)
    half = step_seconds(EVEN, STEP, ONE_FLOP, tensor_parallel=2)
    assert half.forward.products == pytest.approx(whole.forward.products / 2)
    assert half.backward.products == pytest.approx(whole.backward.products / 2)


class Traffic(TorchDispatchMode):
    """Bytes of the inputs and outputs of every operator that moves data, matrix products with weights left out."""

    LEFT_OUT = frozenset(
        [
            "mm",
            "view",
            "transpose",
            "unsqueeze",
            "slice",
            "split",
            "_unsafe_view",
            "expand",
            "permute",
            "select",
            "t",
            "alias",
            "detach",
            "unbind",
        ]
    )

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] not in self.LEFT_OUT:
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
        return out


@pytest.mark.parametrize(("attention", "precision"), [("eager", "fp32"), ("sdpa", "fp32"), ("sdpa", "bf16")])
def test_traffic_is_that_of_the_operators(attention, precision, monkeypatch):
    """Of one block without its norms, which are fused on a GPU and not on a CPU."""
    monkeypatch.setattr(transformer.RMSNorm, "forward", lambda self, x: x)
    step = dataclasses.replace(STEP, batch=8, context=64, precision=precision, attention=attention)
    found, predicted = [], []
    for layers in (1, 2):
        model = dataclasses.replace(EVEN, d_model=64, d_ff=160, num_layers=layers, num_heads=4)
        module = transformer.build_transformer(model, impl=attention)
        tokens = torch.zeros(step.batch, step.context, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), Traffic() as traffic:
            module(tokens)
        found.append(traffic.bytes)
        norms = 16 * step.batch * step.context * model.d_model * layers
        predicted.append(step_seconds(model, step, ONE_BYTE).forward.traffic - norms)
    small = 0.03  # masks and rotary tables, which are the larger the smaller the batch
    assert predicted[1] - predicted[0] == pytest.approx(found[1] - found[0], rel=small)


def test_a_last_round_takes_as_long_as_a_full_one():
    """2048 × 1280 in tiles of 128 × 128: 160 on 132 multiprocessors take two rounds, of which one is 28 tiles."""
    rate = 1e12

    def took(n):
        return product_seconds(2048, n, 1000, rate, 132, fp32=True)

    full = 2 * 132 * 128 * 128 * 2 * 1000 / rate
    assert took(1280) <= full
    assert took(1280) / took(1024) > 1.3 > 1280 / 1024
    assert product_seconds(1280, 1280, 64, rate, 1, fp32=True) == pytest.approx(2 * 1280**2 * 64 / rate)
    assert product_seconds(64, 64, 64, rate, 132, fp32=True, batch=132) == pytest.approx(2 * 132 * 64**3 / rate / 0.8)


def test_the_optimizer_and_the_launches():
    machine = dataclasses.replace(H200, launch_s={("off", "eager"): (1.0, 2.0)})
    found = step_seconds(SIZES["small"], STEP, machine)
    assert found.forward.total == 12.0
    assert found.backward.total == 24.0
    assert found.limit == "launches"
    again = step_seconds(SIZES["small"], dataclasses.replace(STEP, checkpointing="every-1"), machine)
    assert again.backward.total == 36.0
    moved = OPTIMIZER_BYTES["adamw-foreach"] * SIZES["small"].num_parameters
    rate = machine.copy_bytes_per_s * machine.optimizer_fraction["adamw-foreach"]
    assert found.optimizer.total == pytest.approx(moved / rate)
    third = step_seconds(SIZES["small"], STEP, machine, optimizer_share=1 / 3)
    assert third.optimizer.total == pytest.approx(moved / rate / 3)


def test_launches_that_were_not_measured_are_those_of_the_same_compilation():
    machine = dataclasses.replace(H200, launch_s={("off", "eager"): (3.0, 4.0), ("off", "sdpa"): (1.0, 2.0)})
    assert machine.launch_seconds("off", "auto") == (1.0, 2.0)
    assert machine.launch_seconds("off", "flash-triton") == (1.0, 2.0)
    assert machine.launch_seconds("model", "sdpa") == (0.0, 0.0)


def test_recomputation_without_a_model_is_refused():
    with pytest.raises(UnsupportedError, match="no time model for checkpointing=selective"):
        step_seconds(EVEN, dataclasses.replace(STEP, checkpointing="selective"), H200)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_gives_a_machine_below_its_datasheet(name):
    spec = DEVICES[name]
    machine = machine_of(spec)
    assert 0 < machine.matmul_flops["bf16"] < machine.peak_flops["bf16"] == spec.bf16_tflops * 1e12
    assert 0 < machine.copy_bytes_per_s < spec.bandwidth_gb_s * 1e9
    assert 0 < machine.link.bus_bytes_per_s < spec.link_gb_s * 1e9
    assert spec.multiprocessors > 0
