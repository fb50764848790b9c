"""Predictions against what H200s measured."""

import dataclasses
import statistics
from pathlib import Path

import pytest

from tables.predicted import checked
from trainstep.base.config import SIZES
from trainstep.base.hardware import require_device
from trainstep.plan.machine import machine_of
from trainstep.plan.measured import calibrated, scheme_launches
from trainstep.rows import row_of
from trainstep.rows.records import read_records

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CALIBRATION = [RESULTS / "h200-calibration.jsonl"]


def test_predictions_hold_for_sizes_that_were_not_calibrated_on():
    """The bars: step time within 20 %, memory within 5 %, on every step that H200s of quiet hosts measured."""
    machine = calibrated([row for path in CALIBRATION for row in read_records(path)])
    kept = (
        *("h200-step-sizes", "h200-analyze-2.7B", "h200-memory", "h200-checkpointing"),
        *("h200-parallel", "h200-parallel-4gpus"),
    )
    files = [path for name in kept if (path := RESULTS / f"{name}.jsonl").exists()]
    rows = list(checked([row for path in files for row in read_records(path)], machine))
    assert len(rows) >= 30
    times = [abs(float(row.values["time_error"])) for row in rows if "time_error" in row.values]
    assert max(times) < 0.20
    assert statistics.median(times) < 0.05
    memories = [abs(float(row.values["memory_error"])) for row in rows if "memory_error" in row.values]
    assert len(memories) >= 15
    assert max(memories) < 0.05


def test_four_gpus_of_a_slow_host_are_predicted_but_for_what_its_host_is_late_with():
    """Peaks are within 1 %."""
    machine = calibrated([row for path in CALIBRATION for row in read_records(path)])
    files = ("h200-parallel-peers-4gpus", "h200-parallel-compiled-4gpus")
    today, before = ([*checked(read_records(RESULTS / f"{name}.jsonl"), machine)] for name in files)
    memory = [row.memory_error for row in (*today, *before) if row.memory_error is not None]
    assert len(memory) == 8
    assert max(map(abs, memory)) < 0.01
    times = [row.time_error for row in before if row.case["scheme"] in ("single", "sharded-optimizer-1000")]
    assert len(times) == 3
    assert max(map(abs, times)) < 0.10


def test_a_step_takes_no_less_than_its_host_needs_to_launch_it():
    """Four H200s of a slow host: where it sets the pace the plan is within 3 % with what it took to launch a step, and
    a quarter too fast without."""
    rows = list(read_records(RESULTS / "h200-parallel-rounds-4gpus.jsonl"))
    before = calibrated([row for path in CALIBRATION for row in read_records(path)])
    machine = calibrated([*(row for path in CALIBRATION for row in read_records(path)), *rows])
    strategies = ("single", "ddp", "sharded optimizer", "fsdp", "hsdp")
    assert set(machine.scheme_launch_s) == {(each, "off", "bf16", 1) for each in strategies}
    assert "launches of data parallel steps" in machine.basis
    assert "launches of data parallel steps" not in before.basis
    late, told = ({row.case["scheme"]: row for row in checked(rows, each)} for each in (before, machine))
    for scheme in ("fsdp", "hsdp"):
        assert late[scheme].time_error < -0.2
        assert abs(told[scheme].time_error) < 0.03
    for scheme in ("single", "bucketed-1000"):  # which wait for the GPU
        assert late[scheme].time_error == told[scheme].time_error
        assert abs(told[scheme].time_error) < 0.06
    assert all(abs(row.memory_error) < 0.01 for row in told.values())


def test_launches_are_those_of_the_fastest_scheme_of_ours():
    case = {"workload": "large", "precision": "bf16", "compile": "blocks", "world_size": 2}

    def row(scheme, issue_ms, **settings):
        values = {"step_ms": 100.0} if issue_ms is None else {"issue_ms": issue_ms}
        return row_of("parallel", {**case, "scheme": scheme, **settings}, values)

    launched = {"bucketed-25": 90.0, "bucketed-1000": 72.0, "torch-ddp": 36.0, "fsdp": None, "single": 54.0}
    rows = [row(*each) for each in launched.items()]
    others = [
        dataclasses.replace(row("bucketed-1000", 1.0), status="failed"),
        row("fsdp", 1.0, workload="theirs"),
        row("bucketed-1000", 1.0, world_size=1),
        row("bucketed-1000", 1.0, checkpointing="every-1"),
        row("bucketed-1000", 18.0, precision="fp32"),
        row("single", 36.0, compile="off", world_size=1),
        row("fsdp", 45.0, blocks_per_group=2),
    ]
    found = scheme_launches([*rows, *others])
    milliseconds = {key: 1e3 * each * SIZES["large"].num_layers for key, each in found.items()}
    assert milliseconds == pytest.approx({
        ("ddp", "blocks", "bf16", 1): 72.0,
        ("single", "blocks", "bf16", 1): 54.0,
        ("ddp", "blocks", "fp32", 1): 18.0,
        ("single", "off", "bf16", 1): 36.0,
        ("fsdp", "blocks", "bf16", 2): 45.0,
    })  # fmt: skip
    slow = dataclasses.replace(machine_of(require_device("H200")), scheme_launch_s=found)
    (late,) = checked([row("single", None, batch=1, context=128, attention="sdpa")], slow)
    assert late.predicted_ms == pytest.approx(54.0), "no less than it takes to launch"


def test_parallel_rows_are_compared_by_scheme():
    machine = machine_of(require_device("H200"))
    case = {
        "workload": "2.7B", "batch": 4, "context": 512, "precision": "bf16", "compile": "off", "attention": "sdpa",
        "loss": "dense", "checkpointing": None, "optimizer": "adamw-fused", "world_size": 2,
    }  # fmt: skip
    schemes = ("single", "bucketed-25", "sharded-optimizer", "fsdp", "naive", "torch-ddp")
    schemes += ("bucketed-1000", "sharded-optimizer-1000", "fsdp-collectives")
    measured = [row_of("parallel", {**case, "scheme": name}, {"step_ms": 140.0, "peak_gib": 54.0}) for name in schemes]
    rows = list(checked(measured, machine))
    assert [(row.case["strategy"], row.case["gpus"]) for row in rows] == [
        ("single", 1), *[("ddp", 2), ("sharded optimizer", 2), ("fsdp", 2)] * 2
    ]  # fmt: skip
    peaks = [float(row.values["predicted_gib"]) for row in rows]
    assert peaks[0] == peaks[1] == peaks[4] > peaks[2] == peaks[5] > peaks[3] == peaks[6]
    failed = [dataclasses.replace(row, status="failed") for row in measured]
    assert not list(checked(failed, machine))
