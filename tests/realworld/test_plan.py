"""Peaks of models that nobody here wrote, predicted from a traced step and measured."""

import functools

import pytest
import torch

from trainstep import Workload
from trainstep.base.config import StepConfig
from trainstep.bench.memory import measure_peaks
from trainstep.bench.tracing import trace_step
from trainstep.step.workload import WorkloadSource

pytestmark = pytest.mark.realworld
SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
VISION = {name: size for name, size in (SHAPE | HEADS).items() if name not in ("vocab_size", "max_position_embeddings")}


def of_tokens(model):
    ids = torch.randint(3, 512, (4, 32), generator=torch.Generator().manual_seed(0))
    return with_batch(model, {"input_ids": ids, "labels": ids})


def of_pictures(model):
    random = torch.Generator().manual_seed(0)
    pixels, labels = torch.randn(4, 3, 32, 32, generator=random), torch.randint(10, (4,), generator=random)
    return with_batch(model, {"pixel_values": pixels, "labels": labels})


def with_batch(model, batch):
    return Workload(
        module=model.train(),
        batches=[batch] * 4,
        forward=lambda module, batch: module(**batch),
        loss=lambda output, batch: output.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )


def llama(transformers):
    config = transformers.LlamaConfig(**SHAPE, **HEADS, num_key_value_heads=2)
    return of_tokens(transformers.LlamaForCausalLM(config))


def gpt2(transformers):
    config = transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return of_tokens(transformers.GPT2LMHeadModel(config))


def qwen3(transformers):
    config = transformers.Qwen3Config(**SHAPE, **HEADS, num_key_value_heads=2, head_dim=16)
    return of_tokens(transformers.Qwen3ForCausalLM(config))


def gemma2(transformers):
    config = transformers.Gemma2Config(**SHAPE, **HEADS, num_key_value_heads=2, head_dim=16)
    return of_tokens(transformers.Gemma2ForCausalLM(config))


def phi(transformers):
    return of_tokens(transformers.PhiForCausalLM(transformers.PhiConfig(**SHAPE, **HEADS)))


def bert(transformers):
    return of_tokens(transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE, **HEADS)))


def mixtral(transformers):
    config = transformers.MixtralConfig(**SHAPE, **HEADS, num_key_value_heads=2, num_local_experts=4)
    return of_tokens(transformers.MixtralForCausalLM(config))


def t5(transformers):
    shape = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return of_tokens(transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0)))


def vit(transformers):
    config = transformers.ViTConfig(**VISION, image_size=32, patch_size=8, num_labels=10)
    return of_pictures(transformers.ViTForImageClassification(config))


def resnet(transformers):
    shape = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
    return of_pictures(transformers.ResNetForImageClassification(transformers.ResNetConfig(**shape, num_labels=10)))


def lora(transformers):
    peft = pytest.importorskip("peft")
    made = llama(transformers)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return with_batch(peft.get_peft_model(made.module, config), made.batches[0])


@pytest.mark.parametrize(
    "make", [llama, gpt2, qwen3, gemma2, phi, bert, mixtral, t5, vit, resnet, lora], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.thorough), "bf16"])
def test_the_peak_is_predicted_within_five_percent(make, precision):
    transformers = pytest.importorskip("transformers")

    def build(step):
        torch.manual_seed(step.seed)
        return make(transformers)

    source, config = WorkloadSource(make.__name__, build), StepConfig(precision=precision, device="cpu")
    traced, measured = trace_step(source, config), measure_peaks(source, config, "step")
    assert traced.peak == pytest.approx(measured.peak, rel=0.05)
    if make is lora:
        assert traced.gradients < 0.05 * traced.weights, "what is frozen has no gradients"
