"""FLOPs counted operator by operator are those of pencil and paper."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from trainstep.measure.flop_count import counted_flops


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
