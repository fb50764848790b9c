"""A model that writes out what PyTorch has one kernel for is told so, and one that does not is left alone."""

from dataclasses import replace

import pytest

from trainstep.report.subjects.kernel_findings import formula_findings
from trainstep.rows import KernelRow, ProfileRow

CASE = {"workload": "theirs", "precision": "fp32"}
PROFILE = ProfileRow(**CASE)


def kernel(module, operator, share, phase="forward"):
    return KernelRow(**CASE, phase=phase, module=module, kernel=operator, operator=operator, share=share)


WRITTEN_OUT = [
    PROFILE,
    kernel("blocks.*.attention", "aten::bmm", 0.1),
    kernel("blocks.*.attention", "aten::_softmax", 0.05),
    kernel("blocks.*.attention", "aten::_softmax_backward_data", 0.05, "backward"),
    kernel("blocks.*.attention.query", "aten::addmm", 0.5),
    kernel("(loss)", "aten::_softmax", 0.1, "loss"),
    kernel("(loss)", "aten::log", 0.1, "loss"),
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
        kernel("(loss)", "aten::sum", None, "loss"),
    ]
    found = told(rows)
    assert list(found) == (["attention-written-out", "cross-entropy-written-out"] if is_told else [])
    assert {finding.figures["share"] for finding in found.values()} <= {share}


def test_only_a_profile_that_ran_is_looked_at():
    failed = ProfileRow(**CASE | {"precision": "bf16"}, status="out of memory")
    assert told([failed, *WRITTEN_OUT]).keys() == told(WRITTEN_OUT).keys() != set()
    assert told([failed]) == told([replace(PROFILE, status="failed"), *WRITTEN_OUT[1:]]) == {}
