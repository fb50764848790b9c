import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainstep.base.config import SIZES, ModelConfig
from trainstep.measure.memory import LiveStorages
from trainstep.step.model.transformer import (
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    build_transformer,
    chunked_cross_entropy,
    cross_entropy,
)

TOY = ModelConfig(vocab_size=50, d_model=32, d_ff=48, num_layers=2, num_heads=4, max_context=64)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("tiny", 3_609_728),
        ("small", 128_625_408),
        ("2.7B", 3_406_809_600),
        ("10B", None),
        ("2025/xl", None),
        ("2026/xl", 3_406_809_600),
    ],
)
def test_parameter_counts_are_exact(size, parameters):
    config = SIZES[size]
    built = sum(parameter.numel() for parameter in build_transformer(config, device="meta").parameters())
    assert built == config.num_parameters
    if parameters is not None:
        assert built == parameters


def test_meta_construction_allocates_nothing():
    model = build_transformer(SIZES["10B"], device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_logits_and_hidden_states():
    torch.manual_seed(0)
    model = build_transformer(TOY)
    tokens = torch.randint(50, (3, 17))
    logits = model(tokens)
    assert logits.shape == (3, 17, 50)
    torch.testing.assert_close(model.head(model(tokens, return_hidden=True)), logits)


def test_the_model_is_causal():
    torch.manual_seed(0)
    model = build_transformer(TOY)
    tokens = torch.randint(50, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :12], after[0, :12], rtol=0, atol=0)
    assert not torch.allclose(before[0, 12:], after[0, 12:])


def test_the_seed_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return build_transformer(TOY).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_initial_loss_is_near_that_of_guessing():
    torch.manual_seed(0)
    model = build_transformer(SIZES["tiny"])
    tokens = torch.randint(10_000, (2, 65))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(10_000), rel=0.05)


def test_rms_norm_is_computed_in_float32():
    norm = RMSNorm(64)
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 64) * 300  # squares overflow float16
    x16 = x.half()
    exact = x16.double() / (x16.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    out = norm(x16)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), exact, rtol=2**-10, atol=0)


def test_rotary_scores_depend_on_distance_only():
    rotary = RotaryEmbedding(16, 10_000.0, 128)
    rotary.init_weights()
    q, k = torch.randn(16), torch.randn(16)
    turned_q, turned_k = rotary(q.expand(128, 16)), rotary(k.expand(128, 16))
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 17):
        diagonal = torch.diagonal(scores, -distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(128))


def test_rotary_turns_pairs_by_the_papers_angles():
    rotary = RotaryEmbedding(4, 100.0, 8)
    rotary.init_weights()
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(8, 4)  # pairs (0, 2) and (1, 3)
    position = 5
    slow = position * 100.0 ** (-1 / 2)
    expected = torch.tensor([math.cos(position), -2 * math.sin(slow), math.sin(position), 2 * math.cos(slow)])
    torch.testing.assert_close(rotary(x)[position], expected)


def test_swiglu_against_its_formula():
    layer = SwiGLU(8, 12).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    gate, up = x @ layer.gate.weight.T, x @ layer.up.weight.T
    torch.testing.assert_close(layer(x), (gate / (1 + torch.exp(-gate)) * up) @ layer.down.weight.T)


@pytest.mark.parametrize("impl", ["sdpa", "flash-reference", "sdpa-math"])
def test_attention_implementations_give_the_same_model(impl):
    tokens = torch.randint(50, (2, 33))
    torch.manual_seed(0)
    eager = build_transformer(TOY, impl="eager")(tokens)
    torch.manual_seed(0)
    other = build_transformer(TOY, impl=impl)(tokens)
    assert (other - eager).norm() / eager.norm() < 1e-5


@pytest.mark.gpu
def test_direct_construction_on_the_gpu_leaves_the_host_alone():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build_transformer(SIZES["small"], device="cuda")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert torch.cuda.max_memory_allocated() - before < 1.2 * size


def loss_case(tokens=96, d_model=16, vocab=40):
    torch.manual_seed(0)
    hidden = torch.randn(2, tokens // 2, d_model, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(d_model, vocab, bias=False).double()
    return hidden, head, torch.randint(vocab, (2, tokens // 2))


def test_dense_against_the_formula():
    hidden, head, targets = loss_case()
    logits = head(hidden)
    log_probabilities = logits - logits.exp().sum(-1, keepdim=True).log()
    expected = -log_probabilities.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, targets).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk", [1, 7, 32, 96, 1000])
def test_chunked_equals_dense_with_gradients(chunk):
    hidden, head, targets = loss_case()
    cross_entropy(head(hidden), targets).backward()
    expected = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    loss = chunked_cross_entropy(hidden, head, targets, chunk_tokens=chunk)
    loss.backward()
    assert float(loss) == pytest.approx(float(cross_entropy(head(hidden), targets)), rel=1e-6)
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(head.weight.grad, expected[1], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("ignored", [-100, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_chunked_leaves_out_what_is_ignored(reduction, ignored):
    hidden, head, targets = loss_case()
    targets.view(-1)[:40] = ignored
    for of in (targets, torch.full_like(targets, ignored)):
        plain = F.cross_entropy(head(hidden).flatten(0, 1), of.flatten(), reduction=reduction, ignore_index=ignored)
        expected = torch.autograd.grad(plain, (hidden, head.weight))
        loss = chunked_cross_entropy(hidden, head, of, chunk_tokens=32, reduction=reduction, ignore_index=ignored)
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0, equal_nan=True)
        torch.testing.assert_close(torch.autograd.grad(loss, (hidden, head.weight)), expected, rtol=1e-10, atol=1e-14)
    assert loss.isnan() if reduction == "mean" else loss == 0


def test_chunked_never_holds_the_logits():
    hidden, head, targets = loss_case(tokens=512, vocab=1000)

    def peak(loss):
        with LiveStorages([hidden, head.weight, targets]) as live:
            loss().backward()
        hidden.grad = head.weight.grad = None
        return live.peak

    dense = peak(lambda: cross_entropy(head(hidden), targets))
    chunked = peak(lambda: chunked_cross_entropy(hidden, head, targets, chunk_tokens=32))
    assert chunked < dense / 4
