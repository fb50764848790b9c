"""A run on a GPU: its state comes back from a checkpoint, its times are the device's."""

import time

import pytest

from tests.train.runs import alone, config, far_apart, losses, names, rows
from trainstep.records import read_records

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scheme", ["single", "ddp", "sharded-optimizer", "fsdp"])
def test_a_run_goes_on_with_the_state_it_had(tmp_path, scheme):
    run = config(scheme=scheme, step={"device": "cuda", "optimizer": "adamw-fused"})
    alone(run, tmp_path / "whole")
    assert alone(run, tmp_path / "parts", stop_after=6).step == 6
    assert names(tmp_path / "parts") == ["step-00000004", "step-00000006"]
    alone(run, tmp_path / "parts")
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert far_apart(whole[:7], parts[:7]) < 1e-5, "the first update after the checkpoint has the state before it"
    assert parts[-1] < parts[0] - 0.3
    (record,) = read_records(tmp_path / "parts" / "results.jsonl")
    assert record.values["peak_gib"] > 0


def test_times_add_up_to_no_more_than_the_run_took(tmp_path):
    start = time.perf_counter()
    alone(config(step={"device": "cuda", "precision": "bf16"}), tmp_path / "run")
    took_ms = 1e3 * (time.perf_counter() - start)
    times = [row["step_ms"] for row in rows(tmp_path / "run")]
    assert all(each > 0 for each in times)
    assert sum(times) < took_ms
