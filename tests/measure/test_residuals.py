"""Bytes saved for backward, against bytes counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.measure.residuals import CHECKPOINT, WEIGHT_CAST, operation_name, residual_stream_bytes, residuals

X = 6 * 8 * 4
"""Bytes of a float32 tensor of shape (6, 8)."""


def kept(function, module=None, resident=()):
    found, results = residuals(function, module, resident)
    assert results is not None
    return [(each.module, each.operation, each.bytes) for each in found.kept]


def x(requires_grad=True):
    return torch.randn(6, 8, requires_grad=requires_grad)


def test_a_linear_keeps_its_input_and_not_its_weight():
    linear, value = nn.Linear(8, 8), x()
    assert kept(lambda: linear(value), linear) == [("", "Addmm", X)]
    assert kept(lambda: linear(value), linear, [value]) == [], "what is alive anyway counts nothing"


def test_modules_and_operations():
    module = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Sequential(nn.Softmax(-1)))
    value = x()
    assert kept(lambda: module(value), module, [value]) == [("1", "Silu", X), ("2.0", "Softmax", X)]


def test_views_of_one_storage_count_once():
    module, value = nn.Linear(8, 8, bias=False), x()

    def forward():
        y = module(value)  # (6, 8)
        first, second = y.chunk(2, dim=-1)
        return first.exp() * 2, torch.relu(y) @ y.T, first * second

    found = kept(forward, module, [value])
    assert ("", "Mul", X) in found or ("", "Mm", X) in found
    assert sum(each[2] for each in found) == X + X + X // 2, "y once, relu(y), exp(first)"


def test_a_small_view_keeps_its_whole_storage():
    value = x()

    def forward():
        return (value * 2)[:1].square()

    assert kept(forward, resident=[value]) == [("", "Pow", X)]


def test_what_no_longer_lives_is_not_kept():
    value = x()

    def forward():
        value.exp().sin()  # its graph goes with its result
        return value.exp()

    assert kept(forward, resident=[value]) == [("", "Exp", X)]


def test_buffers_and_parameters_count_nothing():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(6, 8))
            self.gain = nn.Parameter(torch.ones(6, 8))

        def forward(self, value):
            return (value * self.table) * self.gain

    module, value = Scaled(), x()
    assert kept(lambda: module(value), module, [value]) == [("", "Mul", X)]  # value · table, for the gain's gradient


def test_autocast_keeps_casts_of_the_weights_under_their_own_name():
    linear, value = nn.Linear(8, 8, bias=False), x()
    with torch.autocast("cpu", torch.bfloat16):
        found = kept(lambda: linear(value), linear, [value])
    assert sorted(found) == [("", "Mm", X // 2), ("", WEIGHT_CAST, 8 * 8 * 2)]


def test_checkpoints_keep_inputs():
    module, value = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), x()
    assert kept(lambda: checkpoint(module, value * 2, use_reentrant=False), module, [value]) == [("", CHECKPOINT, X)]


def test_functions_of_ones_own():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.save_for_backward(value.clone())
            return value**2

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    assert kept(lambda: Square.apply(x())) == [("", "Square", X)]


def test_the_results_can_still_be_differentiated():
    linear, value = nn.Linear(8, 8), x()
    _, y = residuals(lambda: F.silu(linear(value)), linear)
    y.sum().backward()
    expected = torch.autograd.grad(F.silu(linear(value)).sum(), linear.weight)[0]
    assert torch.equal(linear.weight.grad, expected)
    assert not linear._forward_hooks
    assert not linear._forward_pre_hooks


def test_an_error_inside_a_module_leaves_no_hooks():
    linear = nn.Linear(8, 8)
    with pytest.raises(RuntimeError):
        residuals(lambda: linear(torch.ones(3)), linear)
    assert not linear._forward_hooks


def test_totals():
    module, value = nn.Sequential(nn.SiLU(), nn.SiLU()), x()
    found, _ = residuals(lambda: module(value), module)
    assert found.bytes == 2 * X
    assert {each.module: each.bytes for each in found.kept} == {"0": X, "1": X}
    assert {each.operation for each in found.kept} == {"Silu"}


def test_names_of_operations():
    assert operation_name("SoftmaxBackward0") == "Softmax"
    assert operation_name("torch::autograd::CopySlices") == "CopySlices"
    assert operation_name("CompiledFunctionBackward") == "CompiledFunction"


def test_the_residual_stream_of_2_7b():
    assert residual_stream_bytes(batch=4, context=2048, d_model=2560, element_bytes=4) == 80 * 2**20
