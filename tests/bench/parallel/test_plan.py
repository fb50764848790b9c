"""The plan's memory of every scheme against what two H200s held."""

from pathlib import Path

import pytest

from trainstep.bench.parallel.plan import moments, planned_bytes
from trainstep.config import SIZES
from trainstep.records import read_records
from trainstep.schemes import BENCH_SCHEMES, SCHEMES

MEASURED = Path(__file__).parents[3] / "docs" / "results" / "h200-parallel.jsonl"


def test_memory_is_within_five_percent_at_three_moments_for_every_scheme():
    rows = {row.case["scheme"]: row for row in read_records(MEASURED)}
    assert set(rows) == set(BENCH_SCHEMES)
    for scheme, row in rows.items():
        model = SIZES[row.case["workload"]]
        plan = planned_bytes(
            SCHEMES[scheme],
            model.num_parameters,
            row.case["world_size"],
            precision=row.case["precision"],
            optimizer=row.case["optimizer"],
            model=model,
            peer_copies=SCHEMES[scheme].takes_peer_copies,
        )
        for column, predicted in moments(plan).items():
            measured = row.values[column.removeprefix("predicted_")]
            assert predicted == pytest.approx(measured, rel=0.05), (scheme, column)
