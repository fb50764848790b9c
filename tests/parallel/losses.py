"""The built-in decoder under a scheme, its loss by slices of tokens, beside one process with the plain loss."""

import dataclasses
from unittest import mock

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.fused import cross_entropy
from trainstep.parallel.replicas import full_parameters
from trainstep.step.model import transformer
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=259, d_model=16, d_ff=20, num_layers=3, num_heads=2)
SOURCE = builtin_source("little", MODEL)
STEP = StepConfig(batch=2, context=9, optimizer="sgd", learning_rate=0.5)
SLICE = 5
"""Tokens at once: four slices of a rank's, the last one shorter."""


def trained(process, scheme, **settings):
    """All parameters after three steps on all ranks, and the loss of one more batch, without gradients."""
    config = dataclasses.replace(STEP, device=process.device.type, **settings)
    by_slices = {"chunk_tokens": SLICE}
    with (
        mock.patch.dict(transformer.chunked_cross_entropy.__kwdefaults__, by_slices),
        mock.patch.object(cross_entropy, "tokens_at_once", return_value=SLICE),
    ):
        step = ParallelCase(SOURCE, config, SCHEMES[scheme]).build(process)
        for _ in range(2):
            step(step.next_batch())
        step.accumulate([step.next_batch()])
        last = float(step.evaluate([step.next_batch()]))
    return {name: value.cpu().clone() for name, value in full_parameters(step.replica, step.module)}, last


def trained_alone(ranks, device="cpu"):
    """The same in one process on the whole batch, with all logits at once."""
    step = build_step(SOURCE, dataclasses.replace(STEP, batch=STEP.batch * ranks, device=device))
    for _ in range(3):
        step(step.next_batch())
    batch = step.next_batch()
    shares = [[each.chunk(ranks)[rank] for each in batch] for rank in range(ranks)]
    return {name: value.detach().cpu() for name, value in step.module.named_parameters()}, [
        float(step.evaluate([share])) for share in shares
    ]
