"""How far gradients are from a reference, and what the check says of rungs that are right, wrong, or drop otherwise."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainstep.bench.check.step import (
    WRONG_IN_KIND,
    GradientCheck,
    Gradients,
    _LeafCalls,
    compare_gradients,
    error_budget,
)
from trainstep.config import StepConfig
from trainstep.errors import UsageError
from trainstep.training_step import build_step
from trainstep.workload import Workload, WorkloadSource

PLAIN = StepConfig(device="cpu")


def module_with_gradients(seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module(torch.randn(3, 4)).square().sum().backward()
    return module


def reference_of(module):
    return Gradients(2.0, {name: parameter.grad.clone() for name, parameter in module.named_parameters()})


def test_deviation_of_a_known_error():
    module = module_with_gradients()
    reference = reference_of(module)
    module[1].bias.grad *= 1.1
    deviation = compare_gradients(reference, 2.02, module)
    assert deviation.loss == pytest.approx(0.01)
    assert deviation.worst_name == "1.bias"
    assert deviation.worst == pytest.approx(0.1, rel=1e-4)
    norms = {name: float(grad.norm()) for name, grad in reference.by_name.items()}
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    assert deviation.gradient == pytest.approx(0.1 * norms["1.bias"] / total, rel=1e-4)


@pytest.mark.parametrize("missing_in", ["reference", "rung"])
def test_a_missing_gradient_is_wrong(missing_in):
    module = module_with_gradients()
    reference = reference_of(module)
    if missing_in == "rung":
        module[0].weight.grad = None
    else:
        reference = Gradients(2.0, {name: g for name, g in reference.by_name.items() if name != "0.weight"})
    assert compare_gradients(reference, 2.0, module).worst == pytest.approx(1)


def test_nan_is_never_within_budget():
    module = module_with_gradients()
    reference = reference_of(module)
    module[0].weight.grad[0, 0] = math.nan
    deviation = compare_gradients(reference, 2.0, module)
    assert deviation.worst_name == "0.weight"
    assert not deviation.gradient <= 1e9


@pytest.mark.parametrize("rounding", [1e-6, 1e-2])
def test_a_gradient_that_cancels_to_zero_is_only_rounding(rounding):
    """A key projection's bias: softmax does not feel it, so its gradient is whatever the sum's rounding leaves."""
    module = module_with_gradients()
    module[1].bias.grad.fill_(1e-12)
    reference = reference_of(module)
    rms = math.sqrt(
        sum(float(grad.square().sum()) for grad in reference.by_name.values())
        / sum(grad.numel() for grad in reference.by_name.values())
    )
    module[1].bias.grad.fill_(0.1 * rounding * rms)
    assert compare_gradients(reference, 2.0, module).worst > 1
    assert compare_gradients(reference, 2.0, module, rounding).worst == pytest.approx(0.1, rel=1e-3)
    module[1].bias.grad.fill_(rounding * rms)
    assert compare_gradients(reference, 2.0, module, rounding).worst > WRONG_IN_KIND, "no rounding is that large"


def test_sparse_gradients_are_compared():
    module = nn.Embedding(10, 4, sparse=True)
    module(torch.tensor([1, 1, 3])).square().sum().backward()
    reference = Gradients(1.0, {"weight": module.weight.grad.to_dense()})
    assert compare_gradients(reference, 1.0, module).gradient == 0
    module.weight.grad = 1.1 * module.weight.grad
    assert compare_gradients(reference, 1.0, module).gradient == pytest.approx(0.1, rel=1e-3)


def test_budget_grows_with_depth_and_with_the_formats_rounding():
    assert error_budget("bf16", "fp32", 300, None) == pytest.approx(2**-8 * math.sqrt(900), rel=1e-3)
    assert error_budget("fp32", "fp32", 300, None) == pytest.approx(2 * 2**-24 * math.sqrt(900))
    assert error_budget("bf16", "fp32", 300, 0.007) == pytest.approx(2 * 0.007 + 2 * 2**-8)


def test_leaf_calls_count_repeated_modules():
    shared = nn.Linear(4, 4)
    module = nn.Sequential(shared, nn.ReLU(), shared)
    with _LeafCalls(module) as calls:
        module(torch.ones(1, 4))
    assert calls.count == 3
    module(torch.ones(1, 4))
    assert calls.count == 3, "the hooks were left behind"
    assert copy.deepcopy(shared)._forward_hooks == {}


class Block(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.linear, self.last = nn.Linear(32, 32), last

    def forward(self, x):
        return self.last(self.linear(x).relu())


def normalised():
    """Batch normalisation over four examples, twice: small errors come out large."""
    return nn.Sequential(nn.Sequential(*(Block(nn.BatchNorm1d(32)) for _ in range(2))))


def dropped():
    return nn.Sequential(nn.Sequential(*(Block(nn.Dropout(0.3)) for _ in range(2))))


def source_of(make, scale=lambda step: 1.0):
    def build(step):
        torch.manual_seed(step.seed)
        module, factor = make(), scale(step)
        return Workload(
            module=module,
            batches=[(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)),)],
            loss=lambda out, batch: out.square().mean() + factor * F.cosine_similarity(out[0], out[1], dim=0),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )

    return WorkloadSource("toy", build)


def verdict_of(source, **change):
    check = GradientCheck(source)
    assert check.check(build_step(source, PLAIN)).deviation.gradient == 0
    return check.check(build_step(source, StepConfig(device="cpu", **change)))


def test_a_model_that_enlarges_rounding_is_not_called_wrong():
    found = verdict_of(source_of(normalised), precision="bf16")
    assert found.deviation.gradient > found.loss_budget, "then the plain budget would do"
    assert found.is_right
    assert found.budget <= WRONG_IN_KIND


def test_a_models_condition_does_not_excuse_another_loss():
    wrong = source_of(normalised, scale=lambda step: 1.0 if step.precision == "fp32" else 1.3)
    assert not verdict_of(wrong, precision="bf16").is_right


def test_a_wrong_step_allows_the_next_one_nothing():
    wrong = source_of(lambda: nn.Linear(32, 32), scale=lambda step: 1.0 if step.precision == "fp32" else 1.3)
    check = GradientCheck(wrong)
    check.check(build_step(wrong, PLAIN))
    verdicts = [check.check(build_step(wrong, StepConfig(device="cpu", precision="bf16"))) for _ in range(2)]
    assert [verdict.is_right for verdict in verdicts] == [False, False]


def test_a_stable_model_keeps_its_budget_and_an_error_beyond_it_is_wrong():
    slightly = source_of(lambda: nn.Linear(32, 32), scale=lambda step: 1.0 if step.precision == "fp32" else 1.1)
    found = verdict_of(slightly, precision="bf16")
    assert not found.is_right
    assert found.budget < 0.05


def test_compiled_dropout_is_checked_with_eager_random_numbers():
    found = verdict_of(source_of(dropped), compile="blocks")
    assert found.compared == "with eager code's random numbers"
    assert found.is_right


class OtherDropout(nn.Dropout):
    """Drops other elements of bf16 tensors, as on a GPU."""

    def forward(self, x):
        if x.dtype == torch.bfloat16:
            torch.rand(1)
        return super().forward(x)


def dropped_otherwise():
    return nn.Sequential(nn.Sequential(*(Block(OtherDropout(0.3)) for _ in range(2))))


@pytest.mark.parametrize("compiled", ["off", "blocks"])
def test_a_precision_that_drops_other_elements_is_compared_without_dropout(compiled):
    found = verdict_of(source_of(dropped_otherwise), precision="bf16", compile=compiled)
    assert found.compared == "without dropout"
    assert found.is_right
    assert found.budget == found.loss_budget < 0.05


def test_what_is_wrong_without_dropout_is_wrong():
    wrong = source_of(dropped_otherwise, scale=lambda step: 1.0 if step.precision == "fp32" else 1.3)
    assert not verdict_of(wrong, precision="bf16").is_right


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"precision": "bf16", "compile": "blocks"}], ids=str)
def test_dropout_on_a_gpu(change):
    check = GradientCheck(source_of(dropped))
    check.check(build_step(check.source, StepConfig(device="cuda")))
    found = check.check(build_step(check.source, StepConfig(device="cuda", **change)))
    assert found.is_right
    assert found.budget < 0.05


def test_a_reference_that_is_not_finite():
    source = source_of(lambda: nn.Linear(32, 32), scale=lambda step: math.nan)
    with pytest.raises(UsageError, match=r"in fp32, the loss of the first batch is nan"):
        GradientCheck(source).check(build_step(source, PLAIN))
