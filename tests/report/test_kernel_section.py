"""The page's section on kernels: its sentences, its tables, and in a browser the timeline: hover and zoom."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.report import sample
from tests.report.browsing import complaints, hover, open_page, requests, wait_for
from tests.report.page import Page
from trainstep.bench.kernel_rows import profile_rows, summary_values
from trainstep.kinds import FamilyRow, row_of
from trainstep.measure.kernel_families import Family
from trainstep.measure.kernels import Kernel, Lane, Profile
from trainstep.records import Row, of_kind
from trainstep.report.findings import findings
from trainstep.report.html import render, write_html

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
        stream = "0/7" if lane == "compute" else "0/9"
        self.kernels.append(
            Kernel(name, family, self.now, microseconds, stream, lane, True, "0", phase, module, piece, None, call,
                   flops, bytes)
        )  # fmt: skip
        self.now += microseconds if lane == "compute" else 0.0


def gpu_profile() -> Profile:
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
    return Profile(tuple(step.kernels), 1, True, False, 0.0)


def ceilings() -> list[Row]:
    rows = {"matmul bf16": {"tflops": 800.0}, "matmul fp32": {"tflops": 51.0}, "copy": {"gb_s": 4200.0}}
    return [row_of("ceiling", {"what": what}, values) for what, values in rows.items()]


def records(profile: Profile, **values: Any) -> list[Row]:
    summary = summary_values(profile) | TIMES | values
    return [*ceilings(), row_of("profile", CASE, summary), *profile_rows(profile, CASE, "bf16", {})]


def sentences(rows: list[Row]) -> list[str]:
    return [each.sentence for each in findings(rows) if each.topic == "kernels"]


def rung(name: str, **values: Any) -> Row:
    return row_of("rung", {"rung": name}, {"verdict": "faster", "kept": False, "gain": 1.27, **values})


def test_sentences_say_what_dominates_by_time_and_not_by_count() -> None:
    said = " ".join(sentences(records(gpu_profile())))
    assert (
        "In the whole step, the kernel that takes most time is nvjet_backward (tensor-core matmul): 31% of the kernel "
        "time, 0.300 ms in 2 calls. Called most often, 6 times, is elementwise <script>."
    ) in said
    assert "Profiling cost 20% of the step (2.00 ms → 2.40 ms): compare kernel times with one another" in said
    assert "Matrix products take 36% of the kernel time in forward and 47% in the whole step" in said
    assert "The device has nothing to do for 15% of the step (0.300 ms of 2.00 ms, without the profiler)" in said
    assert "Communication takes 0.100 ms per step, 100% of it beside compute." in said


@pytest.mark.parametrize(
    ("kernel", "brief"),
    [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT"),
        ("vectorized_elementwise_kernel<8, bfloat16_copy_kernel_cuda, array<char*, 2ul> >",
         "vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda>"),
        ("multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarFunctor<float, 1, 1, 0>, m…",
         "multi_tensor_apply_kernel<BinaryOpScalarFunctor>"),
        ("softmax_warp_forward<float, float, float, 9, false, false>", "softmax_warp_forward"),
    ],
)  # fmt: skip
def test_sentences_name_a_kernel_by_what_tells_it_apart(kernel: str, brief: str) -> None:
    (row,) = [row for row in records(gpu_profile()) if row.kind == "profile"]
    named = dataclasses.replace(row, values=row.values | {"top_forward_kernel": kernel})
    assert f"the kernel that takes most time is {brief} (" in " ".join(sentences([named]))


def test_softmax_is_held_against_the_scores_and_the_ladder_proves_it() -> None:
    (said,) = (each for each in sentences(records(gpu_profile())) if each.startswith("Softmax"))
    assert said == (
        "Softmax takes 2.5× more time than the score product with 40× fewer FLOPs: it is bound by memory (it moves "
        "3,200 GB/s, 76% of a large copy here); a fused attention removes it."
    )
    others = [each for each in records(gpu_profile()) if each.case.get("what") != "copy"]
    faster = row_of("ceiling", {"what": "copy"}, {"gb_s": 9000.0})
    assert any(
        "its arithmetic is not what takes the time (it moves 3,200 GB/s, 36%" in each
        for each in sentences([*others, faster])
    )
    pieces = {
        each.case["piece"]: each
        for each in others
        if each.kind == "attention piece" and each.case["phase"] == "forward"
    }
    equal = dataclasses.replace(
        pieces["softmax"], values=pieces["softmax"].values | {"main_ms": pieces["scores"].values["main_ms"]}
    )
    swapped = [equal if each is pieces["softmax"] else each for each in others]
    assert any("Softmax takes as much time as the score product with 40× fewer" in each for each in sentences(swapped))
    ladder = [rung("fused attention"), rung("our FlashAttention", verdict="slower", gain=0.8)]
    (said,) = (each for each in sentences([*records(gpu_profile()), *ladder]) if each.startswith("Softmax"))
    assert said.endswith(
        "On the ladder, fused attention made the step 1.27× faster and our FlashAttention made the step 1.25× slower."
    )


def test_float32_products_are_not_taken_for_tensor_cores() -> None:
    profile = gpu_profile()
    simt = [
        dataclasses.replace(each, family="FP32 SIMT matmul") if each.family == "tensor-core matmul" else each
        for each in profile.kernels
    ]
    rows = [*records(dataclasses.replace(profile, kernels=tuple(simt))), rung("TF32 matmuls")]
    said = " ".join(sentences(with_settings(rows, precision="fp32")))
    assert (
        "47% of the kernel time are float32 products on the ordinary units, not on tensor cores: TF32 or bf16 moves "
        "them there. On the ladder, TF32 matmuls made the step 1.27× faster."
    ) in said


def test_float32_products_of_a_bf16_step_are_not_told_to_use_bf16() -> None:
    profile = gpu_profile()
    simt = [
        dataclasses.replace(each, family="FP32 SIMT matmul") if each.phase == "backward" else each
        for each in profile.kernels
        if each.lane == "compute"
    ]
    rows = [*records(dataclasses.replace(profile, kernels=tuple(simt))), rung("bf16 autocast")]
    (said,) = (each for each in sentences(rows) if "float32 products" in each)
    assert said.endswith("not on tensor cores, though the step runs in bf16: 100% of it in backward.")


def test_a_profile_that_cannot_be_trusted_says_so() -> None:
    profile = gpu_profile()
    unplaced = [dataclasses.replace(each, module=None) if each.piece else each for each in profile.kernels]
    rows = records(dataclasses.replace(profile, kernels=tuple(unplaced)), sums_disagree="forward", profiler_cost=-0.5)
    said = " ".join(sentences(rows))
    assert "Only 81.4% of kernel time could be put in a phase and a module" in said
    assert "Kernels took longer than the unprofiled step in: forward." in said
    assert "the machine changed meanwhile" in said


@pytest.mark.parametrize(("cost", "said"), [(-0.019, True), (0.0, True), (0.015, True), (0.021, False)])
def test_a_profiler_that_costs_nothing_warns_of_nothing(cost: float, said: bool) -> None:
    told = " ".join(sentences(records(gpu_profile(), profiler_cost=cost, profiled_step_ms=2.0 * (1 + cost))))
    assert ("Profiling cost nothing that shows (2.00 ms → " in told) is said
    assert ("compare kernel times with one another" in told) is not said


def with_settings(rows: list[Row], **settings: Any) -> list[Row]:
    return [row if row.kind == "ceiling" else dataclasses.replace(row, case={**row.case, **settings}) for row in rows]


LADDER = [rung("compiled blocks"), rung("fused optimizer")]


@pytest.mark.parametrize(
    ("compile_mode", "said"),
    [
        (None, ", which torch.compile would save, where it is not used yet, by fusing them. On the ladder, compiled "
               "blocks made the step 1.27× faster."),
        ("off", ", which torch.compile saves by fusing them. On the ladder, compiled blocks made the step 1.27× "
                "faster."),
        ("blocks", ", though the blocks are compiled; 100% of it in forward."),
        ("model", ", though the model is compiled; 100% of it in forward."),
    ],
)  # fmt: skip
def test_only_what_is_not_compiled_is_told_to_compile(compile_mode: str | None, said: str) -> None:
    told = sentences([*with_settings(records(gpu_profile()), compile=compile_mode), *LADDER])
    (fusable,) = (each for each in told if each.startswith("Elementwise"))
    assert fusable.endswith("each reads and writes whole tensors" + said)
    (idle,) = (each for each in told if each.startswith("The device has nothing to do"))
    assert ("On the ladder" in idle) is (compile_mode in (None, "off"))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (None, ": its fused form, where it is not used yet, reads and writes everything once. On the ladder, fused "
               "optimizer made the step 1.27× faster."),
        ("adamw-foreach", ": its fused form reads and writes everything once. On the ladder, fused optimizer made the "
                          "step 1.27× faster."),
        ("adamw-fused", ", fused already: that grows with the parameters alone, so a larger batch makes its share "
                        "smaller."),
        ("sgd", ": that grows with the parameters alone, so a larger batch makes its share smaller."),
    ],
)  # fmt: skip
def test_only_what_is_not_fused_is_told_to_fuse(optimizer: str | None, said: str) -> None:
    profile = gpu_profile()
    longer = [
        dataclasses.replace(each, duration_us=300.0) if each.family == "optimizer" else each for each in profile.kernels
    ]
    rows = with_settings(records(dataclasses.replace(profile, kernels=tuple(longer))), optimizer=optimizer)
    (told,) = (each for each in sentences([*rows, *LADDER]) if each.startswith("The optimizer takes"))
    assert told.endswith("of the kernel time and moves 0.400 GB" + said)


def test_tables_hold_the_rows() -> None:
    rows = records(gpu_profile())
    page = Page(render(rows))
    assert "#kernels" in page.anchors
    shown = page.values["families"]
    for row in of_kind(rows, FamilyRow):
        if row.case["phase"] == "step":
            assert float(shown[f"step: {row.case['family']}"]["ms"]) == row.values["ms"]
    assert float(shown["step: optimizer"]["of_limit"]) == pytest.approx(400 / 0.12 / 4200)
    modules = page.values["modules"]
    assert float(modules["blocks.*.attention"]["forward_ms"]) == pytest.approx(0.26)
    assert float(modules["(optimizer)"]["optimizer_ms"]) == pytest.approx(0.12)
    assert float(page.values["pieces"]["forward: softmax"]["main_ms"]) == pytest.approx(0.1)


def test_a_profile_that_did_not_run_says_why() -> None:
    failed = row_of("profile", CASE, status="out of memory", reason="no room for it")
    assert "no room for it" in render([failed])
    assert sentences([failed]) == []


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
FIGURE = "const source = Bokeh.documents.map((doc) => doc.get_model_by_name('timeline')).find(Boolean);" \
         "const figure = source.document.roots()[0];"  # fmt: skip


def large_profile(count: int = 30_000) -> Profile:
    """As many kernels as several steps of a large model have."""
    step = Step()
    families: tuple[Family, ...] = ("tensor-core matmul", "elementwise", "softmax", "copy")
    for index in range(count):
        phase = "forward" if index < count // 3 else "backward"
        step.run(f"kernel_{index % 150}", families[index // 2 % 4], 10 + index % 7, phase, f"blocks.{index % 64}.layer")
    return Profile(tuple(step.kernels), 1, True, False, 0.0)


def test_a_large_profile_makes_a_small_page() -> None:
    html = render(records(large_profile()))
    assert len(html.encode()) < 1_500_000
    assert "30,000 kernels as" in html


@pytest.fixture(scope="module")
def kernels_page(page_folder: Path) -> str:
    path = page_folder / "kernels.html"
    write_html(records(gpu_profile()), path)
    return path.as_uri()


def on_screen(browser: Any, name: str) -> tuple[float, float]:
    """The middle of a kernel's bar: as a share of the chart's width, and in pixels from its top."""
    x, y, width = browser.execute_script(
        FIGURE
        + """
        const i = source.data.name.indexOf(arguments[1]);
        const view = Bokeh.index.get_by_id(figure.id).frame;
        const rect = document.getElementById(arguments[0]).getBoundingClientRect();
        const middle = (source.data.left[i] + source.data.right[i]) / 2;
        return [view.x_scale.compute(middle), view.y_scale.compute(source.data.y[i]), rect.width];""",
        CHART,
        name,
    )
    return x / width, y


@pytest.mark.browser
def test_hovering_shows_a_kernel_its_phase_and_module(browser: Any, kernels_page: str) -> None:
    open_page(browser, kernels_page)
    tip = hover(browser, CHART, *on_screen(browser, "nvjet_backward"))
    assert tip.split("\n") == ["nvjet_backward", "tensor-core matmul, backward", "blocks.1.attention", "150 µs"]
    tip = hover(browser, CHART, *on_screen(browser, "ncclDevKernel_AllReduce"))
    assert tip.startswith("ncclDevKernel_AllReduce\ncommunication, backward")
    tip = hover(browser, CHART, *on_screen(browser, f"elementwise {HOSTILE}"))
    assert HOSTILE in tip
    assert browser.title == "large · trainstep report"
    assert complaints(browser) == []
    assert [url for url in requests(browser) if not url.startswith(("file://", "data:", "blob:"))] == []


@pytest.mark.browser
def test_dragging_zooms_in_time_alone_and_reset_returns(browser: Any, kernels_page: str) -> None:
    open_page(browser, kernels_page)
    ranges = FIGURE + "return [figure.x_range.end - figure.x_range.start, figure.y_range.end - figure.y_range.start]"
    whole, lanes = browser.execute_script(ranges)
    box = browser.execute_script(
        "const el = document.getElementById(arguments[0]); el.scrollIntoView({block: 'center'});"
        "const {left, top, width, height} = el.getBoundingClientRect(); return {left, top, width, height}",
        CHART,
    )
    y = box["top"] + 0.5 * box["height"]
    for kind, x in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        at = {"type": kind, "x": box["left"] + x * box["width"], "y": y, "button": "left", "clickCount": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {**at, "buttons": int(kind != "mouseReleased")})
    wait_for(browser, FIGURE + "return figure.x_range.end - figure.x_range.start < 0.5 * arguments[0]", whole)
    assert browser.execute_script(ranges)[1] == lanes
    browser.execute_script(FIGURE + "figure.reset.emit()")
    wait_for(browser, FIGURE + "return figure.x_range.end - figure.x_range.start === arguments[0]", whole)


@pytest.mark.browser
def test_a_phone_has_room_for_it(browser: Any, kernels_page: str) -> None:
    open_page(browser, kernels_page, width=320)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 320
