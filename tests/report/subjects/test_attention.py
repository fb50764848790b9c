"""Attention on the page."""

import dataclasses

from tests.report.page import Page
from trainstep.report.page import render
from trainstep.rows import AttentionRow
from trainstep.rows.records import Times


def row(impl, seq, both=1.0, status="ok", reason=""):
    found = {}
    if status == "ok":
        times = {"forward": Times(0.3), "backward": Times(0.7), "both": Times(both, 0.9, 1.1)}
        found = {"times": times, "both_tflops": 100.0, "before_backward_gib": 0.5, "peak_gib": 1.0}
    return AttentionRow(
        impl=impl, batch=1, heads=2, seq=seq, head_dim=64, causal="yes", dtype="bf16",
        status=status, reason=reason, **found,
    )  # fmt: skip


def test_every_case_is_a_row_with_its_raw_value():
    failed = row("eager", 2048, status="out of memory", reason="needed 20 GiB")
    page = render([row("flash-triton", 1024, 1.23456), row("flash-triton", 512), row("sdpa", 1024, 2.5), failed])
    shown = Page(page).values["attention"]
    assert [(cells["impl"], cells["seq"]) for cells in shown.values()] == [
        ("flash-triton", "1024"), ("flash-triton", "512"), ("sdpa", "1024"), ("eager", "2048"),
    ]  # fmt: skip
    assert shown["0"] == {
        "impl": "flash-triton", "seq": "1024", "forward_ms": "0.3", "backward_ms": "0.7", "both_ms": "1.23456",
        "both_low_ms": "0.9", "both_high_ms": "1.1", "both_tflops": "100.0", "before_backward_gib": "0.5",
        "peak_gib": "1.0",
    }  # fmt: skip
    assert shown["3"].keys() == {"impl", "seq"}, "no time for what did not run"
    assert "needed 20 GiB" in page
    assert page.count("<h2") >= 1
    assert "Time of forward and backward" in page
    assert "Peak memory" in page


def test_what_no_row_has_is_no_chart():
    """Peaks of compiled code on a CPU are not followed, and Triton's interpreter gives no times."""
    page = render([dataclasses.replace(row("eager-compiled", seq), peak_gib=None) for seq in (512, 1024)])
    assert "Time of forward and backward" in page
    assert "Peak memory" not in page
    note = "checked in Triton\N{RIGHT SINGLE QUOTATION MARK}s interpreter, no time"
    page = render(
        [dataclasses.replace(row("flash-triton", seq), times={}, peak_gib=None, not_timed=note) for seq in (64, 128)]
    )
    assert note in page
    assert "Time of forward and backward" not in page


def test_one_length_needs_no_chart():
    page = render([row("flash-triton", 1024), row("sdpa", 1024)])
    assert "Attention by implementation" in page
    assert "Time of forward and backward" not in page


def test_the_hosts_launches_are_told_where_they_are_known():
    known = dataclasses.replace(row("sdpa", 1024), issue_ms=1.25)
    assert "host’s launches" not in render([row("sdpa", 1024)])
    page = render([row("flash-triton", 1024), known])
    assert "as often as hides the host’s launches" in page
    assert Page(page).values["attention"]["1"]["issue_ms"] == "1.25"
