"""The built-in decoder by fused operators: checked as a rung is, and what else a step is made of."""

import dataclasses

import pytest
import torch

from tests.fused.places import DEVICE, HERE
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.check.step import StepCheck, plain_form
from trainstep.measure.flops import counted_flops
from trainstep.step.model.fused import FusedBlock
from trainstep.step.model.transformer import build_transformer
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

pytestmark = HERE
MODEL = ModelConfig(vocab_size=259, d_model=16, d_ff=20, num_layers=1, num_heads=2)
STEP = StepConfig(batch=1, context=6, device=DEVICE, fused="rope", loss="fused")
SOURCE = builtin_source("toy", MODEL)


def test_a_step_is_right() -> None:
    verdict = StepCheck(SOURCE, plain_form(STEP)).judge(STEP)
    assert verdict.is_right, str(verdict)
    assert plain_form(STEP) == dataclasses.replace(STEP, fused="none", loss="dense")


def test_the_parameters_are_the_same() -> None:
    plain = build_transformer(MODEL, device="meta").state_dict()
    fused = build_transformer(MODEL, block=FusedBlock, device="meta").state_dict()
    assert {name: value.shape for name, value in plain.items()} == {name: value.shape for name, value in fused.items()}


def gradients(config):
    step = build_step(SOURCE, config)
    step.gradients(step.next_batch())
    return {name: parameter.grad for name, parameter in step.module.named_parameters()}


@pytest.mark.parametrize("checkpointing", ["every-1", "selective"])
def test_under_checkpointing(checkpointing) -> None:
    plain, again = gradients(STEP), gradients(dataclasses.replace(STEP, checkpointing=checkpointing))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_blocks_compile_into_one_graph() -> None:
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    plain = gradients(STEP)
    step = build_step(SOURCE, STEP)
    for block in step.module.blocks:
        block.compile(backend=backend, fullgraph=True)
    step.gradients(step.next_batch())
    assert len(graphs) == 1
    for name, parameter in step.module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])


def test_the_heads_products_are_counted() -> None:
    counts = []
    for loss in ("dense", "fused"):
        step = build_step(SOURCE, dataclasses.replace(STEP, loss=loss, fused="none"))
        batch = step.next_batch()
        with counted_flops() as found:
            step.gradients(batch)
        counts.append(found())
    assert counts[0] == counts[1]
