"""The page's section on allocations, what owns the peak, and in a browser the stacked timeline: hover, zoom, detail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.browsing import complaints, drag, hover, noise
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.bench.allocations import allocation_records, imported_records
from trainstep.measure.allocations.snapshot import snapshot_of, write_snapshot
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, Timeline
from trainstep.report.page import render
from trainstep.report.subjects.allocations import owner_findings
from trainstep.rows import AllocationRow, MemoryTimelineRow, OwnerRow
from trainstep.rows.records import Row, of_kind, read_records, write_whole
from trainstep.step.workload import builtin_source

MODEL = ModelConfig(vocab_size=256, d_model=64, d_ff=128, num_layers=3, num_heads=2)
HOSTILE = "<script>document.title = 'run'</script>"
LINE = Frame(f"/me/{HOSTILE}.py", 1, "$$\\frac$$")


@pytest.fixture(scope="module")
def toy_records() -> list[Row]:
    config = StepConfig(batch=2, context=64, device="cpu", optimizer="sgd")
    return list(allocation_records(builtin_source("toy", MODEL, Path(__file__)), config))


def test_the_rows_of_a_step_add_up(toy_records: list[Row]) -> None:
    (timeline,) = of_kind(toy_records, MemoryTimelineRow)
    owners = [row for row in of_kind(toy_records, OwnerRow) if row.is_total]
    assert sum(row.mib for row in owners) / 1024 == pytest.approx(timeline.peak_gib)
    assert sum(row.share for row in owners) == pytest.approx(1)
    parts = [row for row in of_kind(toy_records, OwnerRow) if not row.is_total]
    assert {(row.owner, row.module, row.phase) for row in parts} >= {("activations", "blocks.*.attention", None)}
    for owner in {row.owner for row in parts}:
        (whole,) = [row for row in owners if row.owner == owner]
        assert sum(row.mib for row in parts if row.owner == owner) <= whole.mib * (1 + 1e-9)
    largest = of_kind(toy_records, AllocationRow)
    sizes = [row.mib for row in largest]
    assert sizes == sorted(sizes, reverse=True)
    assert {row.phase for row in largest} <= {"forward", "loss", "backward", "optimizer"}
    series = timeline.series
    assert len({len(series[name]) for name in ("start", "end", "bytes", "group", "what", "stack")}) == 1
    assert max(series["total"]) / 2**30 == timeline.peak_gib


def test_each_mode_has_its_picture_and_tables(toy_records: list[Row]) -> None:
    config = StepConfig(batch=2, context=64, device="cpu", optimizer="sgd")
    forward = list(allocation_records(builtin_source("toy", MODEL, Path(__file__)), config, "forward"))
    page = render([*forward, *toy_records])
    for place, mode in enumerate(("forward", "step")):
        assert f'id="chart-allocations-{place}"' in page
        for caption in ("Live memory", "Who owns the peak", "The largest allocations"):
            assert f"{caption}: mode {mode}" in page
    (found,) = owner_findings([*forward, *toy_records])
    assert found.figures == owner_findings(toy_records)[0].figures, "a whole step comes first"
    assert owner_findings(forward)[0].figures["phase"] == "forward"


def test_rows_survive_the_file(toy_records: list[Row], tmp_path: Path) -> None:
    write_whole(tmp_path / "results.jsonl", toy_records)
    again = read_records(tmp_path / "results.jsonl")
    assert [dict(row.case) for row in again] == [dict(row.case) for row in toy_records]
    assert "Who owns the peak" in render(again)


def large_timeline(count: int = 12_000) -> Timeline:
    """Nested activations, each with a temporary after it, and names that are hostile to a page."""
    frame, half = (LINE,), count // 2
    blocks = [Block(3 * i + 1, 4 * half - i, (1 + i % 97) << 18, i, frame) for i in range(half)]
    brief = [Block(3 * i + 2, 3 * i + 3, (1 + i % 89) << 18, i, frame) for i in range(half)]
    named = ((each, "activations", f"blocks.{each.address}.{HOSTILE}") for each in blocks)
    nameless = ((each, "temporaries", "") for each in brief)
    return Timeline(
        tuple(Allocation(*each, "", frames=frame, line=str(LINE)) for each in (*named, *nameless)), events=4 * half
    )


def snapshot(folder: Path, count: int) -> list[Row]:
    """Rows of a snapshot of so many allocations."""
    write_snapshot(snapshot_of(large_timeline(count)), folder / "snapshot.pickle")
    return list(imported_records(folder / "snapshot.pickle"))


def test_a_large_snapshot_makes_a_small_page(tmp_path: Path) -> None:
    timeline = large_timeline()
    write_snapshot(snapshot_of(timeline), tmp_path / "snapshot.pickle")
    records = list(imported_records(tmp_path / "snapshot.pickle"))
    (row,) = of_kind(records, MemoryTimelineRow)
    assert row.allocations == 12_000
    assert row.drawn == 2500
    assert row.peak_gib == timeline.peak / 2**30
    assert max(row.series["total"]) == timeline.peak
    html = render(records)
    assert len(html.encode()) < 1_500_000
    assert "the 9,500 below" in html
    assert HOSTILE not in html


def test_owners_of_a_foreign_snapshot_are_its_lines(tmp_path: Path) -> None:
    content = snapshot_of(large_timeline(60))
    for event in content["device_traces"][0]:
        event.pop("category")
    write_snapshot(content, tmp_path / "foreign.pickle")
    records = list(imported_records(tmp_path / "foreign.pickle"))
    assert {(row.owner, row.is_total) for row in of_kind(records, OwnerRow)} == {(str(LINE), True)}
    assert records[0].case == {"workload": "foreign.pickle", "device": 0}


# In a browser

CHART = "chart-allocations-0"
SHAPES = f"const shapes = [...document.querySelectorAll('#{CHART} [data-tip]')];"


def move(browser: Any, slider: float) -> tuple[int, str, float]:
    """Put the slider somewhere; how many shapes there are then, what is said of them, and the top of the stack."""
    return browser.execute_script(
        "const slider = document.getElementById('detail-allocations-0'); slider.value = arguments[0];"
        f"slider.dispatchEvent(new Event('input')); {SHAPES}"
        "const top = Math.min(...shapes.map((each) => each.getBBox().y)) / 1000;"
        "const high = Number(document.querySelector('.frame').dataset.ends.split(' ')[3]);"
        "return [shapes.length, document.querySelector('.detail output').textContent, high * (1 - top)]",
        slider,
    )


@pytest.mark.browser
def test_the_slider_hides_small_allocations_and_loses_none(browser: Any, show: Any, toy_records: list[Row]) -> None:
    show(toy_records)
    row = toy_records[0]
    total, peak = row.allocations, row.peak_gib * 1024

    everything, says, top = move(browser, 1)
    assert says == f"all {total:,} allocations one by one"
    assert everything == total
    assert top == pytest.approx(peak, rel=1e-4)
    few, says, top = move(browser, 0)
    assert says.endswith(f"; {total - 1:,} others together")
    assert few <= 1 + len(row.series["groups"])
    assert top == pytest.approx(peak, rel=1e-3)
    assert noise(browser) == []


@pytest.mark.browser
def test_hovering_shows_size_owner_and_line_and_dragging_zooms(browser: Any, show: Any, toy_records: list[Row]) -> None:
    show(toy_records)
    move(browser, 1)
    # The largest activation: a place near its left edge, as fractions of the frame, from its outline.
    place = browser.execute_script(
        SHAPES
        + """
        const found = shapes.filter((each) => each.dataset.tip.startsWith("activations")).map((each) => {
          const at = each.getAttribute("d").slice(1, -1).split(" ").map(Number), {width} = each.getBBox();
          return [width * (at[1] - at.at(-1)), (at[0] + 0.02 * width) / 1000, (at[1] + at.at(-1)) / 2000];
        });
        return found.reduce((most, each) => (each[0] > most[0] ? each : most)).slice(1);"""
    )
    tip = hover(browser, CHART, *place)
    assert tip.startswith("activations of ")
    assert all(each in tip for each in ("iB", "made in ", ".py:", "alive from event"))

    shown = f"return parseFloat(document.querySelector('#{CHART} .marks').getAttribute('width') ?? 100)"
    drag(browser, CHART)
    assert browser.execute_script(shown) == pytest.approx(500, rel=0.02)
    browser.find_element("css selector", f"#{CHART} button.all").click()
    assert browser.execute_script(shown) == 100
    show(toy_records, width=320)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 320, "a phone has room for it"


@pytest.mark.browser
def test_hostile_names_are_shown_and_never_run(browser: Any, show: Any, tmp_path: Path) -> None:
    show(snapshot(tmp_path, 3000))
    move(browser, 1)
    assert str(LINE) in hover(browser, CHART, 0.5, 0.8)
    assert "run" not in browser.title.split()
    assert complaints(browser) == []
