"""The page's section on kernels: its tables, and in a browser the timeline: hover and zoom."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.report import sample
from tests.report.browsing import drag, hover_bar, noise
from tests.report.page import Page
from trainstep.measure.profile.kernels import Family, Kernel, KernelProfile, Lane
from trainstep.measure.profile.rows import profile_rows, summary_values
from trainstep.measure.profile.trace import Stream
from trainstep.report.page import render
from trainstep.report.subjects.kernels import TOP_KERNELS, kernels
from trainstep.report.tables import Table
from trainstep.rows import CeilingRow, FamilyRow, KernelRow, ProfileRow
from trainstep.rows.records import Row, make_row, of_kind

HOSTILE = "<script>document.title = 'run'</script>"
CASE = {"workload": "large", "batch": 4, "context": 512, "precision": "bf16"}
TIMES = {"step_ms": 2.0, "profiled_step_ms": 2.4, "profiler_cost": 0.2, "n": 10, "idle_ms": 0.3, "idle_share": 0.15}


class Step:
    """Kernels of one step, one after the other."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.now = 0.0

    def run(
        self, name: str, family: Family, microseconds: float, phase: str = "forward", module: str | None = "blocks.0",
        *, piece: str | None = None, flops: float | None = None, bytes: float | None = None, lane: Lane = "compute",
    ) -> None:  # fmt: skip
        call = len(self.kernels) if flops or bytes else None
        stream = Stream(0, 7) if lane == "compute" else Stream(0, 9)
        self.kernels.append(
            Kernel(name, family, self.now, microseconds, stream, lane, True, "0", phase, module, piece, None, call,
                   flops, bytes)
        )  # fmt: skip
        self.now += microseconds if lane == "compute" else 0.0


def gpu_profile() -> KernelProfile:
    step = Step()
    for block in range(2):
        attention = f"blocks.{block}.attention"
        step.run("nvjet_qkv", "tensor-core matmul", 40, module=attention, flops=3e10, bytes=2e7)
        step.run("nvjet_scores", "tensor-core matmul", 20, module=attention, piece="scores", flops=4e9, bytes=3e7)
        step.run("softmax_warp_forward", "softmax", 50, module=attention, piece="softmax", flops=1e8, bytes=1.6e8)
        step.run("nvjet_sum", "tensor-core matmul", 20, module=attention, piece="weighted sum", flops=4e9, bytes=3e7)
        for _ in range(3):
            step.run(f"elementwise {HOSTILE}", "elementwise", 30, module=f"blocks.{block}.{HOSTILE}", bytes=1e8)
    step.run("cunn_SoftMaxForward", "softmax", 10, "loss", "(loss)", flops=1e7, bytes=4e7)
    step.run("ncclDevKernel_AllReduce", "communication", 100, "backward", "blocks.1.attention", lane="communication")
    for block in (1, 0):
        step.run("nvjet_backward", "tensor-core matmul", 150, "backward", f"blocks.{block}.attention", flops=1e11,
                 bytes=6e7)  # fmt: skip
    step.run("multi_tensor_apply_kernel", "optimizer", 120, "optimizer", "(optimizer)", flops=1e7, bytes=4e8)
    return KernelProfile(tuple(step.kernels), 1, True, False, 0.0)


def ceilings() -> list[Row]:
    products = {"bf16": 800.0, "fp32": 51.0}
    rows = [CeilingRow(operation="matmul", precision=name, tflops=rate) for name, rate in products.items()]
    return [*rows, CeilingRow(operation="copy", gb_s=4200.0)]


def records(profile: KernelProfile, **values: Any) -> list[Row]:
    summary = summary_values(profile) | TIMES | values
    return [*ceilings(), make_row(ProfileRow, CASE, summary), *profile_rows(profile, CASE, "bf16", {})]


def blocks_of(rows: list[Row]) -> list[Table]:
    section = kernels(rows)
    assert section is not None
    return [block for block in section.blocks if isinstance(block, Table)]


def test_tables_hold_the_rows() -> None:
    rows = records(gpu_profile())
    page = Page(render(rows))
    assert "#kernels" in page.anchors
    shown = page.values["families"]
    for row in of_kind(rows, FamilyRow):
        if row.phase == "step":
            assert float(shown[f"step: {row.family}"]["ms"]) == row.ms
    assert float(shown["step: optimizer"]["of_limit"]) == pytest.approx(400 / 0.12 / 4200)
    modules = page.values["modules"]
    assert float(modules["blocks.*.attention"]["forward_ms"]) == pytest.approx(0.26)
    assert float(modules["(optimizer)"]["optimizer_ms"]) == pytest.approx(0.12)
    assert float(page.values["pieces"]["forward: softmax"]["main_ms"]) == pytest.approx(0.1)


def test_the_kernels_that_have_no_row_are_one_row_together() -> None:
    rows = records(large_profile(900))
    kernels = of_kind(rows, KernelRow)
    assert len(kernels) > TOP_KERNELS
    shown = Page(render(rows)).values["kernels"]
    assert len(shown) == TOP_KERNELS + 1
    assert float(shown["others"]["ms"]) == pytest.approx(sum(row.ms or 0 for row in kernels[TOP_KERNELS:]))
    assert sum(float(cells["share"]) for cells in shown.values()) == pytest.approx(1)


def test_families_that_beat_the_large_product_are_marked() -> None:
    rows = [row for row in records(gpu_profile()) if not isinstance(row, CeilingRow)]
    slow = CeilingRow(operation="matmul", precision="bf16", tflops=600.0)
    (table,) = [each for each in blocks_of([slow, *rows]) if each.name == "families"]
    tones = {str(row.key): row.cells[-1].tone for row in table.rows if row.cells[-1].value is not None}
    assert tones == {
        "step: tensor-core matmul": "",
        "forward: tensor-core matmul": "",
        "backward: tensor-core matmul": "bad",
    }


def test_a_trace_without_steps_says_so() -> None:
    rows = records(dataclasses.replace(gpu_profile(), has_steps=False))
    assert "none announced: every figure is of the whole trace" in render(rows)
    assert "none announced" not in render(records(gpu_profile()))


def test_beside_the_rest_of_an_analysis() -> None:
    page = Page(render([*sample.h200_analysis(), *records(gpu_profile())]))
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)


# In a browser

CHART = "chart-timeline"
SHOWN = "return ['width', 'height'].map((name) => document.querySelector(`#chart-timeline .marks`)" \
        ".getAttribute(name) ?? '100%')"  # fmt: skip


def large_profile(count: int = 30_000) -> KernelProfile:
    """As many kernels as several steps of a large model have."""
    step = Step()
    families: tuple[Family, ...] = ("tensor-core matmul", "elementwise", "softmax", "copy")
    for index in range(count):
        phase = "forward" if index < count // 3 else "backward"
        step.run(f"kernel_{index % 150}", families[index // 2 % 4], 10 + index % 7, phase, f"blocks.{index % 64}.layer")
    return KernelProfile(tuple(step.kernels), 1, True, False, 0.0)


def test_a_large_profile_makes_a_small_page() -> None:
    html = render(records(large_profile()))
    assert len(html.encode()) < 1_500_000
    assert "30,000 kernels as" in html


@pytest.mark.browser
def test_hovering_shows_a_kernel_and_dragging_zooms_in_time_alone(browser: Any, show: Any) -> None:
    show(records(gpu_profile()))
    tip = hover_bar(browser, CHART, "nvjet_backward")
    assert tip.split("\n") == ["nvjet_backward", "tensor-core matmul, backward", "blocks.1.attention", "150 µs"]
    tip = hover_bar(browser, CHART, "ncclDevKernel_AllReduce")
    assert tip.startswith("ncclDevKernel_AllReduce\ncommunication, backward")
    assert HOSTILE in hover_bar(browser, CHART, f"elementwise {HOSTILE}")
    assert browser.title == "large · trainstep report"
    assert noise(browser) == []

    texts = "return [...document.querySelectorAll(`#${arguments[0]} .x-axis text`)].map((each) => each.textContent)"
    whole = browser.execute_script(texts, CHART)
    drag(browser, CHART)
    across, down = (float(size.removesuffix("%")) for size in browser.execute_script(SHOWN))
    assert (across, down) == (pytest.approx(500, rel=0.02), 100), "a fifth of the time, and all lanes"
    assert browser.execute_script(texts, CHART) != whole
    browser.find_element("css selector", f"#{CHART} button.all").click()
    assert (browser.execute_script(SHOWN), browser.execute_script(texts, CHART)) == (["100%", "100%"], whole)
    show(records(gpu_profile()), width=320)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 320, "a phone has room for it"
