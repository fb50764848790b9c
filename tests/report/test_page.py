"""The page: complete without a network, its numbers those of the records, and nobody's names run as code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.report import sample
from tests.report.page import HOSTILE, LADDER_COLUMNS, Page, hostile_records
from trainstep.base.errors import UsageError
from trainstep.report.blocks import fact
from trainstep.report.page import render, write_html
from trainstep.rows import (
    AttentionRow,
    ChangeRow,
    CollectiveRow,
    MemoryTimelineRow,
    ParallelTraceRow,
    PlanMachineRow,
    ProfileRow,
    StepRow,
    SweepRow,
)  # fmt: skip
from trainstep.rows.records import Row, of_kind, read_records


@pytest.mark.parametrize("records", [sample.cpu_analysis(), sample.h200_analysis()], ids=["cpu", "h200"])
def test_tables_hold_the_records_numbers_exactly(records: list[Row]) -> None:
    page = Page(render(records))

    assert page.open == []
    for row in of_kind(records, ChangeRow):
        expected = {name: value for name, value in row.values.items() if name in LADDER_COLUMNS}
        shown = page.values["ladder"].pop(row.change)
        assert {name: type(expected[name])(value) for name, value in shown.items()} == expected
    assert page.values["ladder"] == {}
    step = max(of_kind(records, StepRow), key=lambda row: row.case["warmup"])
    for phase in ("forward", "loss", "backward", "optimizer", "step"):
        for name in (f"{phase}_ms", f"{phase}_low_ms", f"{phase}_high_ms", f"{phase}_outliers"):
            assert float(page.values["phases"][phase][name]) == step.values[name]


def test_every_section_has_its_link_and_ids_are_unique() -> None:
    page = Page(render(sample.h200_analysis()))

    names = "summary phases warm-up ladder correctness memory workload environment"
    assert [link.removeprefix("#") for link in page.anchors] == names.split()
    assert len(set(page.ids)) == len(page.ids)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids), "evidence that is not there"
    assert len(page.links) > len(page.anchors)


def test_sections_without_records_are_left_out() -> None:
    records = sample.cpu_analysis()

    def sections(kinds: set[str]) -> list[str]:
        return Page(render([row for row in records if row.kind in kinds])).anchors

    assert sections({"change"}) == ["#summary", "#ladder", "#correctness", "#environment"]
    assert sections({"step"}) == ["#summary", "#phases", "#warm-up", "#memory", "#environment"]
    assert sections({"workload"}) == ["#workload", "#environment"]
    assert sections(set()) == []


def test_what_rungs_were_held_against_is_said_once_where_it_is_not_the_plain_step() -> None:
    rows = sample.cpu_analysis()
    said = "compared with the plain step with PyTorch's fused attention"
    assert said not in render(rows)
    told = [dataclasses.replace(row, reference=said.partition(" with ")[2]) for row in of_kind(rows, ChangeRow)]
    assert render(told).replace("&#39;", "'").count(said) == 1


def test_a_grid_shows_its_failed_cases_with_their_reason() -> None:
    row = of_kind(sample.cpu_analysis(), StepRow)[-1]
    failed = dataclasses.replace(
        row, precision="fp16", times={}, n=None, peak_gib=None, status="unsupported", reason="no fp16 on this CPU"
    )

    html = render([row, failed])

    assert "#grid" in Page(html).anchors
    assert "no fp16 on this CPU" in html
    assert "#grid" not in Page(render([row])).anchors


FAILED = {"status": "failed", "reason": "no room for it"}


@pytest.mark.parametrize(
    "row",
    [
        ProfileRow(workload="m", **FAILED),
        MemoryTimelineRow(workload="m", **FAILED),
        CollectiveRow(collective="all-reduce", world_size=2, dtype="fp32", size_mb=1.0, backend="nccl", **FAILED),
        AttentionRow(impl="eager", batch=1, heads=2, seq=64, head_dim=64, causal="yes", dtype="bf16", **FAILED),
        SweepRow(command="bench step", **FAILED),
        ParallelTraceRow(workload="m", scheme="fsdp", world_size=2, **FAILED),
    ],
    ids=lambda row: row.kind,
)
def test_what_did_not_run_says_why(row: Row) -> None:
    assert "no room for it" in render([row])


def test_a_ladder_on_which_nothing_ran() -> None:
    rung = of_kind(sample.h200_analysis(), ChangeRow)[0]
    failed = ChangeRow(**rung.case, verdict="out of memory", status="out of memory", reason="no room")

    html = render([failed])

    assert "Nothing could run here." in html
    assert "faster" not in html.partition("<main>")[2].partition("<footer>")[0].replace("no faster", "")


def test_a_ladder_without_gain_claims_none() -> None:
    baseline = of_kind(sample.cpu_analysis(), ChangeRow)[0]

    html = render([baseline])

    assert "nothing is known of what is faster than the baseline" in html
    assert "maths is still right</p>" not in html


def test_a_user_s_workload_without_settings_or_flops() -> None:
    def bare(row: Row) -> Row:
        absent = ("tokens", "tflop", "utilisation")
        unknown = [name for name in row.values if any(part in name for part in absent)]
        fixed = ("batch", "context", "attention", "loss")
        return dataclasses.replace(row, **dict.fromkeys([*fixed, *unknown]))

    html = render([bare(row) if row.kind != "ceiling" else row for row in sample.cpu_analysis()])

    assert ">None<" not in html
    assert "batch None" not in html
    assert "nan" not in html.lower().partition("<main>")[2].partition("<script")[0]


def test_nothing_on_the_page_is_fetched() -> None:
    html = render(sample.h200_analysis())
    page = Page(html)

    assert len(page.addresses) == len(page.links) + 1, "the links and the icon"
    assert [address for address in page.addresses if not address.startswith(("#", "data:"))] == []
    assert re.findall(r"url\((?!#)|@import|https?://", html) == []


def test_the_page_is_small() -> None:
    assert len(render(sample.h200_analysis()).encode()) < 250_000


def test_names_are_escaped_everywhere() -> None:
    html = render(hostile_records())

    assert HOSTILE not in html
    assert "&lt;script&gt;document.title" in html
    assert html.count("<script") == 2, "what is packed, and the page's own"


def test_an_unwritable_path_is_a_user_s_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*--out"):
        write_html(sample.cpu_analysis(), tmp_path / "file" / "report.html")


def test_sizes_and_names_carry_units() -> None:
    assert fact("max_sm_clock_mhz", 1980)[0] == "Highest SM clock"
    assert fact("max_sm_clock_mhz", 1980)[1].text == "1,980 MHz"
    assert fact("first_step_ms", 229.8)[0] == "First step"


@pytest.mark.parametrize(
    ("known", "tile"),
    [
        ((True, False), "<dd>228 MiB → not measured<small>of one step</small></dd>"),
        ((False, True), "<dd>not measured → 114 MiB<small>of one step</small></dd>"),
        ((True, True), "<dd>228 → 114 MiB<small>of one step</small></dd>"),
        ((False, False), "<dd>not measured<small>of one step</small></dd>"),
    ],
)
def test_a_peak_that_was_measured_once_is_not_shown_as_unchanged(known: tuple[bool, bool], tile: str) -> None:
    baseline = of_kind(sample.cpu_analysis(), ChangeRow)[0]
    peaks = [peak if is_known else None for peak, is_known in zip((0.223, 0.1115), known, strict=True)]
    first, last = (dataclasses.replace(baseline, peak_gib=peak) for peak in peaks)

    html = render([first, dataclasses.replace(last, change="compiled blocks", speedup_low=0.98, speedup_high=1.02)])

    assert f"<dt>Peak memory</dt>{tile}" in html


def test_only_a_page_with_measured_times_explains_medians() -> None:
    machine = PlanMachineRow(workload="big", device="NVIDIA H200", basis="a datasheet")

    def footer(records: list[Row]) -> str:
        return render(records).partition("<footer>")[2].partition("</footer>")[0]

    assert "Times are medians" not in footer([machine])
    assert "1 GiB = 2<sup>30</sup> bytes" in footer([machine])
    assert "Times are medians" in footer([machine, *sample.cpu_analysis()])


@pytest.mark.parametrize("name", ["h200-tour", "cpu-tour"])
def test_rows_kept_for_their_figures_alone_have_no_charts(name: str) -> None:
    """These files keep no series: their timelines were a KeyError."""
    records = read_records(Path(__file__).parents[2] / "docs" / "results" / f"{name}.jsonl")

    assert "allocations" in {link.removeprefix("#") for link in Page(render(records)).anchors}
