"""Live storages, peaks by phase, and bytes saved for backward, against bytes counted by hand."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from trainstep.measure.memory import (
    CHECKPOINT,
    WEIGHT_CAST,
    LiveStorages,
    operation_name,
    parameter_bytes,
    residual_stream_bytes,
    residuals,
    step_memory,
    storages_of,
)

MIB = 2**20


def test_live_bytes_rise_and_fall_with_tensors():
    with LiveStorages() as live:
        a = torch.zeros(MIB // 4)
        assert live.bytes == MIB
        b = a.view(2, -1)  # a view owns nothing
        assert live.bytes == MIB
        c = a + 1
        assert live.bytes == 2 * MIB
        del a, c
        assert live.bytes == MIB  # b keeps a's storage
        del b
        assert live.bytes == 0
        assert live.peak == 2 * MIB


def test_in_place_operations_add_nothing():
    with LiveStorages() as live:
        a = torch.zeros(MIB // 4)
        a.add_(1).mul_(2)
        assert (live.bytes, live.peak) == (MIB, MIB)


def test_each_storage_has_the_states_it_lived_in():
    """States are counted by the storages made and released; a found storage was there in the first."""
    resident, hidden = torch.zeros(4), torch.zeros(8)
    lives = []
    with LiveStorages([resident], lambda life, storage: lives.append((life, storage.nbytes()))) as live:
        made = resident + 1  # 1
        hidden.mul_(2)
        torch.empty(0)  # no bytes, no storage
        del made  # 2
        kept = resident.clone()  # 3
        del hidden  # 4
    assert live.events == 4
    assert live.bytes == resident.nbytes + kept.nbytes
    assert live.found_bytes == 0, "it is gone"
    assert [(life.start, life.end, life.is_found) for life, _ in lives] == [
        (0, None, False), (1, 2, False), (0, 4, True), (3, None, False),
    ]  # fmt: skip
    assert [life.bytes for life, _ in lives] == [size for _, size in lives] == [16, 16, 32, 16]
    del kept
    assert live.events == 4, "what happens afterwards is not counted"


def test_phases_of_a_cpu_step_have_the_peaks_that_arithmetic_gives():
    """y = x·w with x saved: forward adds y; backward adds the gradients while x, y and w live."""
    x = torch.randn(256, 1024)
    w = nn.Parameter(torch.randn(1024, 2048))

    def step(phase):
        with phase("forward"):
            y = x @ w
        with phase("backward"):
            y.backward(torch.ones_like(y))

    peaks = step_memory(step, torch.device("cpu"), [x, w])
    resident = 1 * MIB + 8 * MIB
    y_bytes, gradient_bytes = 2 * MIB, 8 * MIB
    assert peaks.before == resident
    assert peaks.by_phase["forward"] == resident + y_bytes
    assert peaks.by_phase["backward"] == resident + 2 * y_bytes + gradient_bytes
    assert peaks.peak == peaks.by_phase["backward"]
    assert peaks.after == {"forward": resident + y_bytes, "backward": resident + y_bytes + gradient_bytes}


def test_what_nobody_named_and_outlives_the_step_was_at_rest():
    """An optimizer around other optimizers shows no state of its own; a temporary made elsewhere is not at rest."""
    hidden = torch.zeros(MIB)

    def step(phase):
        with phase("forward"):
            made = torch.ones(2 * MIB)
        with phase("optimizer"):
            hidden.mul_(0.9).add_(made[:MIB])

    peaks = step_memory(step, torch.device("cpu"), [])
    assert peaks.before == 4 * MIB
    assert peaks.by_phase == {"forward": 12 * MIB, "optimizer": 12 * MIB}
    assert peaks.peak == 12 * MIB


def test_a_sparse_gradient_is_its_indices_and_values():
    weight = nn.Parameter(torch.zeros(1000, 64))
    ids = torch.arange(16)

    def step(phase):
        with phase("backward"):
            nn.functional.embedding(ids, weight, sparse=True).backward(torch.ones(16, 64))

    peaks = step_memory(step, torch.device("cpu"), [weight, ids])
    assert weight.grad.layout == torch.sparse_coo
    assert peaks.after["backward"] - peaks.before == 16 * 64 * 4 + 16 * 8


def test_parameters_tied_are_counted_once():
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    assert parameter_bytes(module) == 8 * 8 * 4


@pytest.mark.gpu
def test_gpu_peaks_are_those_of_live_tensors():
    kept = []

    def step(phase):
        with phase("grow"):
            kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
        with phase("spike"), contextlib.suppress(NameError):
            spike = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
            del spike

    peaks = step_memory(step, torch.device("cuda"), [])
    assert peaks.by_phase["grow"] - peaks.before == 64 * MIB
    assert peaks.by_phase["spike"] - peaks.before == 192 * MIB
    assert peaks.peak == peaks.by_phase["spike"]


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


def test_names_of_operations():
    assert operation_name("SoftmaxBackward0") == "Softmax"
    assert operation_name("torch::autograd::CopySlices") == "CopySlices"
    assert operation_name("CompiledFunctionBackward") == "CompiledFunction"


def test_the_residual_stream_of_2_7b():
    assert residual_stream_bytes(batch=4, context=2048, d_model=2560, element_bytes=4) == 80 * 2**20


def test_the_storages_of_a_wrapper_are_those_of_the_tensors_inside():
    """A DTensor has none of its own, and asking for its address is an error."""
    first, second = torch.ones(3), torch.ones(3)
    found = storages_of(TwoTensor(first, second))
    assert [each.data_ptr() for each in found] == [first.data_ptr(), second.data_ptr()]
