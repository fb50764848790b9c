"""The formulas against bytes counted on a CPU: each storage that operators make, from creation to release."""

import dataclasses
from pathlib import Path

import pytest
import torch

from trainstep.base.config import SIZES, ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.bench.attention import AttentionTurns
from trainstep.bench.cases import AttentionCase
from trainstep.measure.memory import parameter_bytes, residuals, step_memory
from trainstep.plan.memory import block_bytes, eager_memory, flash_memory, peak_bytes, static_bytes
from trainstep.step.model.transformer import build_transformer
from trainstep.step.training_step import build_step
from trainstep.step.weights import optimizer_state_tensors
from trainstep.step.workload import builtin_source

BLOCK = ModelConfig(vocab_size=256, d_model=64, d_ff=160, num_layers=1, num_heads=2, max_context=48)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash-reference"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_a_block_keeps_exactly_the_bytes_of_the_formula(precision, attention):
    step = StepConfig(batch=3, context=48, precision=precision, attention=attention)
    torch.manual_seed(0)
    model = build_transformer(BLOCK, impl=attention)
    pure = precision == "bf16-pure"
    if pure:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    x = torch.randn(3, 48, 64, dtype=torch.bfloat16 if pure else torch.float32, requires_grad=True)
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    with torch.autocast("cpu", half, enabled=precision in ("bf16", "fp16")):
        kept, _ = residuals(lambda: model.blocks[0](x, model.rotary), model)
    assert block_bytes(BLOCK, step, on_cuda=False).kept == kept.bytes


def measured(model, config, mode="step"):
    step = build_step(builtin_source("toy", model, Path(__file__)), config)
    batch = step.next_batch()
    step(batch, mode=mode)  # makes the optimizer's state
    resident = [*step.module.parameters(), *step.module.buffers(), *optimizer_state_tensors(step.optimizer)]
    return step_memory(lambda phase: step(batch, mode=mode, phase=phase), step.device, resident), step


SHAPES = {  # which moment is the peak
    "scores": (ModelConfig(vocab_size=256, d_model=32, d_ff=48, num_layers=5, num_heads=4), 1, 384, "sgd"),
    "feed-forward": (ModelConfig(vocab_size=300, d_model=64, d_ff=256, num_layers=5, num_heads=4), 4, 64, "sgd"),
    "logits": (ModelConfig(vocab_size=3000, d_model=32, d_ff=96, num_layers=2, num_heads=2), 3, 64, "adamw-foreach"),
    "weights": (ModelConfig(vocab_size=300, d_model=192, d_ff=512, num_layers=3, num_heads=4), 1, 16, "sgd"),
    "denominators": (ModelConfig(vocab_size=300, d_model=192, d_ff=512, num_layers=3, num_heads=4), 1, 16,
                     "adamw-foreach"),
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", ["none", "every-1"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_peak_is_within_half_a_percent(shape, precision, attention, checkpointing):
    model, batch, context, optimizer = SHAPES[shape]
    settings = {"precision": precision, "attention": attention, "checkpointing": checkpointing, "optimizer": optimizer}
    config = StepConfig(batch=batch, context=context, device="cpu", **settings)
    found, _ = measured(model, config)
    predicted = peak_bytes(model, config, on_cuda=False)
    assert predicted.peak == pytest.approx(found.peak, rel=0.005)
    moments = predicted.moments
    assert moments["loss"] == pytest.approx(found.by_phase["loss"], rel=0.005)
    in_backward = max(value for name, value in moments.items() if name not in ("loss", "optimizer"))
    assert in_backward == pytest.approx(found.by_phase["backward"], rel=0.005)


FORWARDS = {  # which moment of a forward pass without gradients is the peak
    "scores": (ModelConfig(vocab_size=256, d_model=32, d_ff=48, num_layers=2, num_heads=4), 1, 384),
    "feed-forward": (ModelConfig(vocab_size=300, d_model=64, d_ff=256, num_layers=2, num_heads=2), 4, 64),
    "head": (ModelConfig(vocab_size=3000, d_model=32, d_ff=96, num_layers=2, num_heads=2), 3, 64),
    "rotation": (ModelConfig(vocab_size=256, d_model=256, d_ff=64, num_layers=2, num_heads=2), 2, 32),
    "weighted sum": (ModelConfig(vocab_size=256, d_model=64, d_ff=16, num_layers=2, num_heads=2), 8, 48),
}


@pytest.mark.parametrize("checkpointing", ["none", "every-1"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("shape", FORWARDS)
def test_the_peak_of_forward_alone_is_within_a_percent(shape, precision, attention, checkpointing):
    """Token ids are most of what is left out of so small a model."""
    model, batch, context = FORWARDS[shape]
    settings = {"precision": precision, "attention": attention, "checkpointing": checkpointing}
    config = StepConfig(batch=batch, context=context, device="cpu", **settings)
    found, _ = measured(model, config, "forward")
    predicted = peak_bytes(model, config, on_cuda=False, mode="forward")
    assert predicted.peak == pytest.approx(found.peak, rel=0.01)
    above = predicted.peak - predicted.static.at_rest - 4 * context * model.head_dim
    assert above == found.peak - found.before, "beyond what is at rest it is exact"
    if (precision, attention) == ("fp32", "eager"):
        assert predicted.moment == shape


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_peak_without_an_optimizer_is_within_half_a_percent(shape, precision):
    model, batch, context, optimizer = SHAPES[shape]
    config = StepConfig(batch=batch, context=context, precision=precision, optimizer=optimizer, device="cpu")
    found, _ = measured(model, config, "forward-backward")
    assert peak_bytes(model, config, on_cuda=False, mode="forward-backward").peak == pytest.approx(
        found.peak, rel=0.005
    )


@pytest.mark.parametrize(
    ("precision", "context", "measured_gib"),
    [
        *(("fp32", 128, 12.9216), ("fp32", 512, 13.2669), ("fp32", 2048, 17.4349)),
        *(("bf16", 128, 19.1943), ("bf16", 512, 19.3753), ("bf16", 2048, 24.3231)),
    ],
)
def test_the_peak_of_forward_on_an_h200(precision, context, measured_gib):
    """2.7B, batch 4, of docs/results/h200-memory.jsonl. Beside it are the workspaces of CUDA's libraries, 64 MiB, and q
    and k before their rotation, which the model of that commit kept."""
    step = StepConfig(batch=4, context=context, precision=precision)
    predicted = peak_bytes(SIZES["2.7B"], step, on_cuda=True, mode="forward").peak
    assert predicted / 2**30 == pytest.approx(measured_gib, rel=0.02)
    assert predicted / 2**30 < measured_gib


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-fused", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_static_bytes_are_those_of_the_tensors(precision, optimizer):
    found, step = measured(BLOCK, StepConfig(batch=1, context=16, precision=precision, optimizer=optimizer,
                                             device="cpu"))  # fmt: skip
    static = static_bytes(BLOCK.num_parameters, precision, optimizer)
    assert static.weights == static.gradients == parameter_bytes(step.module)
    state = [each for each in optimizer_state_tensors(step.optimizer) if each.dim() > 0]  # without step counters
    assert static.optimizer_state == sum(each.nbytes for each in state)
    assert static.at_rest == pytest.approx(found.before, rel=0.05), "rotary tables and counters besides"


def test_the_published_example_of_the_residual_stream():
    """2.7B, context 2048, batch 4: a checkpoint of one block's input is 80 MiB in float32."""
    one = StepConfig(batch=4, context=2048, checkpointing="every-1", attention="sdpa")
    models = (SIZES["2.7B"], dataclasses.replace(SIZES["2.7B"], num_layers=31))
    peaks = [peak_bytes(model, one, on_cuda=True) for model in models]
    activations = [peak.moments["log-softmax"] - peak.static.at_rest for peak in peaks]
    assert activations[0] - activations[1] == 4 * 2048 * 2560 * 4


def test_cuda_saves_the_softmax_of_autocast_in_float32():
    step = StepConfig(batch=1, context=1024, precision="bf16")
    cpu, cuda = (block_bytes(SIZES["small"], step, on_cuda=on_cuda) for on_cuda in (False, True))
    scores = 12 * 1024**2
    assert cuda.attention_half - cpu.attention_half == 4 * scores - 4 * 1024 * 768  # and its norms are fused
    whole = [each.attention_half + each.attention_worst for each in (cpu, cuda)]
    assert whole[1] - whole[0] == (4 * 4 - 3 * 2) * scores - 4 * 1024 * 768  # P, dP, dP ∘ P and dS against P, dP and dS


@pytest.mark.parametrize(
    "settings", [{"compile": "model"}, {"loss": "chunked"}, {"checkpointing": "selective"}, {"attention": "flex"}]
)
def test_where_there_is_no_formula(settings):
    with pytest.raises(UnsupportedError, match="no memory formula"):
        peak_bytes(BLOCK, StepConfig(**settings), on_cuda=False)


@pytest.mark.parametrize("causal", ["yes", "no"])
@pytest.mark.parametrize(("seq", "head_dim"), [(64, 8), (256, 16), (48, 64)])
def test_eager_memory_is_exact(causal, seq, head_dim):
    case = AttentionCase("eager", batch=2, heads=3, seq=seq, head_dim=head_dim, causal=causal, dtype="fp32")
    (row,) = AttentionTurns("cpu").run([case], warmup=1, passes=1)
    assert row.values["before_backward_gib"] == row.values["predicted_before_backward_gib"]
    if head_dim < seq:  # else the gradients' own reductions weigh more than a score matrix
        assert row.values["peak_gib"] == row.values["predicted_peak_gib"]


def test_a_hand_count_of_one_attention_call():
    """One head, 4 tokens of 2 features, float32: T = 32 bytes, N = 64 bytes."""
    memory = eager_memory(1, 1, 4, 2, 4, is_causal=False, on_gpu=False)
    assert memory.before_backward == 5 * 32 + 64
    assert memory.peak == 6 * 32 + 3 * 64
    assert memory.score_matrices == 3
    assert eager_memory(1, 1, 4, 2, 4, is_causal=False, on_gpu=True).peak == memory.peak + 64


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["yes", "no"])
@pytest.mark.parametrize(("impl", "dtype"), [("eager", "fp32"), ("flash-triton", "bf16")])
def test_attention_memory_on_a_gpu(impl, dtype, causal):
    case = AttentionCase(impl, batch=2, heads=2, seq=2048, head_dim=64, causal=causal, dtype=dtype)
    (row,) = AttentionTurns("cuda").run([case], warmup=1, passes=1)
    assert row.values["before_backward_gib"] == pytest.approx(row.values["predicted_before_backward_gib"], rel=0.01)
    assert row.values["peak_gib"] == pytest.approx(row.values["predicted_peak_gib"], rel=0.02)


def test_flash_memory_is_linear_in_the_length():
    half, full = (flash_memory(1, 32, seq, 128, 2) for seq in (32768, 65536))
    assert full.before_backward == 2 * half.before_backward
    assert full.peak == 2 * half.peak
    assert full.before_backward == 5 * 32 * 65536 * 128 * 2 + 32 * 65536 * 4


@pytest.mark.parametrize(
    ("batch", "heads", "seq", "head_dim", "peak_gib"),  # measured on an H200 in bf16, 2026-11-24
    [(1, 16, 16384, 64, 0.330078), (1, 32, 32768, 128, 2.51562), (16, 16, 1024, 128, 0.628906)],
)
def test_flash_memory_with_the_sum_of_dq(batch, heads, seq, head_dim, peak_gib):
    memory = flash_memory(batch, heads, seq, head_dim, 2, sums_dq=True)
    assert memory.peak / 2**30 == pytest.approx(peak_gib, rel=0.005)
