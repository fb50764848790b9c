"""A checkpointed block is run again in the state in which it ran first, or refused by name."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from trainstep import Workload
from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.step.training_step import TrainingStep

POLICIES = ["every-1", "selective"]


class Cache:
    """Keys by layer, as decoders keep them: an object that holds a list of objects."""

    def __init__(self, layers):
        self.layers = [SimpleNamespace(keys=None) for _ in range(layers)]

    def update(self, layer, keys):
        held = self.layers[layer]
        held.keys = keys if held.keys is None else torch.cat([held.keys, keys], dim=1)
        return held.keys


class Block(nn.Module):
    """Attention to the keys of a cache; what more it does is `extra(block, x)`."""

    def __init__(self, place=0, extra=lambda block, x: x):
        super().__init__()
        self.place, self.extra = place, extra
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.count, self.table, self.recent, self.names = 0, {}, deque(), set()

    def forward(self, x, cache=None):
        keys = self.fc(x)
        if cache is not None:
            keys = cache.update(self.place, keys)
        x = x + torch.softmax(x @ keys.mT, -1) @ keys
        return self.extra(self, torch.tanh(self.norm(x.mT).mT))


class Stack(nn.Module):
    def __init__(self, extra=lambda block, x: x, has_cache=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(place, extra) for place in range(2))
        self.has_cache = has_cache

    def forward(self, x):
        cache = Cache(2) if self.has_cache else None
        for block in self.blocks:
            x = block(x, cache)
        return x


def trained(policy, passes=2, **options):
    """Gradients and buffers after some passes, and the module."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = Stack(**options)
    Checkpointing(module, policy)
    for _ in range(passes):
        module(torch.ones(3, 5, 8).cumsum(1)).square().mean().backward()
    return [*(p.grad for p in module.parameters()), *module.buffers()], module


def assert_same(policy, **options):
    found, module = trained(policy, **options)
    expected, plain = trained("none", **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return module, plain


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_forward_fills_is_as_it_was(policy):
    assert_same(policy, has_cache=True)


def counts(block, x):
    block.count += 1
    return x * block.count


def adds_to_a_buffer(block, x):
    block.calls += 1
    return x * block.calls


def replaces_a_buffer(block, x):
    block.calls = block.calls + 1
    return x * block.calls


def makes_a_table_once(block, x):
    if "scale" not in block.table:
        block.table["scale"] = torch.ones(8, 2).matmul(torch.ones(2, 8))[0]  # another product than the second time
    return x * block.table["scale"]


def remembers(block, x):
    block.recent.append(len(block.recent))
    block.names.add(len(block.names))
    return x * (len(block.recent) + len(block.names))


def makes_an_attribute(block, x):
    if not hasattr(block, "made"):
        block.made = 3.0
        return x * 2
    return x * block.made


def draws_from_python(block, x):
    return x * random.random()


def draws_from_numpy(block, x):
    return x * float(np.random.rand())


def normalizes_by_a_function(block, x):
    return F.batch_norm(x.mT, block.mean, block.var, training=True).mT


def drops(block, x):
    return F.dropout(x, 0.5)


EXTRAS = [
    counts,
    adds_to_a_buffer,
    replaces_a_buffer,
    makes_a_table_once,
    remembers,
    makes_an_attribute,
    draws_from_python,
    draws_from_numpy,
    normalizes_by_a_function,
    drops,
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_forward_leaves_beside_its_output_is_as_it_was_and_left_once(policy, extra):
    module, plain = assert_same(policy, extra=extra)
    for block, other in zip(module.blocks, plain.blocks, strict=True):
        for name in ("count", "recent", "names"):
            assert getattr(block, name) == getattr(other, name)
        assert block.table.keys() == other.table.keys()
    assert random.random() == (trained("none", extra=extra), random.random())[1]


def test_batch_norm_counts_a_batch_once():
    for policy in POLICIES:
        assert trained(policy)[1].blocks[0].norm.num_batches_tracked == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_backward_repeats_the_same(policy):
    def gradients(policy):
        torch.manual_seed(0)
        module = Stack(extra=counts, has_cache=True)
        Checkpointing(module, policy)
        loss = module(torch.ones(3, 5, 8).cumsum(1)).square().mean()
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in module.parameters()]
        if policy != "selective":  # torch lets selective results be used once
            loss.backward()
            assert all(torch.equal(p.grad, 2 * once) for p, once in zip(module.parameters(), first, strict=True))
        return first

    assert all(torch.equal(a, b) for a, b in zip(gradients(policy), gradients("none"), strict=True))


def test_a_spectral_norms_iteration_is_not_taken_twice():
    def gradients(policy):
        torch.manual_seed(0)
        module = Stack()
        for block in module.blocks:
            nn.utils.parametrizations.spectral_norm(block.fc)
        Checkpointing(module, policy)
        module(torch.ones(3, 5, 8).cumsum(1)).square().mean().backward()
        return [*(p.grad for p in module.parameters()), *module.buffers()]

    for policy in POLICIES:
        assert all(torch.equal(a, b) for a, b in zip(gradients(policy), gradients("none"), strict=True))


class FixedCache(Cache):
    """Keys written into a tensor that is there before, as caches of a fixed size do."""

    def __init__(self, layers):
        self.keys = torch.zeros(layers, 3, 5, 8)

    def update(self, layer, keys):
        self.keys[layer] += keys.detach()
        return keys + self.keys[layer].clone()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tensor_that_is_changed_in_place_is_refused_by_name(policy, monkeypatch):
    monkeypatch.setitem(globals(), "Cache", FixedCache)
    with pytest.raises(UnsupportedError, match=r"blocks.0 changes its argument (cache|1) in place"):
        trained(policy, has_cache=True)


outside = bytearray()  # memory that is not put back


def adds_more_the_second_time(block, x):
    outside.append(1)
    for _ in range(1 + (len(outside) > 2)):
        x = x + 1
    return x.sigmoid()


def changes_shape_the_second_time(block, x):
    outside.append(1)
    return x.mul(2).reshape(3, 40).sigmoid().view(3, 5, 8) if len(outside) <= 2 else x.mul(2).sigmoid()


def step_of(module, policy):
    workload = Workload(
        module=module,
        batches=[(torch.ones(3, 5, 8).cumsum(1),)],
        loss=lambda output, batch: output.square().mean(),
        optimizer=torch.optim.SGD,
    )
    return TrainingStep(workload, StepConfig(device="cpu", checkpointing=policy))


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        ("every-1", changes_shape_the_second_time),
        ("selective", changes_shape_the_second_time),
        ("selective", adds_more_the_second_time),
    ],
)
def test_what_cannot_be_repeated_names_the_block(policy, extra):
    outside.clear()
    torch.manual_seed(0)
    step = step_of(Stack(extra=extra), policy)
    with pytest.raises(UnsupportedError, match=r"blocks\.\d.* does not do in backward what it did in forward"):
        step.gradients(step.next_batch())


def test_lack_of_memory_in_backward_stays_what_it_is():
    def asks_for_too_much(block, x):
        outside.append(1)
        return x if len(outside) <= 2 else x.expand(1 << 40, *x.shape).contiguous()[0]

    outside.clear()
    with set_checkpoint_early_stop(False), pytest.raises(RuntimeError, match=r"memory|too large") as caught:
        trained("every-1", passes=1, extra=asks_for_too_much)
    assert not isinstance(caught.value, UnsupportedError)
