"""Whatever a policy says of each block, gradients are those of the plain step, bit for bit, and less is kept."""

import copy
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
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.measure.memory import LiveStorages, residuals
from trainstep.step.model.transformer import build_transformer
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=64, d_model=32, d_ff=48, num_layers=4, num_heads=2, max_context=16)
TOKENS = torch.arange(32).view(2, 16) % 64
AGAIN = BlockPolicy(recompute=True)
MIXED = Policy(
    {
        "blocks.0": BlockPolicy(recompute=True, host=(0,)),
        "blocks.1": BlockPolicy(recompute=True, kept=("mm#0", "mm#4", "_softmax#0")),
        "blocks.2": BlockPolicy(host=(1, 4, 5)),
    }
)


def decoder(policy=None, impl="eager"):
    torch.manual_seed(0)
    model = build_transformer(MODEL, impl=impl)
    return model, None if policy is None else Checkpointing(model, policy)


def gradients(model, *inputs):
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(*inputs).float().square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_same_bits(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def every_block(own):
    return Policy({f"blocks.{index}": own for index in range(MODEL.num_layers)})


@pytest.mark.parametrize("impl", ["eager", "sdpa", "flash-reference"])
@pytest.mark.parametrize(
    "policy",
    ["every-1", "selective", MIXED, every_block(AGAIN), every_block(BlockPolicy(host=tuple(range(8)))), Policy()],
    ids=str,
)
def test_gradients_keep_every_bit_step_after_step(policy, impl):
    if impl != "eager" and policy is MIXED:
        policy = Policy({**policy.blocks, "blocks.1": BlockPolicy(recompute=True, kept=("mm#0", "mm#4"))})
    expected = gradients(decoder(impl=impl)[0], TOKENS)
    model, _ = decoder(policy, impl)
    for _ in range(3):
        assert_same_bits(gradients(model, TOKENS), expected)


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def backward_flops(policy, early_stop=True):
    with set_checkpoint_early_stop(early_stop):
        model, _ = decoder(policy)
        output = model(TOKENS)
        return counted(lambda: output.sum().backward())


def test_what_is_computed_again_is_counted_product_by_product():
    """Of a block that is kept in part, six of its seven products and two of attention's are needed a second time."""
    block, x = decoder()[0].blocks[0], torch.randn(2, 16, MODEL.d_model)
    forward = counted(lambda: block(x, decoder()[0].rotary))
    down = 2 * TOKENS.numel() * MODEL.d_ff * MODEL.d_model  # whose result no backward needs: torch stops before it
    plain, every = backward_flops("none"), backward_flops("every-1")
    assert backward_flops("every-1", early_stop=False) - plain == MODEL.num_layers * forward
    assert every - plain == MODEL.num_layers * (forward - down)
    assert backward_flops("selective") == plain
    again = backward_flops(Policy({"blocks.1": AGAIN}))
    kept = backward_flops(Policy({"blocks.1": BlockPolicy(recompute=True, kept=("mm#0", "mm#4"))}))
    assert again - kept == 2 * TOKENS.numel() * (MODEL.d_model**2 + MODEL.d_model * MODEL.d_ff)
    assert kept > plain


def between(policy):
    """Bytes alive between forward and backward, wherever they are kept."""
    model, _ = decoder(policy)
    with LiveStorages() as live:
        output = model(TOKENS)
        assert output.grad_fn is not None
        gc.collect()
        return live.bytes


def test_each_block_keeps_what_its_policy_says():
    plain, one = between("none"), between(Policy({"blocks.1": AGAIN}))
    assert between(Policy({"blocks.1": BlockPolicy(True, ("mm#0",))})) - one == TOKENS.numel() * MODEL.d_model * 4
    assert between(every_block(AGAIN)) == between("every-1") < between("selective") < plain
    assert one < plain
    model, stream = decoder()[0], TOKENS.numel() * MODEL.d_model * 4
    tail, x = nn.Sequential(model.norm, model.head), torch.randn(2, 16, MODEL.d_model, requires_grad=True)
    again, _ = decoder("every-1")
    kept = residuals(lambda: again(TOKENS), again, [TOKENS])[0].bytes
    assert kept == residuals(lambda: tail(x), tail)[0].bytes + MODEL.num_layers * stream, "inputs of blocks alone"


@pytest.mark.parametrize("policy", ["every-1", "selective"])
def test_names_of_parameters_and_inference_stay(policy):
    model, plain = decoder(policy)[0], decoder()[0]
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))


IN_PARTS = Policy(
    {
        "blocks.0": AGAIN,
        "blocks.1": BlockPolicy(recompute=True, kept=("mm#0", "mm#4")),
        "blocks.2": BlockPolicy(recompute=True, kept=("mm#0", "mm#4", "mm#5"), host=(0, 1)),
        "blocks.3": BlockPolicy(host=(0, 1, 2, 3)),
    }
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize(
    ("compile", "policy"),
    [
        ("blocks", "every-1"),
        ("blocks", IN_PARTS),
        pytest.param("blocks", "selective", marks=pytest.mark.thorough),
        ("model", "every-1"),
        pytest.param("model", "selective", marks=pytest.mark.thorough),
    ],
)
def test_compiled_steps_agree_with_eager_ones(compile, policy, tmp_path):
    if policy is IN_PARTS:
        policy.save(tmp_path / "policy.json")
        policy = f"@{tmp_path / 'policy.json'}"
    source = builtin_source("toy", dataclasses.replace(MODEL, vocab_size=256))

    def run(**settings):
        step = build_step(source, StepConfig(batch=2, context=16, device="cpu", **settings))
        loss = step.gradients(step.next_batch())
        return [loss, *(parameter.grad for parameter in step.module.parameters())]

    torch.compiler.reset()
    for a, b in zip(run(checkpointing=policy, compile=compile), run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), act

    def forward(self, x):
        return x + self.act(self.fc(x))


class Stack(nn.Module):
    """Blocks of one's own; `calls` says which is called when."""

    def __init__(self, *acts, calls=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(act) for act in acts)
        self.calls = range(len(acts)) if calls is None else calls

    def forward(self, x):
        for index in self.calls:
            x = self.layers[index](x)
        return x


def shared(x):
    """One storage for two saves, and as a view."""
    kept = torch.tanh(x)
    return kept * kept[:, :4].repeat(1, 2) + torch.sigmoid(kept.t()).t()


def dropping(x):
    return F.dropout(torch.exp(x), 0.5)


ALL = tuple(range(3))
X = torch.linspace(-1, 1, 24).view(3, 8)


def test_what_goes_to_host_memory_leaves_the_device_and_its_buffers_are_taken_again():
    """Each of three blocks saves its input and tanh's result; the first input is the caller's. On a CPU the buffers
    are of the same memory as the device, and the last call's storages wait there for a next call."""

    def held(policy):
        model = Stack(torch.tanh, torch.tanh, torch.tanh)
        checkpointing = Checkpointing(model, policy)
        gradients(model, X)
        with LiveStorages([X, *model.parameters()]) as live:
            output = model(X)
            assert output.grad_fn is not None
            gc.collect()
            return live.bytes, checkpointing.offloading.host_bytes

    plain, _ = held("none")
    sending, buffers = held(Policy({f"layers.{index}": BlockPolicy(host=(0, 1)) for index in range(3)}))
    assert buffers == 6 * X.nbytes
    assert sending - plain == -3 * X.nbytes  # two of the middle block, one of the first; buffers are from before


@pytest.mark.parametrize("calls", [None, (0, 1, 2, 0, 2)], ids=["once each", "twice"])
@pytest.mark.parametrize("own", [BlockPolicy(host=ALL), BlockPolicy(True, host=(0,)), BlockPolicy(True, ("tanh#0",))])
def test_blocks_that_differ_and_are_called_twice(own, calls):
    acts = (shared, dropping, shared)
    expected = gradients(Stack(*acts, calls=calls), X)
    policy = Policy({f"layers.{index}": own for index in (0, 2)} | {"layers.1": BlockPolicy(True, ("exp#0",), (0,))})
    model = Stack(*acts, calls=calls)
    Checkpointing(model, policy)
    assert_same_bits(gradients(model, X), expected)


def test_random_numbers_are_drawn_again_in_full():
    """Were the first noise kept, the second would be drawn in its place."""

    def noisy(x):
        return torch.tanh(x * torch.rand_like(x)) * torch.rand_like(x)

    model = Stack(noisy)
    Checkpointing(model, Policy({"layers.0": BlockPolicy(True, ("rand_like#0", "tanh#0"))}))
    assert_same_bits(gradients(model, X), gradients(Stack(noisy), X))


def test_backward_twice_over_one_graph():
    def run(policy):
        model = Stack(shared, shared, shared)
        Checkpointing(model, policy)
        loss = model(X).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_same_bits(run(Policy({f"layers.{index}": BlockPolicy(host=ALL) for index in range(3)})), run("none"))


def test_a_graph_that_no_backward_follows_gives_its_buffers_back():
    model = Stack(torch.tanh, torch.tanh)
    checkpointing = Checkpointing(model, Policy({"layers.0": BlockPolicy(host=(0, 1))}))
    for _ in range(3):
        model(X)
        gc.collect()
    assert checkpointing.offloading.host_bytes == 2 * X.nbytes


class InPlace(nn.Module):
    """Changes what was saved, at once or after its call."""

    def __init__(self, later):
        super().__init__()
        self.fc, self.later = nn.Linear(8, 8), later

    def forward(self, x):
        y = torch.exp(self.fc(x))  # saves its result
        return y if self.later else y.add_(1)


@pytest.mark.parametrize("later", [False, True], ids=["within", "after"])
@pytest.mark.parametrize("host", [(0,), (1,), (0, 1)])
def test_a_change_in_place_of_what_was_saved_is_refused_as_without(later, host):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([InPlace(later)])

        def forward(self, x):
            y = self.layers[0](x)
            return y.mul_(2) if later else y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(Model(), X)
    model = Model()
    Checkpointing(model, Policy({"layers.0": BlockPolicy(host=host)}))
    with pytest.raises(UnsupportedError, match=r"layers\.0 keeps for backward was changed in place"):
        gradients(model, X)


def test_policies_of_another_model_are_named():
    with pytest.raises(UsageError, match=r"about layers\.7, and this module has 1 blocks"):
        Checkpointing(Stack(torch.tanh), Policy({"layers.7": AGAIN}))
    with pytest.raises(UnsupportedError, match="needs blocks"):
        Checkpointing(nn.Linear(2, 2), Policy({"0": AGAIN}))
    model = Stack(torch.tanh)
    Checkpointing(model, Policy({"layers.0": BlockPolicy(True, ("tanh#1",))}))
    with pytest.raises(UsageError, match=r"keeps tanh#1 of layers\.0, which runs tanh 1 times"):
        model(X)
    model = Stack(torch.tanh)
    Checkpointing(model, Policy({"layers.0": BlockPolicy(host=(9,))}))
    with pytest.raises(UnsupportedError, match=r"storage 9 of layers\.0"):
        model(X)


def test_a_model_compiled_as_a_whole_sends_nothing():
    model = Stack(torch.tanh)
    model.compile()
    with pytest.raises(UnsupportedError, match="use --compile blocks or off"):
        Checkpointing(model, Policy({"layers.0": BlockPolicy(host=(0,))}))


def test_no_page_locked_memory_left(monkeypatch):
    empty = torch.empty

    def refuse(*args, pin_memory=None, **kwargs):
        if pin_memory is None:
            return empty(*args, **kwargs)
        raise RuntimeError("CUDA error: out of memory")

    model = Stack(torch.tanh)
    Checkpointing(model, Policy({"layers.0": BlockPolicy(host=(0,))}))
    monkeypatch.setattr("trainstep.checkpointing.offloading.torch.empty", refuse)
    with pytest.raises(UnsupportedError, match=r"no page-locked host memory for .* MiB more"):
        model(X)


def test_parameters_and_buffers_stay():
    model = Stack(torch.tanh, torch.tanh)
    checkpointing = Checkpointing(model, Policy({"layers.0": BlockPolicy(host=(0, 1))}))
    gradients(model, X)
    assert checkpointing.offloading.host_bytes == 2 * X.nbytes  # the input and tanh's result, of Linear no weight


def test_a_copy_of_the_model_is_of_its_own():
    model = Stack(torch.tanh)
    assert_same_bits(gradients(copy.deepcopy(model), X), gradients(model, X))


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


@pytest.mark.parametrize("policy", ["every-1", "selective"])
@pytest.mark.parametrize("kind", [Dropping, Between, Different, Swapped])
def test_models_that_drop_and_call_their_blocks_as_they_like_keep_every_bit(kind, policy):
    def run(policy):
        torch.manual_seed(0)
        model = kind()
        Checkpointing(model, policy)
        return [*gradients(model, torch.ones(3, 8)), torch.get_rng_state()]

    assert_same_bits(run(policy), run("none"))


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
