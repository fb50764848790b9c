"""Several ranks under torchrun: each has its rows, and the one that the others wait for is told."""

import statistics

import pytest

from tests.observe.measuring import SCRIPTS
from tests.torchrun import torchrun
from trainstep.report.subjects.run import late_ranks
from trainstep.rows import ScriptRow
from trainstep.rows.records import of_kind, read_records

LATE_MS = 1000
"""Enough to stand out where the machine itself keeps a rank waiting: beside three browsers for 267 ms in the median."""


@pytest.mark.distributed
def test_the_late_rank_is_told_by_what_it_did_before_the_others_waited(tmp_path):
    ended = torchrun("trainstep", "run", "--out", tmp_path, SCRIPTS / "ranks.py", LATE=str(LATE_MS / 1e3))
    assert ended.returncode == 0, ended.stderr
    rows = read_records(tmp_path / "results.jsonl")
    first, last = of_kind(rows, ScriptRow)
    assert [(row.rank, row.world_size, row.steps_seen) for row in (first, last)] == [(0, 2, 14), (1, 2, 14)]
    assert first.times["communication"].median > LATE_MS / 2, "it waits for the other one"
    assert last.times["communication"].median < LATE_MS / 2
    assert last.times["own"].median > first.times["own"].median + LATE_MS / 2
    # A step of one may end in the other's next.
    lasted = [statistics.mean(row.samples["step"]) for row in (first, last)]
    assert lasted[1] == pytest.approx(lasted[0], rel=0.3)
    (finding,) = late_ranks(rows)
    assert (finding.id, finding.figures["rank"], finding.figures["phase"]) == ("ranks.late", 1, "loss")
    assert last.latest_share > 0.8
    for said in ("(rank 0)\n", "torchrun … -m trainstep run --ladder --patch fix.diff python"):
        assert said in ended.stdout + ended.stderr
    assert ended.stderr.count("Written to") == 1, "one rank writes the report"
