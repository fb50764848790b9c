"""What a block's choices weigh is what the step is seen to hold; models that cannot be chosen for are named."""

import dataclasses
import functools
import shutil

import pytest
import torch
from torch import nn

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.bench.fit.costs import Operators, block_costs
from trainstep.bench.fit.search import HEAD, LOSS, OTHER, measure_moments
from trainstep.bench.memory import measure_peaks
from trainstep.measure.timing import device_clock
from trainstep.plan.fit import Choice, StepCost, peak_of
from trainstep.step.training_step import build_step
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=80, num_layers=3, num_heads=2)
SOURCE = builtin_source("toy", MODEL)
CONFIG = StepConfig(batch=4, context=32, attention="sdpa", device="cpu")
STREAM = 4 * 32 * 32 * 4
"""Bytes of the residual stream."""


def test_a_block_of_ours():
    first, *others = block_costs(SOURCE, CONFIG)
    assert [each.name for each in (first, *others)] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(dataclasses.replace(each, name=first.name) == first for each in others)
    assert first.input_bytes == STREAM
    results = {each.name: each.bytes for each in first.results}
    wide = 4 * 32 * 80 * 4
    assert {name: size for name, size in results.items() if name.startswith("mm#")}.items() <= {
        **{f"mm#{number}": STREAM for number in range(4)},
        **{f"mm#{number}": wide for number in (4, 5)},  # gate and up; torch stops before down
    }.items()
    assert sum(each.bytes for each in first.stored) <= first.plain_bytes
    assert {STREAM, wide} <= {each.bytes for each in first.stored}
    assert first.input_number == 0


def test_casts_of_weights_cannot_go_to_host_memory():
    """autocast's cache keeps them until the forward of the whole step has ended."""
    first, *_ = block_costs(SOURCE, dataclasses.replace(CONFIG, batch=1, context=8, precision="bf16"))
    square, wide = 2 * 32 * 32, 2 * 32 * 80
    assert first.cast_bytes == 4 * square + 3 * wide
    assert first.stored
    assert not {square, wide} & {each.bytes for each in first.stored}


def step_cost(source, config):
    moments = measure_moments(build_step(source, dataclasses.replace(config, checkpointing="every-1")))
    blocks = block_costs(source, config)
    backward = tuple(moments[index] for index in range(len(blocks)))
    return StepCost(blocks, moments[LOSS], moments[HEAD], backward, moments[OTHER], seconds=1.0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plain_peak_follows_from_the_step_that_computes_everything_again(attention, precision):
    config = dataclasses.replace(CONFIG, attention=attention, precision=precision)
    costs = step_cost(SOURCE, config)
    for choice, policy in ((Choice(is_plain=True), "none"), (Choice(), "every-1")):
        measured = measure_peaks(SOURCE, dataclasses.replace(config, checkpointing=policy), "step").peak
        assert peak_of(costs, [choice] * 3) == pytest.approx(measured, rel=0.03)


def loss_in_forward(step):
    """The built-in model with its loss inside of forward, as transformers' models have it."""
    made = SOURCE.build(step)
    inside = made.forward, made.loss
    return Workload(
        module=made.module,
        batches=made.batches,
        forward=lambda module, batch: inside[1](inside[0](module, batch), batch),
        loss=lambda outputs, batch: outputs,
        optimizer=made.optimizer,
    )


def test_a_loss_in_forward_is_the_loss_all_the_same():
    """Its moment was one that no choice changes, so that kept activations were not added to it."""
    source = WorkloadSource("inside", loss_in_forward)
    inside, apart = step_cost(source, CONFIG), step_cost(SOURCE, CONFIG)
    assert inside.loss_bytes == pytest.approx(apart.loss_bytes, rel=0.01)
    measured = measure_peaks(source, CONFIG, "step").peak
    assert peak_of(inside, [Choice(is_plain=True)] * 3) == pytest.approx(measured, rel=0.03)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, order, widths=(32, 32, 64)):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.layers = nn.ModuleList(Block(width) for width in widths)
        self.order = order

    def forward(self, x):
        x = self.first(x)
        for index in self.order:
            x = self.layers[index](x)
        return x


def source_of(make):
    def build(step):
        torch.manual_seed(0)
        batches = [(torch.ones(64, 4),)]
        return Workload(
            make(), batches, lambda out, batch: out.square().mean(), functools.partial(torch.optim.SGD, lr=0.1)
        )

    return WorkloadSource("own", build)


def test_blocks_that_differ_are_measured_each():
    costs = block_costs(source_of(lambda: Model((0, 1, 2))), CONFIG)
    rows = 64 * 4
    assert [each.plain_bytes for each in costs] == [rows * (16 + 32), rows * (16 + 32), rows * (16 + 64)]
    assert dataclasses.replace(costs[0], name="layers.1") == costs[1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Model((0, 1, 0, 2)), r"layers\.0 is called several times"),
        (lambda: Model((0, 2)), r"layers\.1 was not called"),
        (lambda: nn.Linear(4, 4), "has no blocks"),
    ],
)
def test_models_that_cannot_be_chosen_for(make, said):
    with pytest.raises(UnsupportedError, match=said):
        block_costs(source_of(make), CONFIG)


@pytest.mark.parametrize("mode", ["model", "blocks-recompute"])
def test_compilation_that_decides_by_itself_what_is_kept(mode):
    with pytest.raises(UnsupportedError, match="use --compile blocks or off"):
        block_costs(SOURCE, dataclasses.replace(CONFIG, compile=mode))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_of_compiled_blocks_products_alone_are_chosen():
    costs = block_costs(SOURCE, dataclasses.replace(CONFIG, compile="blocks"))
    (cost,) = {dataclasses.replace(each, name="") for each in costs}
    kinds = {each.name.partition("#")[0] for each in cost.results}
    assert kinds <= {"mm", "_scaled_dot_product_flash_attention_for_cpu"}
    assert cost.plain_bytes >= 5 * STREAM
    assert cost.input_number is not None


class Caching(Model):
    """Its blocks leave what they compute in a list, as in a key-value cache."""

    def __init__(self):
        super().__init__((0, 1, 2))
        self.lengths = []
        for layer in self.layers:
            layer.forward = functools.partial(self._cached, layer)

    def _cached(self, layer, x, cache):
        hidden = torch.relu(layer.up(x))
        cache.append(hidden)
        return x + layer.down(hidden)

    def forward(self, x):
        x, cache = self.first(x), []
        for layer in self.layers:
            x = layer(x, cache)
        self.lengths.append(len(cache))
        return x


def test_what_a_cache_holds_is_there_whatever_is_chosen_and_a_call_fills_it_once():
    models = []
    costs = block_costs(source_of(lambda: models.append(Caching()) or models[-1]), CONFIG)
    assert models[-1].lengths == [3]
    assert [each.plain_bytes for each in costs] == [64 * 4 * 16] * 3


def test_a_result_that_is_changed_in_place_is_not_offered():
    """As RMSNorm's mean, to which epsilon is added."""
    x = torch.randn(4, 8, requires_grad=True)
    operators = Operators(device_clock(torch.device("cpu")))
    with operators, torch.autograd.graph.saved_tensors_hooks(operators.note_saved, lambda kept: kept):
        torch.nn.functional.rms_norm(x, (8,), torch.ones(8), 1e-5)
    sizes = {each.name: each.bytes for each in operators.found()}
    assert sizes["mean#0"] == 0
    assert sizes["rsqrt#0"] == 4 * 4
