"""Every file of the documents' results reads, and the names that reports make of columns."""

from pathlib import Path

import pytest

from trainstep.report.subjects.allocations import made_in, owner_part
from trainstep.report.subjects.memory import residual_name
from trainstep.rows import row_of
from trainstep.rows.records import read_records

RESULTS = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*.jsonl"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_file_of_results_reads(path):
    rows = read_records(path)
    assert len(rows) == sum(1 for line in path.read_text().splitlines() if line.strip())


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ({"group": "largest", "rank": 1, "module": "blocks.*.attention"}, "1. blocks.*.attention"),
        ({"group": "largest", "rank": 12, "module": "(compiled code)"}, "12. (compiled code)"),
        ({"group": "the rest"}, "the rest"),
        ({"group": "all"}, "all"),
    ],
)
def test_residuals_are_named_by_rank_and_module(case, shown):
    assert residual_name(row_of("residual", {"part": "step", **case}, {"mib": 1.0})) == shown


@pytest.mark.parametrize(
    ("owner", "case", "shown"),
    [
        ("activations", {}, "all"),
        ("activations", {"module": "blocks.*.attention"}, "blocks.*.attention"),
        ("activations", {"phase": "loss"}, "the loss"),
        ("activations", {"phase": "forward"}, "the model itself"),
        ("temporaries", {"phase": "loss"}, "loss"),
        ("temporaries", {"operation": "NllLoss", "phase": "backward"}, "NllLoss of backward"),
        ("temporaries", {"module": "blocks.*.attention", "phase": "forward"}, "blocks.*.attention, forward"),
        ("temporaries", {"module": "h", "operation": "ToCopy", "phase": "backward"}, "h, ToCopy of backward"),
        ("activations", {"device": 0, "line": "me/model.py:7 forward, of a kind"}, "me/model.py:7 forward, of a kind"),
    ],
)
def test_parts_of_owners_are_named_by_their_columns(owner, case, shown):
    row = row_of("owner", {"owner": owner, **case}, {"mib": 1.0})
    assert row.is_total is (shown == "all")
    assert owner_part(row) == shown


@pytest.mark.parametrize(
    ("values", "shown"),
    [({"phase": "backward", "operation": "Softmax"}, "backward: Softmax"), ({"phase": "forward"}, "forward"), ({}, "")],
)
def test_allocations_are_named_by_phase_and_operation(values, shown):
    assert made_in(row_of("allocation", {"rank": 1}, {"mib": 1.0, **values})) == shown
