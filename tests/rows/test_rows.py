"""Rows of earlier versions read as those of today, and every file of the documents' results reads."""

from pathlib import Path

import pytest

from trainstep.report.subjects.allocations import made_in, owner_part
from trainstep.report.subjects.memory import residual_name
from trainstep.rows import CeilingRow, StepRow, row_of
from trainstep.rows.records import read_records
from trainstep.rows.row import make_row

RESULTS = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_file_of_results_reads(path):
    rows = read_records(path)
    assert len(rows) == sum(1 for line in path.read_text().splitlines() if line.strip())


def columns(row, section):
    return {name: value for name, value in getattr(row, section).items() if name not in ("workload", "batch")}


@pytest.mark.parametrize(
    ("what", "case"),
    [
        ("1. blocks.*.attention", {"group": "largest", "rank": 1, "module": "blocks.*.attention"}),
        ("12. (compiled code)", {"group": "largest", "rank": 12, "module": "(compiled code)"}),
        ("the rest", {"group": "the rest"}),
        ("all", {"group": "all"}),
        ("input of the first block", {"group": "input of the first block"}),
    ],
)
def test_residuals_have_rank_and_module(what, case):
    row = row_of("residual", {"workload": "w", "part": "step", "what": what}, {"mib": 1.0})
    assert columns(row, "case") == {"part": "step", **case}
    assert residual_name(row) == what


@pytest.mark.parametrize(
    ("owner", "part", "case"),
    [
        ("activations", "all", {}),
        ("activations", "blocks.*.attention", {"module": "blocks.*.attention"}),
        ("activations", "the loss", {"phase": "loss"}),
        ("activations", "the model itself", {"phase": "forward"}),
        ("temporaries", "loss", {"phase": "loss"}),
        ("temporaries", "NllLoss of backward", {"operation": "NllLoss", "phase": "backward"}),
        ("temporaries", "blocks.*.attention, forward", {"module": "blocks.*.attention", "phase": "forward"}),
        ("temporaries", "head, ToCopy of backward", {"module": "head", "operation": "ToCopy", "phase": "backward"}),
    ],
)
def test_parts_of_owners_are_fields(owner, part, case):
    row = row_of("owner", {"workload": "w", "batch": 4, "owner": owner, "part": part}, {"mib": 1.0})
    assert columns(row, "case") == {"owner": owner, **case}
    assert row.is_total is (part == "all")
    assert owner_part(row) == part


def test_parts_of_a_foreign_snapshot_are_lines():
    line = "me/model.py:7 forward, of a kind"
    row = row_of("owner", {"workload": "x.pickle", "device": 0, "owner": "activations", "part": line})
    assert (row.line, row.module, row.phase, owner_part(row)) == (line, None, None, line)


@pytest.mark.parametrize(
    ("made", "phase", "operation"),
    [("backward: Softmax", "backward", "Softmax"), ("forward", "forward", None), ("", None, None)],
)
def test_allocations_have_phase_and_operation(made, phase, operation):
    row = row_of("allocation", {"workload": "w", "rank": 1}, {"mib": 1.0, "made_in": made})
    assert (row.phase, row.operation, made_in(row)) == (phase, operation, made)


def test_ceilings_and_families_have_operation_and_precision():
    row = row_of("ceiling", {"what": "matmul bf16"}, {"tflops": 8.0})
    assert row == CeilingRow(operation="matmul", precision="bf16", tflops=8.0)
    assert row_of("ceiling", {"what": "copy"}, {"gb_s": 1.0}).precision is None
    family = row_of("family", {"phase": "step", "family": "matmul"}, {"ceiling": "matmul bf16", "ms": 1.0})
    assert family.ceiling_precision == "bf16"
    assert row_of("family", {"phase": "step", "family": "copy"}, {"ceiling": None}).ceiling_precision is None


def test_sums_that_disagree_are_several_words():
    assert row_of("profile", {}, {"sums_disagree": "forward, step"}).sums_disagree == ("forward", "step")
    assert row_of("profile", {}, {"sums_disagree": None}).sums_disagree is None


def test_what_no_row_has_is_not_taken():
    with pytest.raises(TypeError, match="a row has no 'sample'; expected some of environment, reason, samples"):
        make_row(StepRow, {}, {}, sample={})


@pytest.mark.parametrize("kind", ["fused operator", "fused ratio"])
def test_shapes_of_fused_operators_have_no_width_of_a_feed_forward(kind):
    case = {"operator": "swiglu", "impl": "ours", "shape": "small", "tokens": 4, "d_model": 8, "heads": 2}
    case |= {"vocab_size": 9, "dtype": "bf16"} | ({"peer": "eager"} if kind == "fused ratio" else {})
    assert row_of(kind, case | {"d_ff": 24}) == row_of(kind, case)
