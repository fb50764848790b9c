"""A model that writes out what PyTorch has one kernel for is told so, and one that does not is left alone."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainstep.measure.dtypes import DtypeWatch, module_rows
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import operator_family, profiles_of
from trainstep.measure.profile.ranges import WARMUP, announce, modules_announced, profiler_of_steps
from trainstep.measure.profile.rows import profile_rows
from trainstep.report.subjects.kernel_findings import formula_findings
from trainstep.rows import KernelRow, ProfileRow

CASE = {"workload": "theirs", "precision": "fp32"}
PROFILE = ProfileRow(**CASE)


def kernel(module, operator, share, phase="forward"):
    name, family = {"kernel": operator, "operator": operator}, operator_family(operator)
    return KernelRow(**CASE, **name, family=family, phase=phase, module=module, share=share)


WRITTEN_OUT = [
    PROFILE,
    kernel("blocks.*.attention", "aten::bmm", 0.1),
    kernel("blocks.*.attention", "aten::_softmax", 0.05),
    kernel("blocks.*.attention", "aten::_softmax_backward_data", 0.05, "backward"),
    kernel("blocks.*.attention.query", "aten::addmm", 0.5),
    kernel("(loss)", "aten::_softmax", 0.1, "loss"),
    kernel("(loss)", "aten::log", 0.1, "loss"),
    kernel("(loss)", "aten::gather", 0.0, "loss"),
    kernel("(loss)", "aten::mean", 0.0, "loss"),
    kernel("(loss)", "aten::mul", 0.1, "backward"),
]


def told(rows):
    return {finding.id.removeprefix("formulas."): finding for finding in formula_findings(rows)}


def test_one_kernel_is_left_alone():
    fused = [
        PROFILE,
        kernel("blocks.*.attention", "aten::_scaled_dot_product_flash_attention_for_cpu", 0.2),
        kernel("(loss)", "aten::_log_softmax", 0.1, "loss"),
        kernel("(loss)", "aten::_softmax", 0.1, "loss"),
    ]
    assert told(fused) == {}
    assert told([]) == {}


@pytest.mark.parametrize(("share", "is_told"), [(0.05, True), (0.04, False)])
def test_a_formula_is_remarked_on_from_a_twentieth_of_the_kernel_time(share, is_told):
    rows = [
        PROFILE,
        kernel("mixer", "aten::bmm", share),
        kernel("mixer", "aten::_softmax", None),
        kernel("(loss)", "aten::_softmax", share, "loss"),
        *(kernel("(loss)", f"aten::{each}", None, "loss") for each in ("log", "index", "mean")),
    ]
    found = told(rows)
    assert list(found) == (["attention-written-out", "cross-entropy-written-out"] if is_told else [])
    assert {finding.figures["share"] for finding in found.values()} <= {share}


def test_only_a_profile_that_ran_is_looked_at():
    failed = ProfileRow(**CASE | {"precision": "bf16"}, status="out of memory")
    assert told([failed, *WRITTEN_OUT]).keys() == told(WRITTEN_OUT).keys() != set()
    assert told([failed]) == told([replace(PROFILE, status="failed"), *WRITTEN_OUT[1:]]) == {}


IDS, CLASSES = torch.arange(48) % 7, 7
ONES = F.one_hot(IDS, CLASSES).float()


def recorded(module, loss):
    """Rows of two steps of a module, as the profiler of this machine records them, and of its dtypes."""
    module.train()
    x = torch.randn(3, 16, CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        with modules_announced(module), profiler_of_steps(2, trace, on_gpu=False, shapes=True) as profiler:
            for number in range(WARMUP + 2):
                with announce("step", str(number)):
                    with announce("phase", "forward"):
                        result = module(x)
                    with announce("phase", "loss"):
                        found = loss(result)
                    with announce("phase", "backward"):
                        found.backward()
                profiler.step()
        (profile,) = profiles_of(read_chrome_trace(trace)).values()
    with DtypeWatch(module) as dtypes:
        module(x)
    own = {"workload": "theirs"}
    return [ProfileRow(**own), *profile_rows(profile, own, None, {}), *module_rows(dtypes.found().modules, own)]


def at_targets(probabilities):
    return probabilities.gather(1, IDS[:, None])[:, 0]


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (lambda p: -at_targets(p.log()).mean(), True),
        (lambda p: -torch.log(p[torch.arange(len(p)), IDS] + 1e-9).mean(), True),
        (lambda p: -(F.one_hot(IDS, CLASSES).float() * p.log()).sum(-1).mean(), True),
        (lambda p: F.nll_loss(p.log(), IDS), True),
        (lambda p: (p * p.log()).sum(-1).mean() - at_targets(p.log()).mean(), False),  # with an entropy bonus
        (lambda p: 1 - (2 * (p * ONES).sum(0) / (p.square() + ONES).sum(0)).mean(), False),  # Dice
        (lambda p: (p.detach().roll(1, 0) * p.log()).sum(-1).mean().neg(), False),  # a distillation
        (lambda p: -(1 - at_targets(p)).log().mean(), False),  # an unlikelihood
        (lambda p: -((1 - at_targets(p)) ** 2 * at_targets(p).log()).mean(), False),  # a focal loss
        (lambda p: -(at_targets(p.log()) * torch.randn(len(p))).mean(), False),  # a policy gradient
        (lambda p: -at_targets(p.log()).view(3, 16).sum(1).mean(), False),  # of whole sequences
    ],
)
def test_a_loss_is_cross_entropy_if_it_is_the_mean_at_the_targets(loss, is_told):
    rows = recorded(nn.Linear(CLASSES, CLASSES), lambda logits: loss(logits.flatten(0, 1).softmax(-1)))
    assert list(told(rows)) == ["cross-entropy-written-out"] * is_told


class Written(nn.Module):
    """Attention of two heads with a bias for each distance, which is no causal mask."""

    def forward(self, q):
        heads = q[:, None].expand(-1, 2, -1, -1)
        far = torch.arange(16.0)[:, None] - torch.arange(16.0)
        weights = (heads @ heads.transpose(-2, -1) - far.abs()).softmax(-1)
        return (weights @ heads).sum(1)


class Returning(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.cross, self.options = nn.MultiheadAttention(CLASSES, 1, batch_first=True), options

    def forward(self, x):
        padded = torch.arange(16).expand(3, -1) > 9
        return self.cross(x[:, :4], x, x, key_padding_mask=padded, **self.options)[0]


@pytest.mark.parametrize(
    ("attention", "ids", "action"),
    [
        (Written(), ["attention-written-out"], "F.scaled_dot_product_attention(q, k, v, attn_mask=…)"),
        (Returning(), ["attention-returns-weights"], "attention(q, k, v, …, need_weights=False)"),
        (Returning(need_weights=False), [], None),
    ],
)
def test_advice_on_attention_is_right_for_its_mask(attention, ids, action):
    found = told(recorded(nn.Sequential(nn.Linear(CLASSES, CLASSES), attention), lambda result: result.sum()))
    assert list(found) == ids
    for each in found.values():
        assert each.claim.action.code == action
        assert each.figures["modules"] == ("*.cross" if "returns" in each.id else "*",)
