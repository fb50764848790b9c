"""Models that nobody here wrote, as their libraries build them, tiny: each a factory as `--workload` takes it.

    trainstep analyze --workload tests.realworld.models:llama

Weights are random, data is generated, nothing is downloaded; configurations are the libraries' defaults but for sizes
(so `use_cache` stays on where it is by default). `MODELS` has each factory's name with the package it needs. For a GPU,
which such steps do not keep busy, $WIDTH, $LAYERS, $VOCAB, $BATCH, $SEQ and $IMAGE make them larger.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.realworld import written
from trainstep import Workload

_BY_PACKAGE = {
    "transformers": "llama llama_eager llama_bf16 gpt2 gpt2_eager mistral mixtral qwen3 gemma2 phi deepseek_v3 mamba "
    "bert t5 vit convnext resnet clip whisper wav2vec2",
    "peft": "lora",
    "diffusers": "unet dit",
    "x_transformers": "x_transformers",
    "timm": "timm_vit timm_resnet",
    "litgpt": "litgpt",
    "torch": "nanogpt nanochat compiled_parts lstm torch_transformer",
}
MODELS = {name: package for package, names in _BY_PACKAGE.items() for name in names.split()}
"""Factory → the package it needs."""

LEAVES_OUT_LAYERS = {"wav2vec2"}
"""At random, in training: two steps of one model need not take the same memory."""

BATCH, SEQ = int(os.environ.get("BATCH", "4")), int(os.environ.get("SEQ", "32"))
VOCAB = int(os.environ.get("VOCAB", "256"))
WIDTH, LAYERS = int(os.environ.get("WIDTH", "64")), int(os.environ.get("LAYERS", "2"))
IMAGE = int(os.environ.get("IMAGE", "32"))  # pixels of a picture's side
HEADS = max(4, WIDTH // 64)
HEAD = WIDTH // HEADS
adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _tokens(length: int = SEQ) -> list[Tensor]:
    """Eight batches of token ids, (BATCH, length); 0 to 2 are left out, which libraries use for padding and ends."""
    return list(torch.randint(3, VOCAB, (8, BATCH, length), generator=_random()).unbind())


def _floats(*shape: int) -> list[Tensor]:
    return list(torch.randn(8, BATCH, *shape, generator=_random()).unbind())


def _classes(count: int) -> list[Tensor]:
    return list(torch.randint(count, (8, BATCH), generator=_random()).unbind())


def _keywords(module: nn.Module, batches: list[dict[str, Tensor]]) -> Workload:
    """A model of transformers: keyword arguments in, an object with `.loss` out."""
    module.train()
    return Workload(
        module=module,
        batches=batches,
        forward=lambda module, batch: module(**batch),
        loss=lambda output, batch: output.loss,
        optimizer=adamw,
    )


def _made(kind: str, model: str, **shape: Any) -> nn.Module:
    """A model of transformers of this shape, by the beginning of its classes' names and the end of its own."""
    transformers = importlib.import_module("transformers")
    return getattr(transformers, f"{kind}{model}")(getattr(transformers, f"{kind}Config")(**shape))


def _causal(module: nn.Module) -> Workload:
    return _keywords(module, [{"input_ids": ids, "labels": ids} for ids in _tokens()])


def _decoder(kind: str, **shape: Any) -> Workload:
    return _causal(_made(kind, "ForCausalLM", **shape))


_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * SEQ,
}
_GROUPED = {**_DECODER, "num_key_value_heads": HEADS // 2}
_VISION = {name: size for name, size in _DECODER.items() if name not in ("vocab_size", "max_position_embeddings")}


def llama(attention: str = "sdpa") -> Workload:
    return _decoder("Llama", **_GROUPED, attn_implementation=attention)


def llama_eager() -> Workload:
    return llama("eager")


def llama_bf16() -> Workload:
    """Weights in bf16, as large models are trained."""
    made = llama()
    made.module.bfloat16()
    return made


def gpt2(attention: str = "sdpa") -> Workload:
    shape = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * SEQ}
    return _causal(_made("GPT2", "LMHeadModel", **shape, attn_implementation=attention))


def gpt2_eager() -> Workload:
    return gpt2("eager")


def mistral() -> Workload:
    return _decoder("Mistral", **_GROUPED, sliding_window=16)


def mixtral() -> Workload:
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return _decoder("Mixtral", **_GROUPED, **shape)


def qwen3() -> Workload:
    return _decoder("Qwen3", **_GROUPED, head_dim=HEAD)


def gemma2() -> Workload:
    return _decoder("Gemma2", **_GROUPED, head_dim=HEAD, sliding_window=16)


def phi() -> Workload:
    return _decoder("Phi", **_DECODER)


def deepseek_v3() -> Workload:
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    shape = {**_DECODER, "num_key_value_heads": HEADS, **experts, **latent}
    return _decoder("DeepseekV3", **shape, n_group=2, topk_group=1, first_k_dense_replace=1)


def mamba() -> Workload:
    shape = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8}
    return _decoder("Mamba", **shape)


def bert() -> Workload:
    kept = torch.ones(BATCH, SEQ, dtype=torch.long)
    kept[1:3, 20:] = 0  # two of the texts are padded
    batches = []
    for ids in _tokens():
        labels = ids.masked_fill(torch.rand(ids.shape, generator=_random()) > 0.3, -100)
        batches.append({"input_ids": ids.masked_fill(labels != -100, 1), "labels": labels, "attention_mask": kept})
    return _keywords(_made("Bert", "ForMaskedLM", **_DECODER), batches)


def t5() -> Workload:
    shape = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": HEAD, "d_ff": 2 * WIDTH, "num_layers": LAYERS}
    module = _made("T5", "ForConditionalGeneration", **shape, num_heads=HEADS, decoder_start_token_id=0)
    return _keywords(module, [{"input_ids": ids, "labels": ids[:, : SEQ // 2].contiguous()} for ids in _tokens()])


def vit() -> Workload:
    module = _made("ViT", "ForImageClassification", **_VISION, image_size=IMAGE, patch_size=8, num_labels=10)
    return _keywords(module, _pictures(IMAGE))


def _pictures(size: int) -> list[dict[str, Tensor]]:
    pairs = zip(_floats(3, size, size), _classes(10), strict=True)
    return [{"pixel_values": pixels, "labels": labels} for pixels, labels in pairs]


def convnext() -> Workload:
    shape = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1], "num_labels": 10}
    return _keywords(_made("ConvNext", "ForImageClassification", **shape), _pictures(64))


def resnet() -> Workload:
    shape = {"embedding_size": WIDTH // 4, "hidden_sizes": [WIDTH // 4, WIDTH // 2], "depths": [2, 2]}
    module = _made("ResNet", "ForImageClassification", **shape, layer_type="basic", num_labels=10)
    return _keywords(module, _pictures(IMAGE))


def clip() -> Workload:
    text = {**_DECODER, "eos_token_id": VOCAB - 1}
    vision = {**_VISION, "image_size": 32, "patch_size": 8}
    module = _made("CLIP", "Model", text_config=text, vision_config=vision, projection_dim=32)
    pairs = zip(_tokens(), _floats(3, 32, 32), strict=True)
    made = _keywords(module, [{"input_ids": ids, "pixel_values": pixels} for ids, pixels in pairs])
    made.forward = lambda module, batch: module(**batch, return_loss=True)
    return made


def whisper() -> Workload:
    halves = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}
    shape = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in halves.items()}
    shape |= {"vocab_size": VOCAB, "num_mel_bins": 16, "d_model": WIDTH, "decoder_start_token_id": 1}
    shape |= {"max_source_positions": SEQ, "max_target_positions": SEQ}
    shape |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    pairs = zip(_floats(16, 2 * SEQ), _tokens(SEQ // 2), strict=True)
    batches = [{"input_features": heard, "labels": ids} for heard, ids in pairs]
    return _keywords(_made("Whisper", "ForConditionalGeneration", **shape), batches)


def wav2vec2() -> Workload:
    heard = {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 8)}
    heard |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    module = _made("Wav2Vec2", "ForCTC", **_DECODER, **heard, ctc_loss_reduction="mean", ctc_zero_infinity=True)
    pairs = zip(_floats(4000), _tokens(8), strict=True)
    return _keywords(module, [{"input_values": sound, "labels": ids} for sound, ids in pairs])


def lora() -> Workload:
    from peft import LoraConfig, get_peft_model

    made = llama()
    adapted = get_peft_model(made.module, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return _causal(adapted)


def unet() -> Workload:
    from diffusers import UNet2DModel

    module = UNet2DModel(
        sample_size=IMAGE // 2,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(WIDTH // 4, WIDTH // 2),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return _denoising(module, 3)


def dit() -> Workload:
    from diffusers import DiTTransformer2DModel

    module = DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        norm_num_groups=8,
        sample_size=IMAGE // 2,
        patch_size=4,
        num_embeds_ada_norm=1000,
    )
    return _denoising(module, 4, class_labels=_classes(10))


def _denoising(module: nn.Module, channels: int, **more: list[Tensor]) -> Workload:
    """Predict the noise of a noisy picture at a random time."""
    noisy, noise = _floats(channels, IMAGE // 2, IMAGE // 2), _floats(channels, IMAGE // 2, IMAGE // 2)
    names = ("sample" if channels == 3 else "hidden_states", "timestep", *more)
    columns = zip(noisy, _classes(1000), *more.values(), strict=True)
    inputs = [dict(zip(names, column, strict=True)) for column in columns]
    return Workload(
        module=module.train(),
        batches=list(zip(inputs, noise, strict=True)),
        forward=lambda module, batch: module(**batch[0]),
        loss=lambda output, batch: F.mse_loss(output.sample, batch[1]),
        optimizer=adamw,
    )


def x_transformers() -> Workload:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=HEAD, rotary_pos_emb=True, attn_flash=True)
    module = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCAB, max_seq_len=SEQ, attn_layers=layers))
    return Workload(
        module=module.train(),
        batches=_tokens(SEQ + 1),
        forward=lambda module, batch: module(batch),
        loss=lambda loss, batch: loss,
        optimizer=adamw,
    )


def timm_vit() -> Workload:
    from timm.models.vision_transformer import VisionTransformer

    shape = {"img_size": IMAGE, "patch_size": 8, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS}
    return _classifier(VisionTransformer(**shape, num_classes=10))


def timm_resnet() -> Workload:
    from timm.models.resnet import BasicBlock, ResNet

    channels = (WIDTH // 4, WIDTH // 4, WIDTH // 2, WIDTH // 2)
    return _classifier(ResNet(BasicBlock, layers=[1, 1, 1, 1], num_classes=10, channels=channels))


def _classifier(module: nn.Module) -> Workload:
    return Workload(
        module=module.train(),
        batches=list(zip(_floats(3, IMAGE, IMAGE), _classes(10), strict=True)),
        loss=lambda logits, batch: F.cross_entropy(logits, batch[1]),
        optimizer=adamw,
    )


def litgpt() -> Workload:
    from litgpt import GPT, Config

    config = Config(
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        block_size=SEQ,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        rotary_percentage=1.0,
    )
    return _next_token(GPT(config))


def _next_token(module: nn.Module, optimizer: Callable[..., Any] = adamw) -> Workload:
    """Logits of (inputs, targets)."""
    return Workload(
        module=module.train(),
        batches=[(ids[:, :-1], ids[:, 1:]) for ids in _tokens(SEQ + 1)],
        loss=lambda logits, batch: F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten()),
        optimizer=optimizer,
    )


def nanogpt() -> Workload:
    """Model and loss in one call, as nanoGPT's: `model(idx, targets)` returns (logits, loss)."""
    return Workload(
        module=written.NanoGPT(VOCAB, SEQ, WIDTH, layers=LAYERS, heads=HEADS),
        batches=[(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in _tokens(SEQ + 1)],
        forward=lambda module, batch: module(*batch),
        loss=lambda output, batch: output[1],
        optimizer=adamw,
    )


def nanochat() -> Workload:
    """An optimizer whose arithmetic is compiled as a whole, Muon for matrices and AdamW for the rest, as nanochat's."""
    return _next_token(written.NanoChat(VOCAB, SEQ, WIDTH, layers=LAYERS, heads=HEADS), written.MuonAdamW)


def compiled_parts() -> Workload:
    """A model whose author compiled its blocks' MLP in place and its norm as a function."""
    return _next_token(written.CompiledParts(VOCAB, SEQ, WIDTH, layers=LAYERS, heads=HEADS))


def lstm() -> Workload:
    return _next_token(written.LstmLanguageModel(VOCAB, WIDTH))


def torch_transformer() -> Workload:
    return _next_token(written.EncoderLanguageModel(VOCAB, SEQ, WIDTH, layers=LAYERS, heads=HEADS))
