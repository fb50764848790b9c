"""FLOPs of a step's mathematics are those of pencil and paper."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from trainstep.attention.documents import bounds
from trainstep.measure.flops import _attention_flops, _is_lower, counted_flops


def flops_of(forward, *inputs):
    """Of forward, and of forward and backward."""
    with counted_flops() as count:
        output = forward(*inputs)
        forward_alone = count()
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        return forward_alone, count()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_a_cpu(causal):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    forward = 4 * 2 * 3 * 16 * 16 * 8 // (2 if causal else 1)
    assert flops_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)) == (forward, 3 * forward)


@pytest.mark.parametrize(
    ("band", "pairs"),
    [
        ({"window": 5}, 5 * 16 - 5 * 5 / 2),
        ({"is_causal": False, "bounds": [0, 6, 16]}, 6 * 6 + 10 * 10),
        ({"bounds": [0, 6, 16]}, (6 * 6 + 10 * 10) / 2),
        ({"window": 8, "bounds": [0, 6, 16]}, 6 * 6 / 2 + 8 * 10 - 8 * 8 / 2),
    ],
)
def test_our_attention_in_a_band(band, pairs):
    """As of a causal mask, half of the pairs on the diagonal count."""
    given = {name: torch.empty(2, 3, 16, 8) for name in "qkv"} | {"is_causal": True, **band}
    if "bounds" in band:
        given["bounds"] = bounds(torch.tensor(band["bounds"]), 16)
    assert _attention_flops(_is_lower, given) == 4 * 2 * 3 * 8 * pairs


@pytest.mark.parametrize("directions", [1, 2])
def test_an_lstm(directions):
    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=directions == 2)
    x = torch.randn(5, 3, 8, requires_grad=True)
    forward = 2 * 5 * 3 * directions * 4 * 16 * (8 + 16 + directions * 16 + 16)
    assert flops_of(layer, x) == (forward, 3 * forward)


def test_a_gru_which_a_cpu_runs_product_by_product():
    x = torch.randn(5, 3, 8, requires_grad=True)
    forward = 2 * 5 * 3 * 3 * 16 * (8 + 16)
    start = 2 * 3 * 3 * 16 * 16  # the zeros it starts from need no gradient
    assert flops_of(nn.GRU(8, 16), x) == (forward, 3 * forward - start)


def written_out(mask):
    """Attention as models write it: two products and a softmax."""
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))

    def attend():
        scores = q @ k.transpose(-1, -2) / 8**0.5
        return torch.softmax(scores + mask, -1) @ v

    return flops_of(attend)


LOWER = torch.full((16, 16), torch.finfo(torch.float32).min).triu(1)


@pytest.mark.parametrize(("mask", "halves"), [(torch.zeros(16, 16), 1), (LOWER, 2), (LOWER.flip(1), 1)])
def test_attention_that_is_written_out(mask, halves):
    """A model that computes all scores counts as one whose kernel leaves half of them out: both are the same maths."""
    assert written_out(mask) == (FULL // halves, 3 * FULL // halves)


FULL = 4 * 2 * 3 * 16 * 16 * 8


def test_only_scores_that_are_causal_count_as_half():
    """One layer of two is causal; products of other shapes are whole."""
    q, k, v = (torch.randn(6, 16, 8, requires_grad=True) for _ in range(3))
    weight = torch.randn(6, 8, 8, requires_grad=True)

    def layers():
        whole = torch.softmax(q @ k.mT, -1) @ v
        causal = torch.softmax(whole @ k.mT + LOWER, -1) @ v
        return causal @ weight

    forward = FULL + FULL // 2 + 2 * 6 * 16 * 8 * 8
    assert flops_of(layers) == (forward, 3 * forward)


@pytest.mark.parametrize(
    ("mask", "halves"),
    [(LOWER == 0, 2), (LOWER, 2), (torch.ones(16, 16, dtype=torch.bool), 1), (torch.rand(2, 1, 1, 16) > 0.3, 1)],
)
def test_attention_with_a_mask(mask, halves):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    found = flops_of(lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert found == (FULL // halves, 3 * FULL // halves)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_its_mathematical_form(causal):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = flops_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal))
    assert found == (FULL // (1 + causal), 3 * FULL // (1 + causal))


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_in_groups(groups, transposed):
    """Depthwise is as many groups as channels: torch's counter takes its backward for that of all channels with all."""
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    layer = kind(16, 16, 4, groups=groups, stride=2)
    x = torch.randn(2, 16, 20, requires_grad=True)
    positions = 20 if transposed else 9
    forward = 2 * 2 * positions * 16 * 16 // groups * 4
    assert flops_of(layer, x) == (forward, 3 * forward)
    assert flops_of(layer, x.detach())[1] == 2 * forward, "inputs without a gradient need no product for it"


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_a_grouped_product():
    x, weight = torch.randn(32, 16, requires_grad=True), torch.randn(4, 16, 24, requires_grad=True)
    ends = torch.tensor([8, 8, 20, 32], dtype=torch.int32)
    forward = 2 * 32 * 16 * 24
    assert flops_of(lambda: torch._grouped_mm(x, weight, offs=ends).square()) == (forward, 3 * forward)


@torch.library.custom_op("flops_test::their_product", mutates_args=())
def their_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def test_operators_that_are_in_no_table_are_named():
    with counted_flops() as count:
        their_product(torch.ones(4, 4), torch.ones(4, 4))
        torch.ones(4, 4).mm(torch.ones(4, 4)).softmax(-1).add(1)
    assert count.uncounted == ("flops_test::their_product",)
    with counted_flops() as count:
        nn.functional.layer_norm(torch.ones(2, 4), (4,)).exp().matmul(torch.ones(4))
    assert count.uncounted == ()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_on_a_gpu(kind):
    layer = kind(8, 16, num_layers=2).cuda()
    x = torch.randn(5, 3, 8, device="cuda", requires_grad=True)
    weights = (4 if kind is nn.LSTM else 3) * 16 * (8 + 16 + 16 + 16)
    assert flops_of(layer, x) == (2 * 5 * 3 * weights, 3 * 2 * 5 * 3 * weights)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_causal_attention_counts_as_half_on_a_gpu(backend):
    q, k, v = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        found = flops_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    forward = 2 * 2 * 4 * 64 * 64 * 64
    assert found == (forward, 3 * forward)
