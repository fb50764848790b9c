"""A model that writes out what PyTorch has one kernel for is told so, and one that does not is left alone."""

from trainstep.kinds import row_of
from trainstep.report.formula_findings import formula_findings

CASE = {"workload": "theirs", "precision": "fp32"}
PROFILE = row_of("profile", CASE)


def kernel(module, operator, share, phase="forward"):
    case = CASE | {"phase": phase, "module": module, "kernel": operator}
    return row_of("kernel", case, {"operator": operator, "share": share})


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


def test_what_is_written_out_is_named_with_its_share_and_its_replacement():
    attention, loss = (finding.sentence for finding in formula_findings(WRITTEN_OUT))
    assert "written out in blocks.*.attention:" in attention
    assert "20% of the kernel time" in attention, "its projections are modules of their own"
    assert "scaled_dot_product_attention" in attention
    assert "take 30% of the kernel time" in loss
    assert "functional.cross_entropy(" in loss


def test_one_kernel_is_left_alone():
    fused = [
        PROFILE,
        kernel("blocks.*.attention", "aten::_scaled_dot_product_flash_attention_for_cpu", 0.2),
        kernel("(loss)", "aten::_log_softmax", 0.1, "loss"),
        kernel("(loss)", "aten::_softmax", 0.1, "loss"),
    ]
    assert formula_findings(fused) == []
    assert formula_findings([]) == []


def test_attention_that_no_fused_kernel_took_is_not_said_to_be_written_out():
    unfused = [*WRITTEN_OUT[:4], kernel("blocks.*.attention", "aten::_scaled_dot_product_attention_math", 0.001)]
    (said,) = [finding.sentence for finding in formula_findings(unfused)]
    assert "In blocks.*.attention, scaled_dot_product_attention runs in its math form" in said
    assert "written out" not in said


def test_our_own_attention_is_left_to_its_flag_and_little_is_not_remarked_on():
    ours = [*WRITTEN_OUT, row_of("attention piece", CASE | {"phase": "forward", "piece": "softmax"})]
    assert [finding.sentence[:13] for finding in formula_findings(ours)] == ["Cross-entropy"]
    little = [PROFILE, kernel("router", "aten::bmm", 0.01), kernel("router", "aten::_softmax", 0.01)]
    assert formula_findings(little) == []
