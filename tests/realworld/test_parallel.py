"""`bench parallel` on models of transformers: what a Trainer holds, experts, 0-dim parameters, masks by numpy."""

import functools
import os
from unittest import mock

import pytest
import torch

from tools.trust.planted.parallel import quick
from trainstep import Workload
from trainstep.base.config import StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.run import run_cases
from trainstep.rows.records import SoFar
from trainstep.step.workload import WorkloadSource

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.realworld, pytest.mark.distributed]

ADAMW = functools.partial(torch.optim.AdamW, lr=3e-4)
SMALL = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _tokens():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (4, 16), generator=generator) for _ in range(6)]


def _with_keywords(module, batches):
    return Workload(module, batches, lambda out, _: out.loss, ADAMW, lambda module, batch: module(**batch))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    return _with_keywords(MixtralForCausalLM(config), [{"input_ids": each, "labels": each} for each in _tokens()])


def llama_bf16():
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(LlamaConfig(**SMALL)).to(torch.bfloat16)
    return _with_keywords(module, [{"input_ids": each, "labels": each} for each in _tokens()])


def trainer(folder="/nonexistent"):
    """As a Trainer under torchrun holds it: its loader shards by rank."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for each in _tokens() for row in each] * 2
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, use_cpu=True, report_to=[])
    holder = Trainer(LlamaForCausalLM(LlamaConfig(**SMALL)), arguments, train_dataset=data)
    return _with_keywords(holder.model, holder.get_train_dataloader())


def clip():
    """Its logit_scale has no dimension, and its loss looks across the batch."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**small, "vocab_size": 128, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config={**small, "image_size": 16, "patch_size": 8}, projection_dim=16)
    images = torch.randn(6, 4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    batches = [
        {"input_ids": tokens, "pixel_values": image, "return_loss": True}
        for tokens, image in zip(_tokens(), images, strict=True)
    ]
    return _with_keywords(CLIPModel(config), batches)


def wav2vec2():
    """Masks by numpy's numbers, and leaves out layers at random."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.3, mask_time_length=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"input_values": torch.randn(4, 1600, generator=generator), "labels": torch.randint(1, 32, (4, 8))}
        for _ in range(6)
    ]
    return _with_keywords(Wav2Vec2ForCTC(config), batches)


def rows_of(process, make, precision, schemes):
    torchruns = {"RANK": process.rank, "LOCAL_RANK": process.rank, "WORLD_SIZE": process.world_size}
    torchruns |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}  # what accelerate asks for, and does not use here

    def build(step):
        torch.manual_seed(step.seed)
        return make()

    config = StepConfig(device="cpu", precision=precision)
    cases = [ParallelCase(WorkloadSource("w", build), config, SCHEMES[name], warmup=1, steps=1) for name in schemes]
    with quick(), mock.patch.dict(os.environ, {name: str(each) for name, each in torchruns.items()}):
        rows = [row for row in run_cases(cases, process) if not isinstance(row, SoFar)]
    return {row.scheme: row for row in rows if row.kind == "parallel"}


ALL = ("single", "flat", "bucketed-25", "sharded-optimizer", "fsdp", "torch-ddp", "torch-zero", "torch-fsdp2")


@pytest.mark.thorough
@pytest.mark.parametrize("make", [mixtral, trainer, clip, wav2vec2, llama_bf16], ids=lambda make: make.__name__)
def test_every_scheme_is_right_or_named_for_what_it_cannot_do(two, make, tmp_path):
    given = functools.partial(make, str(tmp_path)) if make is trainer else make
    found = two.run(rows_of, given, "bf16-pure" if make is llama_bf16 else "fp32", ALL)[0]
    failed = {name: row.reason for name, row in found.items() if row.status != "ok"}
    if make is clip:
        assert "takes no parameter without dimensions, such as logit_scale" in failed.pop("torch-fsdp2")
    if make is wav2vec2:
        for name in ("fsdp", "torch-fsdp2"):
            failed.pop(name, None)  # a layer that one rank leaves out is one that others wait for
    assert failed == {}
    row = found["flat"]
    assert (row.batches is None) is (make is not trainer)
    if make is wav2vec2:
        assert row.share_difference is None, "its masks are drawn anew"
    else:
        assert (row.share_difference > 0.01) is (make is clip), row.share_difference
