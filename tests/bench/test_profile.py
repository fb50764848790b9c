"""`bench.profile`: the rows of a profile, of a case that cannot run, and of a trace from elsewhere."""

import dataclasses
import gzip
import json

import pytest

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UsageError
from trainstep.bench.profile import profile_records, records_from_file, run_nvtx
from trainstep.measure.profile.kernels import Kernel, KernelProfile
from trainstep.measure.profile.rows import timeline_values
from trainstep.measure.profile.trace import Stream
from trainstep.rows import FamilyRow, KernelRow, PieceRow, ProfileRow, TimelineRow
from trainstep.rows.records import of_kind
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=32, d_ff=48, num_layers=3, num_heads=2)
SOURCE = builtin_source("toy", MODEL)
CONFIG = StepConfig(batch=2, context=16, device="cpu")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    trace = tmp_path_factory.mktemp("profile") / "trace.json.gz"
    found = list(profile_records(SOURCE, CONFIG, warmup=1, steps=7, profiled_steps=2, trace=trace))
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], "the trace is kept"
    return found


def summary(records):
    (row,) = of_kind(records, ProfileRow)
    return row.values


def test_the_summary(records):
    values = summary(records)
    assert (values["n"], values["profiled_n"]) == (7, 2)
    assert values["module_coverage"] >= 0.98
    assert values["profiler_cost_ms"] == pytest.approx(values["profiled_step_ms"] - values["step_ms"])
    assert values["trace"] == "trace.json.gz"
    phases = ("forward", "loss", "backward", "optimizer")
    assert sum(values[f"{name}_kernels_ms"] for name in phases) == pytest.approx(values["kernels_ms"], rel=0.02)
    for name in phases:
        assert 0 < values[f"{name}_busy_ms"] <= values["profiled_step_ms"] * 1.5, "of steps that were profiled"
        assert values[f"{name}_ms"] > 0
        assert values[f"{name}_profiled_ms"] > 0


def test_autograds_own_time_is_not_an_operator_that_is_called(records):
    for where in ("forward", "step"):
        assert summary(records)[f"most_called_{where}_kernel"].startswith("aten::")


def test_kernels_families_and_phases_are_the_same_time_cut_differently(records):
    total = summary(records)["kernels_ms"]
    families = of_kind(records, FamilyRow)
    assert sum(row.values["ms"] for row in of_kind(records, KernelRow)) == pytest.approx(total)
    assert sum(row.values["ms"] for row in families if row.case["phase"] == "step") == pytest.approx(total)
    assert sum(row.values["share"] for row in families if row.case["phase"] == "forward") == pytest.approx(1)


def test_calls_are_per_step_and_alike_modules_are_one_row(records):
    rows = [row for row in of_kind(records, KernelRow) if row.case["kernel"] == "aten::mm"]
    calls = {(row.case["phase"], row.case["module"]): row.values["calls"] for row in rows}
    assert calls["forward", "blocks.*.attention.query"] == MODEL.num_layers
    assert calls["backward", "blocks.*.attention.query"] == 2 * MODEL.num_layers
    assert calls["forward", "head"] == 1
    ordered = [row.values["ms"] for row in of_kind(records, KernelRow)]
    assert ordered == sorted(ordered, reverse=True)


def test_the_pieces_of_attention_have_their_flops(records):
    pieces = {(row.case["phase"], row.case["piece"]): row.values for row in of_kind(records, PieceRow)}
    elements = 2 * 16 * 16 * MODEL.num_heads * MODEL.num_layers
    assert pieces["forward", "scores"]["main_tflop"] == pytest.approx(2 * elements * MODEL.head_dim / 1e12)
    assert pieces["forward", "softmax"]["main_tflop"] == pytest.approx(5 * elements / 1e12)
    assert pieces["forward", "softmax"]["main_gb"] == pytest.approx(2 * elements * 4 / 1e9)
    assert pieces["backward", "weighted sum"]["main_tflop"] == pytest.approx(4 * elements * MODEL.head_dim / 1e12)


def test_the_timeline_holds_one_step(records):
    (row,) = of_kind(records, TimelineRow)
    assert row.joined_below_us is None
    lengths = {len(row.series[name]) for name in ("start_ns", "duration_ns", "kernel", "family", "phase", "module")}
    assert lengths == {row.values["bars"]}
    assert min(row.series["start_ns"]) == 0
    total_ms = sum(row.series["duration_ns"]) / 1e6
    assert total_ms <= 2 * summary(records)["kernels_ms"]
    assert max(row.series["module"]) < len(row.series["module_names"])


def kernel(index, phase="forward", stream=7):
    start = 3.0 * index
    return Kernel(
        f"k{index % 5}", "elementwise", start, 2.0, Stream(0, stream), "compute", True, "0", phase, "m", None, None
    )


def test_a_timeline_with_too_many_bars_joins_neighbours_and_says_so():
    kernels = [kernel(index, "forward" if index < 100 else "backward") for index in range(200)]
    values, series = timeline_values(KernelProfile(tuple(kernels), 1, True, False, 0.0), "0", longest=40)
    assert values["kernels"] == 200
    assert values["bars"] <= 40
    assert sum(series["count"]) == 200, "none is dropped"
    assert values["joined_below_us"] > 0
    boundary = [start for start, phase in zip(series["start_ns"], series["phase"], strict=True) if phase == 1]
    assert min(boundary) == 300_000, "phases are not joined"


def test_kernels_far_apart_are_not_joined_however_much_is_to_be_drawn():
    lonely = [dataclasses.replace(kernel(index, stream=20), name="lonely") for index in (0, 10_000)]
    kernels = [dataclasses.replace(kernel(index), family=("copy", "softmax")[index % 2]) for index in range(10_000)]
    values, series = timeline_values(KernelProfile((*kernels, *lonely), 1, True, False, 0.0), "0", longest=500)
    assert values["bars"] <= 500
    names = (series["kernel_names"][each] for each in series["kernel"])
    assert [each for each, name in zip(series["count"], names, strict=True) if name == "lonely"] == [1, 1]


def test_a_case_that_cannot_run_is_a_row():
    config = dataclasses.replace(CONFIG, precision="tf32")
    (row,) = profile_records(SOURCE, config, warmup=0, steps=1, profiled_steps=1)
    assert (row.kind, row.status) == ("profile", "unsupported")
    assert "tf32" in row.reason


def test_a_trace_read_back_gives_the_same_kernels(tmp_path, monkeypatch):
    trace = tmp_path / "trace.json.gz"
    monkeypatch.setattr("trainstep.bench.profile.MANY_MODULES", 10)
    found, again = list(profile_records(SOURCE, CONFIG, warmup=0, steps=1, trace=trace)), list(records_from_file(trace))
    assert summary(found)["profiled_n"] == 1, "of a large model one step by default"
    assert summary(again)["kernels_ms"] == pytest.approx(summary(found)["kernels_ms"])
    assert summary(again).get("step_ms") is None, "nothing was timed without the profiler"
    ours = [(row.case["kernel"], row.values["ms"]) for row in of_kind(found, KernelRow)]
    assert [(row.case["kernel"], row.values["ms"]) for row in of_kind(again, KernelRow)] == ours


def test_nvtx_without_a_gpu_is_refused():
    with pytest.raises(UsageError, match="a machine with a GPU"):
        run_nvtx(SOURCE, CONFIG, warmup=1, steps=1)


def test_a_trace_without_work_is_refused(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(UsageError, match="holds no kernels and no operators"):
        list(records_from_file(path))
