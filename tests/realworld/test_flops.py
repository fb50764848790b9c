"""FLOPs of transformers' models: what torch's counter leaves out, or counts many times over."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainstep.measure.flops import counted_flops

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.realworld

SMALL = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))
ROWS = TOKENS.numel()
ATTENTION = 4 * 2 * 16 * 16 * 32 // 2
"""Of one layer, causal."""


def flops_of(module, **inputs):
    """Of forward, and of backward; and what torch makes of both."""
    with counted_flops() as count:
        out = module(**inputs)
        forward = count()
        (out.loss if "labels" in inputs else out[0].sum()).backward()
    with FlopCounterMode(display=False) as torchs:
        out = module(**inputs)
        (out.loss if "labels" in inputs else out[0].sum()).backward()
    assert count.uncounted == ()
    return forward, count() - forward, torchs.get_total_flops()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_counts_the_same_whichever_way_attention_is_written(attention):
    config = transformers.LlamaConfig(**SMALL, attn_implementation=attention)
    forward, backward, _ = flops_of(transformers.LlamaForCausalLM(config), input_ids=TOKENS, labels=TOKENS)
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 128
    assert forward == 2 * ROWS * weights + 2 * ATTENTION
    assert backward == 2 * forward


def test_the_experts_of_mixtral_are_counted():
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    forward, backward, torchs = flops_of(transformers.MixtralForCausalLM(config), input_ids=TOKENS, labels=TOKENS)
    weights = 2 * (4 * 32 * 32 + 32 * 4 + 2 * 3 * 32 * 64) + 32 * 128  # of the experts, the two that a token goes to
    assert forward == 2 * ROWS * weights + 2 * ATTENTION
    assert backward == 2 * forward
    assert torchs < 0.7 * (forward + backward)


def test_depthwise_convolutions_of_convnext_are_not_counted_as_full_ones():
    config = transformers.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 128], patch_size=2)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    forward, backward, torchs = flops_of(transformers.ConvNextModel(config), pixel_values=images)
    assert 1.8 * forward < backward <= 2 * forward, "the images need no gradient"
    assert torchs > 1.5 * (forward + backward)


def test_the_convolution_of_mamba_too():
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=8)
    forward, backward, torchs = flops_of(transformers.MambaForCausalLM(config), input_ids=TOKENS, labels=TOKENS)
    assert backward == 2 * forward
    assert torchs > 1.2 * (forward + backward)
