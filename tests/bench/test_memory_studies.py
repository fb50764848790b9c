"""`trainstep memory`: residuals and checkpointing as rows, and the sentence they end in."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from trainstep.bench import peaks
from trainstep.bench.checkpointing import checkpointing_records, default_policies
from trainstep.bench.peaks import peak_records
from trainstep.bench.residuals import measure_residuals, residual_records
from trainstep.config import ModelConfig, StepConfig
from trainstep.errors import UnsupportedError, UsageError
from trainstep.kinds import row_of
from trainstep.plan.memory import block_bytes
from trainstep.report.findings import findings
from trainstep.report.subjects import make_tables
from trainstep.workload import builtin_source, factory_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=64, num_layers=3, num_heads=2)
TOY = builtin_source("toy", MODEL, Path(__file__))
STEP = StepConfig(batch=2, context=32, device="cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_block_keeps_what_the_plan_says(precision):
    config = dataclasses.replace(STEP, precision=precision)
    found = measure_residuals(TOY, config)
    assert found.first_block.bytes == block_bytes(MODEL, config, on_cuda=False).kept
    head_and_loss = found.whole.bytes - 3 * found.first_block.bytes
    assert head_and_loss > 2 * 32 * 256 * 4, "at least the log-softmax"


def rows_of(config):
    return {(row.case["compile"], row.case["part"], row.case["what"]): row for row in residual_records(TOY, config)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_rows_of_residuals():
    rows = rows_of(STEP)
    whole = rows["off", "step", "all"].values
    listed = [row.values for (compile, part, what), row in rows.items() if (compile, part) == ("off", "step")]
    assert len(listed) == 5 + 2
    assert sum(values["mib"] for values in listed) == pytest.approx(2 * whole["mib"])
    assert sum(values["share"] for values in listed) == pytest.approx(2)
    largest = [values["mib"] for values in listed[:5]]
    assert largest == sorted(largest, reverse=True)
    stream = rows["off", "residual stream", "input of the first block"].values
    assert stream["mib"] == stream["formula_mib"] == 2 * 32 * 32 * 4 / 2**20
    assert rows["model", "step", "all"].values["mib"] < whole["mib"], "compiled code fuses what eager code keeps"
    eager, compiled = (rows[form, "first block", "all"].values for form in ("off", "blocks"))
    stream = 2 * 32 * 32 * 4 / 2**20
    assert stream < compiled["mib"] < eager["mib"], "at least its input, and less than eager code"
    (table,) = make_tables(list(rows.values()))
    assert "share (%)" in table.columns


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_code_checkpoints_too():
    eager, compiled = (
        measure_residuals(TOY, dataclasses.replace(STEP, checkpointing="every-1", compile=compile)).whole.bytes
        for compile in ("off", "model")
    )
    assert compiled <= eager


def test_selective_checkpointing_hides_what_it_keeps():
    with pytest.raises(UnsupportedError, match="use --checkpointing none"):
        measure_residuals(TOY, dataclasses.replace(STEP, checkpointing="selective"))


def test_peaks_over_a_grid():
    configs = [dataclasses.replace(STEP, precision=precision, context=context)
               for precision in ("fp32", "bf16") for context in (16, 32)]  # fmt: skip
    configs.append(dataclasses.replace(STEP, compile="model"))
    rows = list(peak_records(TOY, configs, ["forward", "step"]))
    assert [row.status for row in rows] == ["ok"] * 8 + ["unsupported"] * 2
    for forward, step in zip(rows[:8:2], rows[1:8:2], strict=True):
        assert (forward.case["mode"], step.case["mode"]) == ("forward", "step")
        assert forward.values["peak_gib"] < step.values["forward_peak_gib"] <= step.values["peak_gib"]
        assert step.values["at_rest_gib"] > 2.9 * forward.values["at_rest_gib"], "AdamW's state"
        assert "predicted_gib" not in forward.values
        assert abs(step.values["prediction_error"]) < 0.005
    assert rows[1].values["peak_gib"] < rows[3].values["peak_gib"], "the longer context"


def test_a_case_that_does_not_fit_is_a_row(monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 42 GiB")

    monkeypatch.setattr(peaks, "measure_peaks", no_room)
    (row,) = peak_records(TOY, [STEP], ["step"])
    assert (row.status, row.reason) == ("out of memory", "CUDA out of memory. Tried to allocate 42 GiB")
    assert row.values["predicted_gib"] > 0


def test_policies_to_try():
    names = default_policies(TOY, STEP)
    assert names == ["none", "every-1", "every-2", "every-3", "selective", "recursive"]
    deep = builtin_source("deep", dataclasses.replace(MODEL, num_layers=32))
    assert [name for name in default_policies(deep, STEP) if name.startswith("every")] == [
        f"every-{k}" for k in (1, 2, 4, 8, 16, 32)
    ]
    user = factory_source("examples.own_model:workload")
    assert default_policies(user, StepConfig(device="cpu"))[:3] == ["none", "every-1", "every-2"]


def test_measured_beside_predicted():
    config = dataclasses.replace(STEP, optimizer="sgd")
    rows = list(checkpointing_records(TOY, config, ["none", "every-1", "every-2", "selective"], warmup=1, steps=2))
    assert [row.status for row in rows] == ["ok"] * 4
    none, every_1, every_2, selective = (row.values for row in rows)
    for values in (none, every_1, every_2):
        assert abs(values["prediction_error"]) < 0.005
        assert values["step_ms"] > 0
    assert "predicted_gib" not in selective
    assert every_1["peak_gib"] < every_2["peak_gib"] < none["peak_gib"]
    assert every_1["peak_gib"] < selective["peak_gib"] < none["peak_gib"]


def test_a_wrong_policy_is_found_before_anything_runs():
    with pytest.raises(UsageError, match="expected none, every-K"):
        next(checkpointing_records(TOY, STEP, ["none", "often"]))


def study(limit, **peaks):
    return [
        row_of("checkpointing", {"checkpointing": name.replace("_", "-")}, {"peak_gib": peak, "memory_gib": limit})
        for name, peak in peaks.items()
    ]


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (None, "The best K is 2: a checkpoint every 2 blocks peaks at 3.00 GiB (beside it every-1 4.00 GiB and every-4 "
               "5.00 GiB); without checkpointing 9.00 GiB."),
        (8.0, "The best K is 2: a checkpoint every 2 blocks peaks at 3.00 GiB"),
        (10.0, "No checkpointing is needed: the step fits without (9.00 GiB of 10.00 GiB). For a larger batch or "
               "context the best K is 2: 3.00 GiB (beside it every-1 4.00 GiB and every-4 5.00 GiB)."),
        (2.0, "No policy of every K blocks fits into 2.00 GiB: the smallest peak is 3.00 GiB"),
    ],
)  # fmt: skip
def test_the_sentence(limit, sentence):
    (finding,) = findings(study(limit, none=9.0, every_1=4.0, every_2=3.0, every_4=5.0, every_8=6.0, selective=2.5))
    assert finding.sentence.startswith(sentence)


def test_the_sentence_says_what_the_best_policy_costs_in_time():
    rows = study(8.0, none=9.0, every_1=4.0, every_2=6.0)
    timed = [
        dataclasses.replace(row, samples={"step": [ms] * 7})
        for row, ms in zip(rows, (100.0, 126.0, 130.0), strict=True)
    ]
    (finding,) = findings(timed)
    assert "without checkpointing 9.00 GiB. With a checkpoint every block a step takes 1.26× the time without" in (
        finding.sentence
    )


def test_a_policy_that_ran_out_of_memory_is_left_out_of_the_sentence():
    rows = study(8.0, every_1=4.0, every_2=6.0)
    rows.insert(0, row_of("checkpointing", {"checkpointing": "none"}, {"memory_gib": 8.0}, status="out of memory"))
    (finding,) = findings(rows)
    assert finding.sentence.startswith("The best K is 1: a checkpoint every block peaks at 4.00 GiB")
    assert finding.sentence.endswith("6.00 GiB).")
