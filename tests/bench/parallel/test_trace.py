"""`trainstep bench parallel --trace` under torchrun, as a user starts it: what Gloo's collectives lie beside."""

import pytest

from tests.torchrun import torchrun
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.ranges import GLOO
from trainstep.rows import ParallelTraceRow
from trainstep.rows.records import of_kind, read_records

pytestmark = pytest.mark.thorough

MODEL = ["--num-layers", "2", "--d-model", "32", "--d-ff", "64", "--num-heads", "2", "--vocab-size", "256",
         "--context", "16", "--batch", "2"]  # fmt: skip
SCHEMES = ("single", "flat", "overlapped")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("traced")
    words = [*MODEL, "--device", "cpu", "--steps", 6, "--warmup", 1, "--scheme", ",".join(SCHEMES)]
    found = torchrun("trainstep", "bench", "parallel", *words, "--trace", "--out", out)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("Written to") == 1
    assert "computation hides" in found.stdout
    return out


@pytest.fixture(scope="module")
def traced(folder):
    rows = read_records(folder / "results.jsonl")
    kinds = [row.kind for row in rows if row.kind != "parallel family"]
    assert kinds == ["parallel"] * 3 + ["parallel trace"] * 3, "all are timed before any is traced"
    return {row.case["scheme"]: row for row in of_kind(rows, ParallelTraceRow)}


def bars(row, beginning):
    """Start, count and phase of the bars whose kernel's name begins so."""
    series = row.series
    found = zip(series["start_ns"], series["count"], series["kernel"], series["phase"], strict=True)
    named = ((start, count, series["kernel_names"][name], series["phase_names"][phase])
             for start, count, name, phase in found)  # fmt: skip
    return [(start, count, phase) for start, count, name, phase in named if name.startswith(beginning)]


@pytest.mark.distributed
def test_sums_fit_together(traced):
    assert tuple(traced) == SCHEMES
    for scheme, row in traced.items():
        assert row.status == "ok", row.reason
        values = row.values
        assert values["on_cpu"] is True
        parts = values["computation_ms"] + values["exposed_communication_ms"] + values["idle_ms"]
        assert parts == pytest.approx(values["span_ms"], rel=1e-4)
        both = values["hidden_communication_ms"] + values["exposed_communication_ms"]
        assert both == pytest.approx(values["communication_ms"], rel=1e-4, abs=1e-6)
        assert (values["communication_ms"] > 0) == (scheme != "single")
        assert values["span_ms"] <= values["profiled_step_ms"] * 1.001


@pytest.mark.distributed
def test_without_overlap_everything_is_sent_after_backward(traced):
    flat = traced["flat"]
    spans = dict(zip(flat.series["phase_span_names"], flat.series["phase_span_start_ns"], strict=True))
    (collective,) = bars(flat, GLOO)
    assert collective[1] == 1, "a single call"
    assert collective[0] >= spans["communication"]
    assert {phase for *_, phase in bars(flat, "trainstep_exchanges::")} == {"communication"}


@pytest.mark.distributed
def test_with_overlap_calls_are_made_during_backward(traced):
    assert {phase for *_, phase in bars(traced["overlapped"], "trainstep_exchanges::")} == {"backward"}
    assert sum(count for _, count, _ in bars(traced["overlapped"], GLOO)) > 10, "one call per parameter"
    assert bars(traced["single"], GLOO) == []


@pytest.mark.distributed
def test_traces_are_kept_and_the_page_draws_them(folder, traced):
    for scheme, row in traced.items():
        assert row.values["trace"] == f"trace-{scheme}.json.gz"
        assert any(each.kind == "step" for each in read_chrome_trace(folder / row.values["trace"]).ranges)
    page = (folder / "report.html").read_text()
    assert 'id="chart-parallel-trace"' in page
    assert (folder / "tables" / "parallel-trace.csv").exists()
