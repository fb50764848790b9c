"""Peaks over a grid and under each checkpointing policy as rows, predicted and measured."""

import dataclasses
from pathlib import Path

import pytest
import torch

from trainstep.base.config import POLICIES, ModelConfig, StepConfig
from trainstep.bench import memory
from trainstep.bench.memory import peak_records
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=3, num_heads=2)
TOY = builtin_source("toy", MODEL, Path(__file__))
STEP = StepConfig(batch=2, context=32, device="cpu")


@pytest.mark.thorough
def test_peaks_over_a_grid():
    configs = [dataclasses.replace(STEP, precision=precision, context=context)
               for precision in ("fp32", "bf16") for context in (16, 32)]  # fmt: skip
    configs.append(dataclasses.replace(STEP, compile="model"))
    rows = list(peak_records(TOY, configs, ["forward", "step"]))
    assert [row.status for row in rows] == ["ok"] * 8 + ["unsupported"] * 2
    for forward, step in zip(rows[:8:2], rows[1:8:2], strict=True):
        assert (forward.mode, step.mode) == ("forward", "step")
        assert forward.peak_gib < step.forward_peak_gib <= step.peak_gib
        assert step.at_rest_gib > 2.9 * forward.at_rest_gib, "AdamW's state"
        assert abs(forward.prediction_error) < 0.005
        assert abs(step.prediction_error) < 0.005
        assert step.predicted_gib == pytest.approx(step.peak_gib * (1 + step.prediction_error))
        peaks_of_phases = {name: getattr(step, f"{name}_peak_gib") for name in ("forward", "loss", "backward")}
        assert peaks_of_phases.get(step.peak_phase, step.optimizer_peak_gib) == step.peak_gib
    assert rows[1].peak_gib < rows[3].peak_gib, "the longer context"


def test_a_case_that_does_not_fit_is_a_row(monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 42 GiB")

    monkeypatch.setattr(memory, "measure_peaks", no_room)
    (row,) = peak_records(TOY, [STEP], ["step"])
    assert (row.status, row.reason) == ("out of memory", "CUDA out of memory. Tried to allocate 42 GiB")
    assert row.predicted_gib > 0


def test_policies_are_measured_beside_predicted():
    configs = [dataclasses.replace(STEP, optimizer="sgd", checkpointing=name) for name in POLICIES]
    rows = list(peak_records(TOY, configs, ["step"]))
    assert [row.status for row in rows] == ["ok"] * 3
    none, every_1, selective = rows
    assert max(abs(row.prediction_error) for row in (none, every_1)) < 0.005
    assert selective.predicted_gib is None
    assert every_1.peak_gib < selective.peak_gib < none.peak_gib
