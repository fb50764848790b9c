"""Traced steps of data parallel schemes on the page: their sums, their strips, and in a browser what is on which."""

from __future__ import annotations

from typing import Any

import pytest

from tests.report.browsing import hover_bar, noise
from tests.report.page import Page
from tests.report.test_charts import spans
from trainstep.bench.parallel.trace import TracedStep, family_rows, phases_of, trace_row
from trainstep.measure.outcome import Failure
from trainstep.measure.profile.kernels import Kernel, KernelProfile, kernel_family
from trainstep.measure.profile.trace import Stream, Trace
from trainstep.report.charts.traces import overlap_chart
from trainstep.report.page import render
from trainstep.rows import ParallelFamilyRow, ParallelRow, ParallelTraceRow
from trainstep.rows.records import Times

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BLOCKS = 32
FORWARD, BACKWARD, SENT, UPDATE = 1_200.0, 2_200.0, 1_200.0, 27_000.0
"""µs: one block's forward, its backward, its gradients' journey; the optimizer's step."""
STEP_MS = (BLOCKS * (FORWARD + BACKWARD) + UPDATE) / 1e3


def step(scheme: str, parts: int = 1) -> KernelProfile:
    """A GPU's step with `parts` kernels for each pass through a block."""
    found: list[Kernel] = []
    now = sent = 0.0

    def run(name: str, microseconds: float, phase: str, start: float | None = None) -> float:
        begin = now if start is None else start
        is_sent = kernel_family(name) == "communication"
        found.append(
            Kernel(name, kernel_family(name), begin, microseconds, Stream(0, 20) if is_sent else Stream(0, 7),
                   "communication" if is_sent else "compute", True, "0", phase, None, None, None)
        )  # fmt: skip
        return begin + microseconds

    for phase, length in (("forward", FORWARD), ("backward", BACKWARD)):
        for _ in range(BLOCKS):
            for part in range(parts):
                now = run(f"nvjet_{phase}_{part}", length / parts, phase)
            if scheme == "overlapped" and phase == "backward":
                sent = run(ALL_REDUCE, SENT, "backward", max(now, sent))
    if scheme == "flat":
        now = run(ALL_REDUCE, BLOCKS * SENT, "communication")
    now = max(now, sent)
    run("multi_tensor_apply_kernel", UPDATE, "optimizer")
    return KernelProfile(tuple(sorted(found, key=lambda each: each.start_us)), 1, True, False, 0.0)


def timed(scheme: str) -> ParallelRow:
    return ParallelRow(workload="2.7B", batch=4, scheme=scheme, world_size=2, times={"step": Times(175.0)})


def record(scheme: str, parts: int = 1) -> ParallelTraceRow:
    profile = step(scheme, parts)
    traced = TracedStep(profile, phases_of(Trace(), profile), wall_ms=200.0)
    return trace_row(timed(scheme), [traced, None], trace=f"trace-{scheme}.json.gz")


def records(parts: int = 1) -> list[ParallelTraceRow]:
    return [record(scheme, parts) for scheme in ("single", "flat", "overlapped")]


def test_sums_are_exact() -> None:
    alone, flat, overlapped = records()
    assert (alone.span_ms, alone.communication_ms, alone.hidden_share) == (pytest.approx(STEP_MS), 0, None)
    assert flat.exposed_communication_ms == pytest.approx(BLOCKS * SENT / 1e3)
    assert (flat.hidden_communication_ms, flat.idle_ms) == (0, pytest.approx(0))
    assert flat.span_ms == pytest.approx(STEP_MS + BLOCKS * SENT / 1e3)
    assert overlapped.communication_ms == pytest.approx(BLOCKS * SENT / 1e3)
    assert overlapped.exposed_communication_ms == pytest.approx(SENT / 1e3), "the last block's alone"
    assert overlapped.hidden_share == pytest.approx(1 - 1 / BLOCKS)
    assert overlapped.span_ms == pytest.approx(STEP_MS + SENT / 1e3)
    assert {row.step_ms for row in (alone, flat, overlapped)} == {175.0}


def test_phases_of_a_gpu_end_with_their_computation() -> None:
    flat, overlapped = (phases_of(Trace(), step(scheme)) for scheme in ("flat", "overlapped"))
    end = BLOCKS * (FORWARD + BACKWARD)
    assert overlapped["backward"] == pytest.approx((BLOCKS * FORWARD, end))
    assert "communication" not in overlapped
    assert flat["communication"] == pytest.approx((end, end + BLOCKS * SENT))


def test_a_long_step_is_a_light_row_with_exact_sums() -> None:
    row = record("overlapped", parts=400)
    assert row.kernels == 2 * BLOCKS * 400 + BLOCKS + 1
    assert row.bars is not None
    assert row.bars <= 1_500
    assert sum(row.series["count"]) == row.kernels, "none is dropped"
    assert row.exposed_communication_ms == pytest.approx(SENT / 1e3)


def family_records(scheme: str) -> list[ParallelFamilyRow]:
    profile = step(scheme)
    return list(family_rows(timed(scheme), [TracedStep(profile, phases_of(Trace(), profile), wall_ms=200.0), None]))


def test_computation_is_added_up_by_phase_and_family_and_communication_left_out() -> None:
    rows = family_records("overlapped")
    assert [(row.phase, row.family, row.kernels, row.ms) for row in rows] == [
        ("backward", "tensor-core matmul", BLOCKS, pytest.approx(BLOCKS * BACKWARD / 1e3)),
        ("forward", "tensor-core matmul", BLOCKS, pytest.approx(BLOCKS * FORWARD / 1e3)),
        ("optimizer", "optimizer", 1, pytest.approx(UPDATE / 1e3)),
    ]
    assert sum(row.share or 0 for row in rows) == pytest.approx(1)
    assert {row.scheme for row in rows} == {"overlapped"}
    assert not list(family_rows(timed("fsdp"), Failure("failed", "no CUPTI")))


def test_the_page_shows_schemes_on_one_axis_and_their_sums() -> None:
    failed = trace_row(timed("fsdp"), Failure("failed", "no CUPTI"), trace="trace-fsdp.json.gz")
    html = render([*records(parts=400), failed])
    page = Page(html)
    assert "#parallel" in page.anchors
    assert "chart-parallel-trace" in page.ids
    assert len(set(page.ids)) == len(page.ids)
    assert "38.4" in html
    assert "no CUPTI" in html
    assert "communication, hidden behind computation" in html
    assert len(html.encode()) < 1_000_000


# In a browser

CHART = "chart-parallel-trace"


@pytest.mark.browser
def test_communication_lies_under_backward_with_overlap_and_after_it_without(browser: Any, show: Any) -> None:
    show(records())
    all_reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    tip = hover_bar(browser, CHART, all_reduce, "overlapped")
    assert tip.split("\n") == [all_reduce, "overlapped: communication, backward", "1.20 ms"]
    tip = hover_bar(browser, CHART, "exposed communication", "flat")
    assert "38.4 ms in which nothing is computed" in tip
    tip = hover_bar(browser, CHART, "communication", "flat")
    assert tip.split("\n") == ["communication", "flat: from 109 to 147 ms"]
    chart = overlap_chart(records())
    flat, overlapped = (spans(chart, tip=f"{all_reduce}\n{scheme}:") for scheme in ("flat", "overlapped"))
    end = BLOCKS * (FORWARD + BACKWARD) / 1e3
    assert flat[0][0] == pytest.approx(end, rel=1e-4)
    assert BLOCKS * FORWARD / 1e3 < overlapped[0][0] < overlapped[-1][1] <= end + SENT / 1e3 + 1e-2
    assert noise(browser) == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
