"""How far gradients are from a reference: known errors, missing and sparse ones, NaN, and what cancels to zero."""

import math

import pytest
import torch
from torch import nn

from trainstep.bench.gradient_check import WRONG_IN_KIND
from trainstep.bench.gradients import Gradients, compare_gradients


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
