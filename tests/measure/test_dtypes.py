"""The dtypes of a toy whose answers are known: fc – relu – layer norm – fc."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainstep.measure.dtypes import DtypeWatch, ModuleDtypes, alike, short_name


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 8, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(8)
        self.fc2 = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.fc2(self.ln(self.relu(self.fc1(x))))


def watched(device, dtype, module=None):
    module = (module or Toy()).to(device)
    x = torch.randn(5, 16, device=device)
    watch = DtypeWatch(module)
    forward, loss_of = watch.result_of(module), watch.loss_of(F.cross_entropy)
    with watch:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = loss_of(forward(x), torch.zeros(5, dtype=torch.long, device=device))
        loss.backward()
    assert not any(each._forward_hooks for each in module.modules()), "the watch takes its hooks away"
    return watch.found()


def by_name(found):
    return {module.name: module for module in found.modules}


def check_toy(found, half, norm):
    modules = by_name(found)
    assert list(modules) == ["", "fc1", "relu", "ln", "fc2"]
    for name in ("fc1", "ln", "fc2"):
        assert modules[name].parameters == modules[name].gradients == ("fp32",)
    assert (modules["relu"].parameters, modules["relu"].gradients) == ((), ())
    assert (modules["fc1"].inputs, modules["fc1"].outputs) == (("fp32",), (half,))
    assert (modules["relu"].inputs, modules["relu"].outputs) == ((half,), (half,))
    assert (modules["ln"].inputs, modules["ln"].outputs) == ((half,), (norm,))
    assert (modules["fc2"].inputs, modules["fc2"].outputs) == ((norm,), (half,))
    assert modules[""].kind == "Toy"
    assert found.result == (half,), "logits are what the last matmul makes"
    assert found.loss == ("fp32",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_toy_under_autocast_on_a_cpu(dtype):
    """Here autocast leaves layer norm in what comes: only CUDA's list of float32 operations has it."""
    check_toy(watched("cpu", dtype), short_name(dtype), norm=short_name(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_toy_under_autocast_on_a_gpu(dtype):
    check_toy(watched("cuda", dtype), short_name(dtype), norm="fp32")


def test_a_layer_norm_that_computes_in_float32_shows_it():
    class Float32LayerNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.float())

    toy = Toy()
    toy.ln = Float32LayerNorm(8)
    check_toy(watched("cpu", torch.float16, toy), "fp16", norm="fp32")


def test_a_module_in_pure_bf16_shows_itself():
    found = by_name(watched("cpu", torch.bfloat16, Toy().to(torch.bfloat16)))
    assert found["fc1"].parameters == found["fc1"].gradients == ("bf16",), "a cast of the model is not autocast"


def test_modules_never_called_are_left_out_unless_they_hold_parameters():
    toy = Toy()
    toy.unused = nn.ReLU()
    toy.idle = nn.Linear(2, 2)
    found = by_name(watched("cpu", torch.float32, toy))
    assert "unused" not in found
    assert (found["idle"].parameters, found["idle"].outputs, found["idle"].gradients) == (("fp32",), (), ())


def test_nested_inputs_and_keywords_are_seen():
    class Nested(nn.Module):
        def forward(self, pair, *, mask):
            return {"out": pair[0] * mask, "aux": [pair[1]]}

    module = Nested()
    watch = DtypeWatch(module)
    with watch:
        module((torch.ones(2), torch.ones(2, dtype=torch.float64)), mask=torch.ones(2, dtype=torch.bool))
    (root,) = watch.found().modules
    assert root.inputs == ("fp32", "fp64", "bool")
    assert root.outputs == ("fp32", "fp64")


def test_results_that_are_objects_are_looked_into():
    watch = DtypeWatch(nn.Identity())
    watch.result_of(lambda: SimpleNamespace(loss=torch.ones(()), logits=torch.ones(1, dtype=torch.bfloat16), n=3))()
    assert watch.found().result == ("fp32", "bf16")


def test_only_modules_that_are_alike_share_a_row():
    def module(name, outputs="fp32"):
        return ModuleDtypes(name, "Linear", (), (), (outputs,), ())

    found = alike([module("h.0.fc1"), module("h.1.fc1"), module("h.2.fc1", "bf16"), module("h.0.fc2"), module("3")])
    assert [(group.name, count) for group, count in found] == [
        ("h.*.fc1", 2), ("h.2.fc1", 1), ("h.0.fc2", 1), ("3", 1),
    ]  # fmt: skip
