"""What a step is held against where the plain one does not fit, and what is said of that."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from tools.trust.planted.step import BASE, PLAIN
from trainstep.check.reference import Reference
from trainstep.check.step import StepCheck
from trainstep.step.workload import Workload, WorkloadSource

pytestmark = pytest.mark.usefixtures("small_pool")


def without_room(when, model=PLAIN.model, built=None):
    """The plain workload, which runs out of memory in steps of which `when` says so; `built` gets their forms."""

    def build(step):
        if built is not None:
            built.append((step.attention, step.precision, step.checkpointing))
        if when(step):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PLAIN.build(step)

    return WorkloadSource("big", build, model)


def test_a_plain_step_that_does_not_fit_leaves_the_first_that_does_as_the_reference():
    judge = StepCheck(without_room(lambda step: step.attention == "eager", None), BASE)
    for change in ({"attention": "sdpa"}, {"attention": "sdpa", "optimizer": "adamw-fused"}):
        verdict = judge.judge(dataclasses.replace(BASE, **change))
        assert (verdict.is_right, verdict.notes.get("not_in_float32")) == (True, None), "it is in float32 itself"
    assert judge.reference.config.attention == "sdpa"
    half = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
    assert (half.is_right, half.notes.get("not_in_float32"), half.float32.is_right) == (True, None, True)
    assert half.columns()["reference"] == "the first step that fits, as the plain one ended with out of memory"
    assert judge.is_stood_in_for
    assert StepCheck(PLAIN, BASE).judge(BASE).columns().get("reference") is None


def test_where_the_plain_step_does_not_fit_fused_attention_in_float32_is_the_reference():
    """A step in bf16 was its own reference, so that nothing could be wrong with it."""
    built = []

    def build(step, scale=1.0):
        built.append((step.attention, step.precision, step.checkpointing))
        if step.attention == "eager":
            raise torch.OutOfMemoryError("no room\nfor it")
        workload = PLAIN.build(step)
        if step.precision == "bf16":
            workload.module.blocks[0].attention.query.weight.register_hook(lambda gradient: scale * gradient)
        return workload

    for scale, is_right in ((1.0, True), (1.3, False)):
        judge = StepCheck(WorkloadSource("big", partial(build, scale=scale), PLAIN.model), BASE)
        built.clear()
        for _ in range(2):
            verdict = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
            assert verdict.is_right is is_right
            assert verdict.columns()["reference"] == (
                "the plain step with PyTorch's fused attention, as the plain one ended with out of memory"
            )
        assert built[:3] == [("eager", "fp32", "none"), ("eager", "fp32", "every-1"), ("sdpa", "fp32", "none")]
        assert not any(form[0] == "eager" for form in built[3:]), "they would not fit the second time either"


def test_where_the_plain_step_does_not_fit_the_same_with_blocks_computed_again_is_the_reference():
    """Fused attention was: its own roundings are inside one operator, where no random ones reach, and ours was called
    wrong for them."""

    judge = StepCheck(without_room(lambda step: step.attention == "eager" and step.checkpointing == "none"), BASE)
    verdict = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16", checkpointing="selective"))
    assert verdict.is_right
    reference = judge.reference
    assert (reference.config.attention, reference.config.checkpointing) == ("eager", "every-1")
    said = "the plain step with every block computed again, as the plain one ended with out of memory"
    assert verdict.columns()["reference"] == said
    plain = Reference(PLAIN, BASE).places[0].gradients.by_name
    assert all(torch.equal(gradient, plain[name]) for name, gradient in reference.places[0].gradients.by_name.items())


class Routed(nn.Module):
    """A mixture of experts: which tokens an expert gets decides its shapes."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(32, 8), nn.Parameter(torch.randn(8, 32, 32) / 6)

    def forward(self, x):
        tokens = x.reshape(-1, 32)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for expert, weight in enumerate(self.experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            mixed = (tokens[token] @ weight.to(tokens.dtype)).tanh().to(weights.dtype) * weights[token, place, None]
            out = out.index_add(0, token, mixed.to(out.dtype))
        return x + out.reshape(x.shape)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Routed() for _ in range(3)), nn.Linear(32, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_experts_get_the_same_tokens_where_the_reference_computes_blocks_again():
    """Random roundings were others the second time, and what was refused then was the judged step."""
    batches = [(torch.randn(16, 64, 32, generator=torch.Generator().manual_seed(seed)),) for seed in range(3)]

    def build(step):
        if step.checkpointing == "none" and step.precision == "fp32":
            raise torch.OutOfMemoryError("no room")
        torch.manual_seed(step.seed)
        loss = lambda outputs, batch: (outputs - 0.3).square().mean()  # noqa: E731
        return Workload(Experts(), batches, loss=loss, optimizer=partial(torch.optim.AdamW, lr=1e-3))

    verdict = StepCheck(WorkloadSource("own", build), BASE).judge(dataclasses.replace(BASE, precision="bf16"))
    assert verdict.is_right
    assert verdict.columns()["reference"].startswith("the plain step with every block computed again")


def test_where_the_plain_step_fits_with_the_step_s_checkpointing_alone_that_is_the_reference():
    """A step in bf16 was its own reference here, too."""

    judge = StepCheck(without_room(lambda step: step.checkpointing != "selective"), BASE)
    verdict = judge.judge(dataclasses.replace(BASE, checkpointing="selective", precision="bf16"))
    assert verdict.is_right
    assert (judge.reference.config.precision, judge.reference.config.checkpointing) == ("fp32", "selective")
    said = "the plain step with its checkpointing, as the plain one ended with out of memory"
    assert verdict.columns()["reference"] == said
    assert not judge.is_stood_in_for


def test_a_plain_step_that_has_fused_attention_is_no_other_one():
    fused = dataclasses.replace(BASE, attention="sdpa")
    judge = StepCheck(PLAIN, fused)
    assert not judge.is_stood_in_for
    assert judge.judge(fused).columns().get("reference") is None
    assert not judge.is_stood_in_for


def test_a_form_that_did_not_fit_is_not_tried_for_the_next_step():
    is_large, built = lambda step: step.precision == "fp32" or step.optimizer == BASE.optimizer, []
    judge = StepCheck(without_room(is_large, built=built), BASE)
    half = dataclasses.replace(BASE, attention="sdpa", precision="bf16")
    with pytest.raises(torch.OutOfMemoryError):
        judge.judge(half)
    assert judge.judge(dataclasses.replace(half, optimizer="adamw-fused")).is_right
    assert [each[:2] for each in built].count(("eager", "fp32")) == 2, "as it is, and with blocks computed again"


def test_a_form_in_float32_that_does_not_fit_is_said():
    judge = StepCheck(without_room(lambda step: step.attention == "sdpa" and step.precision == "fp32", None), BASE)
    found = judge.judge(dataclasses.replace(BASE, attention="sdpa", precision="bf16"))
    assert found.is_right
    assert found.float32 is None
    assert found.columns()["not_in_float32"] == "out of memory: CUDA out of memory"
    assert found.columns()["float32_error"] is None


def test_where_only_16_bits_fit_it_is_said_why_nothing_was_judged_in_float32():
    judge = StepCheck(without_room(lambda step: step.precision != "bf16-pure", None), BASE)
    narrow = dataclasses.replace(BASE, precision="bf16-pure")
    for _ in range(2):
        verdict = judge.judge(narrow)
        assert verdict.is_right
        assert verdict.notes["not_in_float32"] == "out of memory: CUDA out of memory"
