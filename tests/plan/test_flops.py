import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainstep.base.config import SIZES, ModelConfig
from trainstep.plan.flops import attention_flops, forward_flops, step_flops
from trainstep.step.model.transformer import build_transformer

TOY = ModelConfig(vocab_size=11, d_model=8, d_ff=20, num_layers=3, num_heads=2)


def test_hand_count_of_a_toy():
    """Batch 2, context 5: 10 tokens. Multiply-adds counted one by one, then doubled."""
    flops = forward_flops(TOY, batch=2, context=5)
    assert flops.projections == 2 * 3 * 10 * (8 * 8 * 4)
    assert flops.feed_forward == 2 * 3 * 10 * (8 * 20 * 3)
    pairs = sum(i + 1 for i in range(5))  # query i sees i + 1 keys
    assert flops.attention == 2 * 3 * 2 * pairs * (8 + 8)  # scores and weighted sum, all heads together d_model wide
    assert flops.head == 2 * 10 * 8 * 11


def test_torch_counts_the_same_matrix_products():
    """torch's counter is right for matmuls; it counts attention in full, so full attention is what is compared."""
    batch, context = 2, 16
    module = build_transformer(TOY, device="meta")
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(batch, context, dtype=torch.long, device="meta"))
    ours = forward_flops(TOY, batch, context)
    full_attention = TOY.num_layers * 2 * 2 * batch * context**2 * TOY.d_model
    assert counter.get_total_flops() == ours.total - ours.attention + full_attention


def test_modes():
    forward = step_flops(TOY, 2, 5, "forward")
    assert step_flops(TOY, 2, 5, "forward-backward") == step_flops(TOY, 2, 5, "step") == 3 * forward


def test_large_models_approach_six_flops_per_parameter_and_token():
    model = SIZES["10B"]
    ratio = step_flops(model, 1, 512, "step") / (6 * model.num_parameters * 512)
    assert ratio == pytest.approx(1, abs=0.03)


def test_causal_attention_counts_half():
    assert attention_flops(1, 16, 16384, 16384, 64, is_causal=True) * 2 == 4 * 16 * 16384**2 * 64
    assert attention_flops(2, 3, 5, 7, 8, is_causal=False) == 4 * 2 * 3 * 5 * 7 * 8


def test_a_window_counts_the_pairs_in_it():
    whole = attention_flops(1, 16, 4096, 4096, 64, is_causal=True)
    assert attention_flops(1, 16, 4096, 4096, 64, is_causal=True, window=4096) == whole
    narrow = attention_flops(1, 16, 4096, 4096, 64, is_causal=True, window=128)
    assert narrow == pytest.approx(4 * 16 * 64 * sum(min(query + 1, 128) for query in range(4096)), rel=0.005)
