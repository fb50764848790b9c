"""One's own loop, watched from inside."""

import pytest
import torch
from torch import nn

import trainstep
from trainstep.rows import ScriptRow
from trainstep.rows.records import of_kind, read_records


def train(steps, *, fails=False):
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if fails:
        raise ZeroDivisionError("the loss is divided by nothing")


def test_a_loop_gives_the_report_of_the_command(tmp_path):
    with trainstep.watch(tmp_path, name="loop", profiled_steps=0) as watch:
        train(12)
    train(3)  # no longer watched
    (row,) = of_kind(watch.rows, ScriptRow)
    assert (row.workload, row.steps_seen, row.n) == ("loop", 12, 7)
    assert "script.phases" in {finding.id for finding in watch.report.findings}
    assert (tmp_path / "report.html").exists()
    assert len(read_records(tmp_path / "results.jsonl")) == len(watch.rows)


def test_a_loop_that_raises_keeps_what_was_measured(tmp_path):
    watch = trainstep.watch(tmp_path, profiled_steps=0, memory=False)
    with pytest.raises(ZeroDivisionError), watch:
        train(4, fails=True)
    (row,) = of_kind(watch.rows, ScriptRow)
    assert row.steps_seen == 4
    assert row.ended.startswith("it was ended by ZeroDivisionError")


def test_a_loop_without_a_step_is_said(tmp_path):
    with trainstep.watch(tmp_path) as watch:
        pass
    assert [row.status for row in watch.rows] == ["failed"]
    with pytest.raises(trainstep.UsageError, match="make another one"):
        watch.start()
