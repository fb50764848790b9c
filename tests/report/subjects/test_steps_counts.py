"""Two counts of a step's FLOPs are held against each other; operators in neither are named."""

import pytest

from trainstep.report.subjects.steps import COUNTS_AGREE, counts_apart
from trainstep.rows import FamilyRow, StepRow

CASE = {"workload": "theirs", "precision": "fp32", "compile": "off"}


def step(tflop=3.0, **more):
    return StepRow(**CASE, mode="step", warmup=5, model_tflop=tflop, **more)


def family(phase, name, tflop):
    return FamilyRow(**CASE, phase=phase, family=name, tflop=tflop)


RECORDED = [
    family("step", "matmul", 3.0), family("forward", "matmul", 0.5), family("forward", "fused attention", 0.5),
    family("backward", "tensor-core matmul", 1.0), family("backward", "fused attention", 1.25),
    family("backward", "elementwise", 9.0), family("optimizer", "matmul", 9.0), family("loss", "matmul", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tflop", "said"),
    [(3.0, None), (3.0 * COUNTS_AGREE, None), (3.4, "not in the kernels’ rates"), (2.7, "more runs than")],
)
def test_counts_that_agree_are_not_mentioned(tflop, said):
    told = counts_apart([step(tflop), *RECORDED])
    assert [each.id for each in told] == (["utilisation.counts"] if said else [])
    assert all(said in each.sentence and each.figures["recorded_tflop"] == 3.0 for each in told)


def test_what_is_in_no_count_is_named():
    (found,) = counts_apart([step(flops_uncounted=("lib::product",)), *RECORDED])
    assert (found.id, found.figures["uncounted"]) == ("utilisation.uncounted", ("lib::product",))


def test_nothing_is_compared_that_was_not_counted_twice():
    assert counts_apart(RECORDED) == counts_apart([step(None), *RECORDED]) == counts_apart([step(9.0)]) == []
    assert counts_apart([step(9.0, batch=4), *RECORDED]) == [], "ours is a formula"
    assert (
        counts_apart([StepRow(**CASE | {"precision": "bf16"}, mode="step", warmup=5, model_tflop=9.0), *RECORDED]) == []
    )
