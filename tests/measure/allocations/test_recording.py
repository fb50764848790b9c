"""Owners of a step's allocations on a CPU, against what is known of them from elsewhere, to the byte."""

import dataclasses
from pathlib import Path

import pytest
import torch

from trainstep.base.config import PHASES_OF_MODE, ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.bench.allocations import record_step
from trainstep.bench.memory import measure_peaks
from trainstep.bench.residuals import measure_residuals
from trainstep.measure.allocations.recording import StepWatch, record_on_cpu
from trainstep.measure.step import measure_step
from trainstep.step.training_step import TrainingStep
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=3, num_heads=2)
TOY = builtin_source("toy", MODEL, Path(__file__))
STEP = StepConfig(batch=2, context=32, device="cpu")
ROTARY = 4 * 32 * MODEL.head_dim


def owners(timeline, state):
    return {owner: size for owner, (size, _) in timeline.totals(lambda each: each.owner, state).items()}


def end_of(timeline, phase):
    return next(each.end for each in timeline.phases if each.name == phase)


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bf16"}, {"checkpointing": "every-1"}, {"checkpointing": "selective", "optimizer": "sgd"}],
    ids=str,
)
def test_the_timeline_s_peaks_are_those_of_the_other_instrument(changes):
    config = dataclasses.replace(STEP, **changes)
    timeline = record_step(TOY, config).timeline
    peaks = measure_step(TOY, config, warmup=1, steps=1).memory
    batch = 8 * 2 * 33  # int64 tokens and targets share one storage of batch · (context + 1)
    assert timeline.peak - peaks.peak in (0, batch), "the other instrument may not know of the batch"
    assert timeline.phase_of(timeline.peak_state) == max(peaks.by_phase, key=peaks.by_phase.get)


@pytest.mark.parametrize("mode", PHASES_OF_MODE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_timeline_is_that_of_the_mode(mode, precision):
    config = dataclasses.replace(STEP, precision=precision)
    timeline = record_step(TOY, config, mode).timeline
    assert tuple(each.name for each in timeline.phases) == PHASES_OF_MODE[mode]
    peaks = measure_peaks(TOY, config, mode)
    assert timeline.peak - peaks.peak in (0, 8 * 2 * 33), "the other instrument may not know of the batch"
    held = {each.owner for each in timeline.allocations}
    assert ("gradients" in held) is (mode != "forward")
    assert ("optimizer state" in held) is (mode == "step")


def test_each_owner_has_the_bytes_that_arithmetic_gives():
    weights = 4 * MODEL.num_parameters
    timeline = record_step(TOY, STEP).timeline
    rest, before_backward, after = (owners(timeline, state) for state in (
        0, end_of(timeline, "loss"), end_of(timeline, "backward")))  # fmt: skip
    assert rest["parameters"] == weights + ROTARY
    moments = 2 * weights
    counters = 4 * len(list(TOY.build(STEP).module.parameters()))
    assert rest["optimizer state"] == moments + counters
    assert "gradients" not in rest
    assert after["gradients"] == weights
    residuals = measure_residuals(TOY, STEP).whole.bytes
    loss = 4
    assert before_backward["activations"] - residuals in (0, loss), "what is left alive is what backward needs"
    assert not {"unknown"} & {*rest, *before_backward, *after}
    assert "activations" not in after or after["activations"] == loss


def test_allocations_have_their_module_operation_and_line():
    timeline = record_step(TOY, STEP).timeline
    scores = 4 * 2 * 2 * 32 * 32
    softmax = [each for each in timeline.allocations if each.operation == "Softmax" and each.block.bytes == scores]
    assert {each.what for each in softmax} == {f"blocks.{layer}.attention" for layer in range(3)}
    assert all("attention/eager.py" in each.line for each in softmax), "backward is told by its forward's line"
    gradients = {each.what: each for each in timeline.allocations if each.owner == "gradients"}
    assert set(gradients) == {name for name, _ in TOY.build(STEP).module.named_parameters()}
    assert gradients["head.weight"].operation == "Mm"
    moments = {each.what for each in timeline.allocations if each.owner == "optimizer state"}
    assert {"head.weight exp_avg", "head.weight exp_avg_sq"} <= moments
    kept = next(
        each
        for each in timeline.allocations
        if each.owner == "activations" and each.what == "blocks.1.feed_forward.gate"
    )
    assert "model/transformer.py" in kept.line
    assert kept.phase == "forward"


def test_recomputed_activations_are_told_by_their_module():
    timeline = record_step(TOY, dataclasses.replace(STEP, checkpointing="every-1")).timeline
    again = [each for each in timeline.allocations if each.operation == "computed again"]
    assert {each.what for each in again if each.owner == "activations"} >= {
        "blocks.0.attention",
        "blocks.2.feed_forward",
    }
    assert {each.phase for each in again} == {"backward"}
    assert owners(timeline, end_of(timeline, "loss"))["activations"] < measure_residuals(TOY, STEP).whole.bytes / 2


def test_a_watched_step_computes_the_same():
    def gradients(is_watched):
        workload = TOY.build(STEP)
        losses = [workload.loss]
        step = TrainingStep(dataclasses.replace(workload, loss=lambda *args: losses[-1](*args)), STEP)
        batch = step.next_batch()
        if not is_watched:
            return step(batch), [each.detach().clone() for each in step.module.parameters()]
        watch = StepWatch(step.module, [step.optimizer])
        losses.append(watch.loss_of(workload.loss))
        result = []
        record_on_cpu(lambda: result.append(step(batch, phase=watch.phase)), watch, batch)
        return result[0], [each.detach().clone() for each in step.module.parameters()]

    (loss, plain), (watched_loss, watched) = gradients(False), gradients(True)
    assert torch.equal(loss, watched_loss)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_compiled_code_is_refused_on_a_cpu():
    with pytest.raises(UnsupportedError, match="use --compile off"):
        record_step(TOY, dataclasses.replace(STEP, compile="model"))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"checkpointing": "every-1"}], ids=str)
def test_on_a_gpu_nothing_of_the_peak_is_lost(changes):
    config = dataclasses.replace(STEP, device="cuda", **changes)
    recorded = record_step(TOY, config)
    assert recorded.timeline.peak == recorded.allocator_peak
    state = end_of(recorded.timeline, "backward")
    assert owners(recorded.timeline, state)["gradients"] == 4 * MODEL.num_parameters
    assert owners(recorded.timeline, state).get("unknown", 0) % 2**20 == 0, "no more than libraries' workspaces"
