"""Checkpointing changes what is kept, never what is computed."""

import dataclasses
import gc
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.measure.memory import LiveStorages, residuals
from trainstep.step.model.transformer import build_transformer
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

BATCH, CONTEXT = 2, 16
MODEL = ModelConfig(vocab_size=64, d_model=32, d_ff=48, num_layers=5, num_heads=2, max_context=CONTEXT)
POLICIES = ["every-1", "selective"]


class DroppingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return x + scale * F.dropout(torch.tanh(self.fc(x)), 0.4)


class Dropping(nn.Module):
    """A user's model: dropout between the blocks' matrices, a keyword for the blocks."""

    def __init__(self, blocks=4):
        super().__init__()
        self.layers = nn.ModuleList(DroppingBlock() for _ in range(blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def ours(policy, impl="eager", config=MODEL):
    torch.manual_seed(0)
    model = build_transformer(config, impl=impl)
    Checkpointing(model, policy)
    return model, torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT) % 64


def loss_and_gradients(model, inputs):
    torch.manual_seed(1)
    loss = model(inputs).float().square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_same_bits(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("impl", ["eager", "sdpa", "flash-reference"])
@pytest.mark.parametrize("policy", POLICIES)
def test_loss_and_gradients_keep_every_bit(policy, impl):
    assert_same_bits(loss_and_gradients(*ours(policy, impl)), loss_and_gradients(*ours("none", impl)))


@pytest.mark.parametrize("policy", POLICIES)
def test_names_of_parameters_stay(policy):
    assert list(ours(policy)[0].state_dict()) == list(ours("none")[0].state_dict())


@pytest.mark.parametrize("policy", POLICIES)
def test_dropout_draws_the_same_numbers_again(policy):
    def run(policy):
        torch.manual_seed(0)
        model = Dropping()
        Checkpointing(model, policy)
        return [*loss_and_gradients(model, torch.ones(3, 8)), torch.get_rng_state()]

    assert_same_bits(run(policy), run("none"))


def kept_bytes(policy):
    model, tokens = ours(policy)
    kept, _ = residuals(lambda: model(tokens), model, [tokens])
    return kept.bytes


def test_what_is_kept():
    """The final norm's and the head's residuals, and before them inputs of blocks only."""
    stream = BATCH * CONTEXT * MODEL.d_model * 4
    tail_model = nn.Sequential(*(ours("none")[0].get_submodule(name) for name in ("norm", "head")))
    x = torch.randn(BATCH, CONTEXT, MODEL.d_model, requires_grad=True)
    tail = residuals(lambda: tail_model(x), tail_model)[0].bytes
    assert kept_bytes("every-1") == tail + 5 * stream


def count(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


def backward_flops(policy, early_stop=True):
    with set_checkpoint_early_stop(early_stop):
        model, tokens = ours(policy)
        output = model(tokens)
        flops, _ = count(lambda: output.sum().backward())
    return flops


def block_flops():
    model, _ = ours("none")
    x = torch.randn(BATCH, CONTEXT, MODEL.d_model)
    return count(lambda: model.blocks[0](x, model.rotary))[0]


DOWN = 2 * BATCH * CONTEXT * MODEL.d_ff * MODEL.d_model
"""The last product of a block, whose result no backward needs: torch stops computing right before it."""


def test_recomputed_products_are_exactly_one_more_forward_of_the_blocks():
    assert backward_flops("every-1", early_stop=False) - backward_flops("none") == 5 * block_flops()


def test_each_block_is_spared_its_last_product():
    assert backward_flops("every-1") - backward_flops("none") == 5 * (block_flops() - DOWN)


def test_selective_multiplies_nothing_again():
    assert backward_flops("selective") == backward_flops("none")


def test_selective_keeps_less_than_none_and_more_than_every_block():
    peaks = {policy: kept_bytes_in_backward(policy) for policy in ("none", "selective", "every-1")}
    assert peaks["every-1"] < peaks["selective"] < peaks["none"]


def kept_bytes_in_backward(policy):
    """Bytes alive between forward and backward, wherever they are kept."""
    model, tokens = ours(policy)
    with LiveStorages() as live:
        output = model(tokens)
        assert output.grad_fn is not None
        return live.bytes


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize(
    ("compile", "policy"),
    [
        ("blocks", "every-1"),
        pytest.param("blocks", "selective", marks=pytest.mark.thorough),
        ("model", "every-1"),
        pytest.param("model", "selective", marks=pytest.mark.thorough),
    ],
)
def test_compiled_steps_agree_with_eager_ones(compile, policy):
    source = builtin_source("toy", dataclasses.replace(MODEL, vocab_size=256, num_layers=3))

    def run(**settings):
        step = build_step(source, StepConfig(batch=BATCH, context=CONTEXT, device="cpu", **settings))
        batch = step.next_batch()
        loss = step.gradients(batch)
        return [loss, *(parameter.grad for parameter in step.module.parameters())]

    torch.compiler.reset()
    found, expected = run(checkpointing=policy, compile=compile), run()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_inference_is_left_alone():
    model, tokens = ours("every-1")
    with torch.no_grad():
        assert torch.equal(model(tokens), ours("none")[0](tokens))


class Between(Dropping):
    """Does something of its own between two blocks."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * 2
        return x


class Different(Dropping):
    """Gives each block an argument of its own."""

    def forward(self, x):
        for layer, scale in zip(self.layers, torch.rand(len(self.layers)), strict=True):
            x = layer(x, scale)
        return x


class Swapped(Dropping):
    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [Between, Different, Swapped])
def test_models_that_do_not_chain_their_blocks_keep_every_bit(kind):
    def run(policy):
        torch.manual_seed(0)
        model = kind()
        Checkpointing(model, policy)
        return loss_and_gradients(model, torch.ones(3, 8))

    assert_same_bits(run("every-1"), run("none"))


def test_a_block_keeps_nothing_alive_after_the_pass():
    model = Dropping()
    Checkpointing(model, "every-1")
    output = model(torch.ones(3, 8))
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None


def test_bad_input():
    with pytest.raises(UnsupportedError, match="needs blocks"):
        Checkpointing(nn.Linear(2, 2), "every-1")
    for policy in ("every", "always", "@"):
        with pytest.raises(UsageError, match=r"expected none, every-1, selective or @FILE$"):
            Checkpointing(Dropping(), policy)
    for policy in ("every-2", "every-0", "recursive"):
        with pytest.raises(UsageError, match=r"policies of several blocks .* are gone, use every-1"):
            StepConfig(checkpointing=policy)
    Checkpointing(nn.Linear(2, 2), "none")
