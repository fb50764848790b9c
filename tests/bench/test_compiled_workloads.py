"""Workloads that compile code of their own, and insist on it, are measured; what ran eagerly for that is said."""

import functools
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainstep import Workload
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.bench.allocations import allocation_records
from trainstep.bench.dtypes import dtype_records
from trainstep.bench.memory import peak_records
from trainstep.bench.profile import profile_records
from trainstep.bench.residuals import residual_records
from trainstep.bench.step import StepCase, run_cases
from trainstep.check.step import StepCheck
from trainstep.measure.collectives import recorded_collectives
from trainstep.report.subjects.memory import uncompiled_findings
from trainstep.step.training_step import build_step
from trainstep.step.workload import WorkloadSource, builtin_source

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")

CONFIG = StepConfig(device="cpu")
POLICIES = [StepConfig(device="cpu", checkpointing=name) for name in ("none", "every-1", "selective")]


@torch.compile(fullgraph=True, dynamic=False)
def decay(weight, gradient, rate):
    weight.sub_(gradient * rate)


class Compiled(torch.optim.Optimizer):
    """Its arithmetic is compiled as a whole, as nanochat's."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                decay(weight, weight.grad, torch.tensor(group["lr"]))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, is_compiled):
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(1))
        for layer in self.layers if is_compiled else ():
            layer.compile(fullgraph=True)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def source(is_compiled=True, optimizer=Compiled):
    def build(step):
        torch.manual_seed(step.seed)
        return Workload(
            module=Model(is_compiled),
            batches=[(torch.ones(4, 8, 16),)],
            loss=lambda output, batch: output.square().mean(),
            optimizer=optimizer,
        )

    return WorkloadSource("toy", build)


NEEDS_NO_GRADIENT = "the first block's gradients are not seen, as its input needs no gradient"


def found(records):
    rows = list(records)
    assert {row.reason for row in rows if row.status != "ok"} <= {NEEDS_NO_GRADIENT}
    return rows


@pytest.mark.parametrize(
    "records",
    [
        functools.partial(peak_records, configs=POLICIES, modes=["step"]),
        functools.partial(allocation_records, config=CONFIG),
        functools.partial(dtype_records, configs=[CONFIG]),
        functools.partial(residual_records, config=CONFIG),
        functools.partial(profile_records, config=CONFIG, warmup=1, steps=1, profiled_steps=1),
    ],
    ids=["peaks", "timeline", "dtypes", "residuals", "profile"],
)
def test_every_instrument_measures_it(records):
    assert found(records(source()))


@pytest.mark.thorough
def test_its_step_has_the_flops_and_the_peak_of_eager_code_and_says_so():
    [own] = found(run_cases([StepCase(source(), CONFIG, warmup=1, steps=1)]))
    [eager] = found(run_cases([StepCase(source(False, torch.optim.SGD), CONFIG, warmup=1, steps=1)]))
    assert own.model_tflop == eager.model_tflop > 0
    assert own.backward_peak_gib == eager.backward_peak_gib > 0
    assert (own.uncompiled, eager.uncompiled) == (True, None)
    [finding] = uncompiled_findings([own, eager])
    assert finding.figures["count"] == 1
    assert uncompiled_findings([eager]) == []


def test_its_rounding_is_measured():
    assert StepCheck(source(), CONFIG).judge(StepConfig(device="cpu", precision="bf16")).is_right


def test_recording_collectives_leaves_it_compiled():
    weight, gradient = torch.ones(3), torch.ones(3)
    with recorded_collectives() as calls:
        decay(weight, gradient, torch.tensor(0.5))
    assert calls == []
    assert torch.equal(weight, torch.full((3,), 0.5))


def _kept(compile):
    """Of a step of our model: the bytes that backward finds, without weights, and the gradients."""
    model = ModelConfig(vocab_size=256, d_model=32, d_ff=96, num_layers=2, num_heads=2)
    config = StepConfig(batch=2, context=64, precision="bf16-pure", attention="sdpa", compile=compile, device="cpu")
    step = build_step(builtin_source("small", model), config)
    weights = {each.untyped_storage().data_ptr() for each in step.module.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(128).view(2, 64) % 256
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.module(ids).float().logsumexp(-1).mean()
    loss.backward()
    return sum(kept.values()), [each.grad.float() for each in step.module.parameters()]


def test_blocks_that_recompute_keep_less_and_have_the_same_gradients():
    plain, expected = _kept("blocks")
    less, gradients = _kept("blocks-recompute")
    per_block = 128 * (32 + 32 + 96) * 2  # both norms' results and the SwiGLU's product, bf16
    assert plain - less >= 2 * per_block
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=2**-6, atol=float(wanted.abs().max()) * 2**-7)
