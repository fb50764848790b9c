"""A run on a GPU: its state comes back from a checkpoint, its times are the device's."""

import time

import pytest
import torch

from tests.train import test_own
from tests.train.runs import alone, config, far_apart, losses, names, rows
from trainstep.base.hardware import find_device
from trainstep.measure.environment import device_name
from trainstep.rows.records import read_records

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


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


@pytest.mark.parametrize("scheme", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("name", ["tied", "batch_norm"])
def test_a_users_workload_goes_on_on_a_gpu(tmp_path, name, scheme):
    """Dropout and running statistics among it; FLOPs are counted on the device, in every start."""
    run = test_own.own(name, step={"device": "cuda"}, scheme=scheme, batches_per_update=2, steps=12, save_every=20)
    test_own.alone(run, tmp_path / "whole")
    test_own.alone(run, tmp_path / "parts", stop_after=6)
    test_own.alone(run, tmp_path / "parts")
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["since_start"] for row in parts] == [*range(1, 7), *range(1, 7)]
    assert far_apart([row["loss"] for row in whole], [row["loss"] for row in parts]) < 1e-5
    assert all(row["utilisation"] is not None for row in parts) == (find_device(device_name(CUDA)) is not None)
