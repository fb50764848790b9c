import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.bench.dtypes import LOSS, RESULT, dtype_records
from trainstep.report.subjects import make_tables
from trainstep.report.subjects.precision import dtype_findings
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

TOY = builtin_source("toy", ModelConfig(vocab_size=256, d_model=16, d_ff=32, num_layers=2, num_heads=2))


def rows(*precisions, **settings):
    configs = [
        StepConfig(batch=1, context=8, device="cpu", precision=precision, **settings) for precision in precisions
    ]
    return {(row.case["precision"], row.case["module"]): row for row in dtype_records(TOY, configs)}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_our_model_under_autocast(precision):
    found = rows(precision)
    query = found[precision, "blocks.*.attention.query"].values
    assert query == {
        "class_name": "Linear",
        "modules": 2,
        "parameters": ("fp32",),
        "inputs": ("fp32",),
        "outputs": (precision,),
        "gradients": ("fp32",),
        "cuda_outputs": (precision,),
    }
    assert found[precision, "blocks.*.attention.output"].values["inputs"] == (precision,)
    assert found[precision, "blocks.*"].values["outputs"] == ("fp32",), "the residual stream"
    assert found[precision, RESULT].values == dict.fromkeys(("outputs", "cuda_outputs"), (precision,))
    assert found[precision, LOSS].values == dict.fromkeys(("outputs", "cuda_outputs"), ("fp32",))
    assert found[precision, "(root)"].values["inputs"] == ("int64",)


def test_pure_bf16_and_full_precision():
    found = rows("fp32", "bf16-pure")
    assert found["fp32", RESULT].outputs == ("fp32",)
    head = found["bf16-pure", "head"].values
    assert (head["parameters"], head["gradients"], head["outputs"]) == (("bf16",),) * 3


def test_what_cannot_be_watched_is_a_row():
    (unsupported,) = rows("tf32").values()
    assert (unsupported.status, unsupported.case["module"]) == ("unsupported", "all")
    (compiled,) = rows("fp32", compile="model").values()
    assert compiled.status == "unsupported"
    assert "--compile off" in compiled.reason


def test_the_tables():
    (table,) = make_tables(list(rows("bf16").values()))
    assert ("head", "Linear", "1", "fp32", "fp32", "bf16", "fp32", "bf16") in table.texts()


class Toy(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8, bias=False), middle, nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def source_of(
    module, loss=lambda out, to: F.cross_entropy(out, to[:, 0].long()), forward=lambda module, batch: module(batch[0])
):
    def build(step):
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
        return Workload(
            Toy(module()), [(inputs, torch.ones(2, 8))], lambda out, batch: loss(out, batch[1]), sgd, forward
        )

    return WorkloadSource("own", build)


def own_rows(source, precision="fp16", device="cpu"):
    found = list(dtype_records(source, [StepConfig(precision=precision, device=device)]))
    assert {row.status for row in found} == {"ok"}, found[0].reason
    return {row.module: row for row in found}


class Squares(nn.Module):
    def forward(self, x):
        return x**2


class Own(nn.Module):
    """Turns autocast off for what it holds, as libraries do for rotary positions, and indexes and makes tensors."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            x[0] = x.new_tensor(1.0)
            return x[:, :4].float().repeat(1, 2) @ torch.tensor([2.0] * 64, device=x.device).view(8, 8)


class Attention(nn.MultiheadAttention):
    """Of operators that autocast sees one by one, inside of a function of Python's."""

    def forward(self, x):
        return super().forward(x[None], x[None], x[None])[0][0]


RULES = {
    "multi-head attention": (functools.partial(Attention, 8, 2), "half"),
    "batch norm": (functools.partial(nn.BatchNorm1d, 8), "half"),
    "layer norm": (functools.partial(nn.LayerNorm, 8), "fp32"),
    "group norm": (functools.partial(nn.GroupNorm, 2, 8), "fp32"),
    "softmax": (functools.partial(nn.Softmax, -1), "fp32"),
    "log-softmax": (functools.partial(nn.LogSoftmax, -1), "fp32"),
    "softplus": (nn.Softplus, "fp32"),
    "power": (Squares, "fp32"),
    "linear": (functools.partial(nn.Linear, 8, 8), "half"),
    "GELU": (nn.GELU, "half"),
    "autocast off": (Own, "fp32"),
}
"""What CUDA returns under autocast, by the lists in torch's documentation of torch.amp."""


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", RULES)
def test_what_cuda_would_return_is_computed_on_a_cpu(name, precision):
    module, expected = RULES[name]
    found = own_rows(source_of(module), precision)
    half = (precision,)
    assert found["middle"].cuda_outputs == (("fp32",) if expected == "fp32" else half)
    assert found["first"].cuda_outputs == found["first"].outputs == half
    assert (found[RESULT].cuda_outputs, found[LOSS].cuda_outputs) == (half, ("fp32",))
    told = [each for each in dtype_findings(list(found.values())) if each.id == "precision.cuda"]
    differs = found["middle"].outputs != found["middle"].cuda_outputs
    assert [each.figures["others"] for each in told] == ([(f"middle {precision} → fp32",)] if differs else [("none",)])
    (table,) = make_tables(list(found.values()))
    assert "computed by torch's autocast rules for CUDA, not measured" in table.caption


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", RULES)
def test_what_is_computed_of_cuda_is_what_a_gpu_returns(name, precision):
    source = source_of(RULES[name][0])
    computed, measured = (own_rows(source, precision, device) for device in ("cpu", "cuda"))
    assert {name: row.cuda_outputs for name, row in computed.items()} == {
        name: row.outputs for name, row in measured.items()
    }
    assert {row.cuda_outputs for row in measured.values()} == {None}


def test_our_model_on_cuda_and_in_full_precision():
    found = rows("bf16", "fp32", "bf16-pure", attention="eager")
    for row in found.values():
        assert row.cuda_outputs is not None or row.outputs is None, row.module
        assert row.cuda_outputs == row.outputs or row.precision == "bf16", "nothing is cast without autocast"
    assert found["bf16", "head"].cuda_outputs == ("bf16",)


def entering_autocast(module, batch):
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return module(batch[0])


def differentiating(module, batch):
    with torch.enable_grad():
        inputs = batch[0].detach().clone().requires_grad_()
        return module(batch[0]) + torch.autograd.grad(module(inputs).sum(), inputs, create_graph=True)[0]


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (entering_autocast, "Disabling autocast"),
        (differentiating, "differentiates by itself"),
        (lambda module, batch: module(batch[0]) * batch[1].sum().item(), "_local_scalar_dense"),
    ],
)
def test_what_cannot_be_computed_without_a_gpu_has_its_reason(forward, why):
    """And none of it ends the process, as a gradient on a device that is not there would."""
    found = own_rows(source_of(nn.GELU, forward=forward), "bf16")
    assert {row.cuda_outputs for row in found.values()} == {None}
    assert why in found[RESULT].not_computed
    (told,) = (each for each in dtype_findings(list(found.values())) if each.id == "precision.cuda")
    assert why in told.sentence
