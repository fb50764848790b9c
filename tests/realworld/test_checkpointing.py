"""Checkpointed blocks of libraries' models give the gradients of plain ones, bit for bit, whatever they pass around."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.realworld import models
from trainstep.checkpointing.recomputing import Checkpointing

pytestmark = pytest.mark.realworld

NAMES = (
    *("llama", "llama_eager", "gpt2", "mistral", "mixtral", "qwen3", "deepseek_v3", "whisper", "clip", "lora"),
    *("gemma2", "t5", "wav2vec2", "resnet", "unet", "x_transformers", "compiled_parts"),
)


def gradients(name: str, policy: str) -> list[Tensor]:
    pytest.importorskip(models.MODELS[name])
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    workload = getattr(models, name)()
    checkpointing = Checkpointing(workload.module, policy)
    batch = next(iter(workload.batches))
    loss = workload.loss(workload.forward(workload.module, batch), batch)
    with checkpointing.named_errors():
        loss.backward()
    given = [each.grad for each in workload.module.parameters() if each.grad is not None]
    return [loss.detach(), *given, *workload.module.buffers()]


@pytest.mark.parametrize("policy", ["selective", "every-1"])
@pytest.mark.parametrize("name", NAMES)
def test_single_blocks(name: str, policy: str) -> None:
    assert all(torch.equal(a, b) for a, b in zip(gradients(name, policy), gradients(name, "none"), strict=True))
