"""A user's step traced without data: its bytes are those that are measured, whatever the model; else it says so."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trainstep import Workload
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.bench.memory import measure_peaks, peak_records
from trainstep.bench.tracing import _KEPT_GROUPS, _groups, trace_step, traced_cases
from trainstep.parallel.fsdp.checks import MAX_PREFETCH
from trainstep.parallel.fsdp.shards import plan_groups
from trainstep.plan.memory import peak_bytes
from trainstep.plan.strategies import kept_groups
from trainstep.report.subjects.memory import PEAKS
from trainstep.report.tables import make_table
from trainstep.step.workload import WorkloadSource, builtin_source, factory_source

OWN = factory_source("examples.own_model:workload")
CPU = StepConfig(device="cpu")


def source_of(make, *, shape=(8, 16), optimizer=torch.optim.AdamW):
    """A workload of one module on random batches, its loss the mean square."""

    def build(step):
        torch.manual_seed(step.seed)
        random = torch.Generator().manual_seed(1)
        batches = [torch.randn(*shape, generator=random) for _ in range(4)]
        return Workload(
            module=make(),
            batches=batches,
            forward=lambda module, batch: module(batch),
            loss=lambda output, batch: output.square().mean(),
            optimizer=functools.partial(optimizer, lr=1e-3),
        )

    return WorkloadSource("own", build)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16-pure"},
        {"checkpointing": "every-1"},
        {"checkpointing": "selective"},
        {"optimizer": "adamw-fused"},
    ],
    ids=str,
)
def test_the_predicted_peak_is_the_measured_one(settings):
    config = StepConfig(device="cpu", **settings)
    traced, measured = trace_step(OWN, config), measure_peaks(OWN, config, "step")
    assert traced.peak == pytest.approx(measured.peak, rel=1e-3)
    assert {name: traced.peak_of(name) for name in traced.moments} == pytest.approx(measured.by_phase, rel=1e-3)
    assert traced.at_rest == pytest.approx(measured.before, rel=1e-3)
    assert "without data" in traced.basis
    assert "run" not in traced.basis


@pytest.mark.parametrize("mode", ["forward", "forward-backward"])
def test_other_modes_are_predicted_too(mode):
    assert trace_step(OWN, CPU, mode).peak == pytest.approx(measure_peaks(OWN, CPU, mode).peak, rel=1e-3)


def test_what_is_frozen_has_neither_gradient_nor_state_and_what_is_shared_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
            self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
            self.again = self.second
            self.register_buffer("scale", torch.ones(16))

        def forward(self, x):
            return self.again(self.first(self.second(self.first(self.frozen(x) * self.scale))))

    traced = trace_step(source_of(Tied), CPU)
    trained = 4 * 2 * 16 * 32
    assert traced.parameters == 2 * 16 * 32 + 16 * 16
    assert traced.trained_bytes == traced.gradients == trained
    assert traced.weights == trained + 4 * 16 * 16 + 4 * 16
    assert traced.optimizer_state == 2 * trained + 2 * 4  # and two step counters
    assert traced.batch == 4 * 8 * 16
    assert traced.flops == 2 * 8 * (16 * 16 + 11 * 16 * 32), "four products, with no gradient of what is frozen"


class Routed(nn.Module):
    """How many rows go where depends on the data."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x):
        chosen = self.gate(x).squeeze(-1) > 0
        return x.index_add(0, chosen.nonzero().squeeze(-1), self.expert(x[chosen]))


@pytest.mark.parametrize("make", [Routed, lambda: nn.Sequential(nn.LSTM(16, 16), First())], ids=["routed", "lstm"])
def test_what_cannot_be_traced_without_data_is_run(make):
    source = source_of(make)
    traced = trace_step(source, CPU)
    assert "one step was run" in traced.basis
    assert traced.peak == measure_peaks(source, CPU, "step").peak


class Looks(nn.Linear):
    """Decides by whole numbers: positions that it makes, or lengths that it has."""

    def __init__(self, has_lengths):
        super().__init__(16, 16)
        self.register_buffer("lengths", torch.tensor([8, 5]) if has_lengths else None)

    def forward(self, x):
        if self.lengths is None:
            return x if (torch.arange(len(x)).diff() != 1).any() else super().forward(x)
        return super().forward(x[: int(self.lengths.max())])


@pytest.mark.parametrize("has_lengths", [False, True], ids=["positions", "lengths"])
def test_whole_numbers_that_code_looks_at_are_known_without_data(has_lengths):
    source = source_of(functools.partial(Looks, has_lengths))
    traced = trace_step(source, CPU)
    assert "without data" in traced.basis
    assert traced.peak == measure_peaks(source, CPU, "step").peak


class Placed(nn.Module):
    """Blocks that are told the positions of their elements."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Place() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, torch.arange(len(x)))
        return x


class Place(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)

    def forward(self, x, positions):
        return super().forward(x + positions[:, None]).pow(2)


@pytest.mark.parametrize("how", [{}, {"precision": "bf16", "for_gpu": True}], ids=["here", "on a GPU"])
@pytest.mark.parametrize("policy", ["every-1", "selective"])
def test_blocks_that_know_positions_are_checkpointed_without_data(policy, how):
    """What checkpointing compares of them has its data too, and what runs again has the same operators."""
    config = StepConfig(device="cpu", checkpointing=policy, precision=how.get("precision", "fp32"))
    traced = trace_step(source_of(Placed), config, for_gpu=bool(how))
    assert "without data" in traced.basis
    assert how or traced.peak == measure_peaks(source_of(Placed), config, "step").peak


class Attends(nn.Module):
    """Attention with dropout, of 4 heads, and of a mask where it has one."""

    def __init__(self, mask=None):
        super().__init__()
        self.project, self.mask = nn.Linear(16, 64), mask

    def forward(self, x):
        q = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, self.mask, dropout_p=0.1)


def kept(source, **how):
    """Bytes alive at the end of forward, and the names of what was called."""
    traced = trace_step(source, StepConfig(device="cpu", **how), for_gpu=True)
    assert "without data, with CUDA kernels" in traced.basis
    plain = trace_step(source, StepConfig(device="cpu", **how))
    own, ours = (max(each.other for each in one.moments["loss"]) for one in (plain, traced))
    return own - ours, {each.name for each in traced.operators}


@pytest.mark.parametrize(
    ("make", "precision", "name"),
    [
        (Attends, "fp32", "efficient"),
        (Attends, "bf16", "flash"),
        (lambda: Attends(torch.ones(64, 64).tril() > 0), "bf16-pure", "efficient"),
        (lambda: nn.TransformerEncoderLayer(16, 4, 16, batch_first=True), "fp32", "efficient"),
    ],
    ids=["fp32", "bf16", "mask", "layer"],
)
def test_a_plan_for_a_gpu_keeps_no_scores(make, precision, name):
    saved, names = kept(source_of(make, shape=(2, 64, 16)), precision=precision)
    assert f"aten::_scaled_dot_product_{name}_attention" in names
    assert not {each for each in names if "softmax" in each}
    assert saved > 2 * 4 * 64 * 64 * (2 if "bf16" in precision else 4), "more than one matrix of scores"


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_a_plan_for_a_gpu_updates_all_parameters_in_one_pass(optimizer):
    """Some optimizers have such a pass and no fused form."""
    _, names = kept(source_of(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), optimizer=optimizer))
    assert any(each.startswith("aten::_foreach_") for each in names)


def test_a_plan_for_a_gpu_keeps_dropout_by_bytes_and_norms_in_float32():
    saved, _ = kept(source_of(lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))))
    assert saved == 3 * (8 * 16), "a mask of booleans"
    saved, _ = kept(source_of(lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))), precision="bf16")
    assert saved < 0, "its input and its result in float32"


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


def test_a_factory_that_fails_on_fake_tensors_is_built_as_it_is():
    """As one that makes its weights bf16: torch cannot swap fake parameters, which a factory says as a UsageError."""

    def refuses():
        module = nn.Linear(16, 16)
        if isinstance(module.weight, FakeTensor):
            raise UsageError("the factory failed")
        return module

    traced = trace_step(source_of(refuses), CPU, only_shapes=True)
    assert "run" not in traced.basis


def test_it_is_not_run_where_there_is_no_room(monkeypatch):
    monkeypatch.setattr("trainstep.bench.tracing.REAL_BYTES_SHARE", 0.0)
    with pytest.raises(UnsupportedError, match=r"too large to be run here.*nonzero"):
        trace_step(source_of(Routed), CPU)


def test_a_model_larger_than_this_machine_is_traced():
    width = 2**18
    traced = trace_step(source_of(lambda: nn.Linear(width, width), shape=(4, width)), CPU, only_shapes=True)
    assert traced.weights == 4 * (width * width + width)
    assert traced.peak >= 4 * traced.weights


class Masked(nn.Module):
    """Attention under a mask that it makes from positions; on tensors without data nothing says what is in it."""

    def __init__(self):
        super().__init__()
        self.width = nn.Parameter(torch.ones(16))

    def forward(self, x):
        at = torch.arange(x.shape[-2])
        x = x * self.width
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=at[:, None] >= at)


def test_a_large_models_masks_are_taken_for_causal(monkeypatch):
    """transformers' decoders make a mask where a step is traced on tensors without data."""
    source = source_of(Masked, shape=(2, 3, 8, 16))
    expected = trace_step(source, CPU)
    assert "run" in expected.basis
    monkeypatch.setattr("trainstep.bench.tracing.REAL_BYTES_SHARE", 0.0)
    traced = trace_step(source, CPU, only_shapes=True)
    assert "attention under a mask taken for causal" in traced.basis
    assert traced.flops == expected.flops > 0


def test_a_model_without_room_is_never_built_as_it_is(monkeypatch):
    real = []

    def routed():
        module = Routed()
        real.append(not isinstance(next(module.parameters()), FakeTensor))
        return module

    monkeypatch.setattr("trainstep.bench.tracing.REAL_BYTES_SHARE", 0.0)
    with pytest.raises(UnsupportedError, match=r"too large to be run here.*nonzero"):
        trace_step(source_of(routed), CPU, only_shapes=True)
    assert real == [False]


def test_what_the_author_compiled_is_traced_as_it_is_written():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.inner.compile(fullgraph=True)

        def forward(self, x):
            return self.inner(x)

    assert trace_step(source_of(Compiled), CPU).gradients == 4 * 17 * 16
    with pytest.raises(UnsupportedError, match="--compile off"):
        trace_step(OWN, StepConfig(device="cpu", compile="model"))


def test_a_mistake_in_the_workload_is_the_users():
    with pytest.raises(UsageError, match="fixes its own context"):
        trace_step(OWN, StepConfig(device="cpu", context=17))


@pytest.mark.parametrize(("precision", "attention"), [("fp32", "eager"), ("bf16", "eager"), ("fp32", "sdpa")])
def test_the_built_in_model_traced_and_by_formula_agree(precision, attention):
    model = ModelConfig(vocab_size=512, d_model=64, d_ff=256, num_layers=3, num_heads=4)
    step = StepConfig(batch=4, context=64, precision=precision, attention=attention, device="cpu")
    traced = trace_step(builtin_source("toy", model), step)
    assert traced.peak == pytest.approx(peak_bytes(model, step, on_cuda=False).peak, rel=0.01)
    forward = sum(each.count * each.flops for each in traced.operators if each.phase == "forward")
    masked = 0 if attention == "sdpa" else 2 * 3 * step.batch * 64 * 64 * 64  # of 3 layers: computed, but counted half
    assert traced.flops == pytest.approx(3 * (forward - masked), rel=1e-3)
    assert traced.groups == 3 + 3  # blocks, and embedding, last norm, head
    assert traced.kept_groups == 4 * (kept_groups(model) + model.d_model), "the last block, norm and head"


def test_groups_are_those_that_fsdp_gathers_and_keeps():
    """The rooms above may not import it, and list them by themselves."""
    module = (
        builtin_source("toy", ModelConfig(vocab_size=512, d_model=64, d_ff=256, num_layers=3, num_heads=4))
        .build(StepConfig(device="cpu"))
        .module
    )
    assert _groups(module) == [sum(each.parameter.nbytes for each in group.parameters) for group in plan_groups(module)]
    assert _KEPT_GROUPS == 1 + MAX_PREFETCH


def test_a_tied_weight_is_in_one_group():
    model = torch.nn.Module()
    model.embedding, model.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)
    model.head.weight = model.embedding.weight
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    assert _groups(model) == [4 * 9 * 4, 4 * 20, 4 * 20]


def test_rows_of_a_users_peaks_have_predictions():
    again = StepConfig(device="cpu", checkpointing="every-1")
    rows = list(peak_records(OWN, [CPU, again], ["forward", "step"]))
    assert [row.status for row in rows] == ["ok"] * 4
    assert max(abs(row.prediction_error) for row in rows) < 1e-3
    assert rows[3].predicted_gib < rows[1].predicted_gib


def test_rows_say_why_there_is_no_prediction(monkeypatch):
    monkeypatch.setattr("trainstep.bench.tracing.REAL_BYTES_SHARE", 0.0)
    (row,) = peak_records(source_of(Routed), [CPU], ["step"])
    assert row.predicted_gib is None
    assert "cannot be traced" in row.not_predicted
    assert row.peak_gib > 0
    (line,) = make_table(PEAKS, [row], "terminal").texts()
    assert any("cannot be traced" in cell for cell in line), line
    own = make_table(PEAKS, list(peak_records(OWN, [CPU], ["forward"])), "terminal")
    assert "not predicted" not in own.columns


def test_policies_are_traced_as_far_as_they_can_be():
    found = traced_cases(OWN, StepConfig(device="cpu", precision="bf16"))
    assert list(found) == ["none", "every-1", "selective"]
    assert found["every-1"].step.peak < found["selective"].step.peak < found["none"].step.peak
    assert found["none"].sharded.weights == found["none"].step.weights // 2
    without_blocks = source_of(lambda: nn.Linear(16, 16))
    assert list(traced_cases(without_blocks, CPU)) == ["none"]
    with pytest.raises(UnsupportedError, match="needs blocks"):
        traced_cases(without_blocks, CPU, ["every-1"])
