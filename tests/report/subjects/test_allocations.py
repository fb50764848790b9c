"""The page's section on allocations, what owns the peak, and in a browser the stacked timeline: hover, zoom, detail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.browsing import complaints, drag, hover, noise, open_page, set_scheme, wait_for, wait_until_drawn
from trainstep.base.config import ModelConfig, StepConfig
from trainstep.bench.allocations import allocation_records, imported_records
from trainstep.measure.allocations.snapshot import snapshot_of, write_snapshot
from trainstep.measure.allocations.timeline import Allocation, Block, Frame, Timeline
from trainstep.report.page import render, write_html
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
FIGURE = "const source = Bokeh.documents.map((doc) => doc.get_model_by_name('allocations')).find(Boolean);" \
         "const figure = source.document.roots()[0];"  # fmt: skip


@pytest.fixture(scope="module")
def allocations_page(page_folder: Path, toy_records: list[Row]) -> str:
    path = page_folder / "allocations.html"
    write_html(toy_records, path)
    return path.as_uri()


def move(browser: Any, slider: float) -> tuple[int, str]:
    """Put the slider somewhere; how many shapes there are then, and what is said of them."""
    browser.execute_script(
        "const slider = document.getElementById('detail-allocations-0'); slider.value = arguments[0];"
        "slider.dispatchEvent(new Event('input'))",
        slider,
    )
    count = browser.execute_script(FIGURE + "return source.data.xs.length")
    return count, browser.execute_script("return document.querySelector('.detail output').textContent")


def top_of_stack(browser: Any) -> float:
    return browser.execute_script(FIGURE + "return Math.max(...source.data.ys.map((ys) => Math.max(...ys)))")


@pytest.mark.browser
def test_the_slider_hides_small_allocations_and_loses_none(
    browser: Any, allocations_page: str, toy_records: list[Row]
) -> None:
    open_page(browser, allocations_page)
    row = toy_records[0]
    total, peak = row.allocations, row.peak_gib * 1024

    everything, says = move(browser, 1)
    assert says == f"all {total:,} allocations one by one"
    assert everything == total
    assert top_of_stack(browser) == pytest.approx(peak, rel=1e-4)
    few, says = move(browser, 0)
    assert says.endswith(f"; {total - 1:,} others together")
    assert few <= 1 + len(row.series["groups"])
    assert top_of_stack(browser) == pytest.approx(peak, rel=1e-3)
    set_scheme(browser, "dark")
    wait_until_drawn(browser, "dark")
    assert browser.execute_script(FIGURE + "return source.data.xs.length") == few, "the reader's choice is kept"
    assert noise(browser) == []


@pytest.mark.browser
def test_hovering_shows_size_owner_and_line_and_dragging_zooms(browser: Any, allocations_page: str) -> None:
    open_page(browser, allocations_page)
    move(browser, 1)
    box = browser.execute_script(
        "const el = document.getElementById(arguments[0]); el.scrollIntoView({block: 'center'});"
        "return [el.clientWidth, el.clientHeight]",
        CHART,
    )
    # The largest activation: where it is on the screen, from its shape and the axes' scales.
    middle = browser.execute_script(
        FIGURE
        + """
        const names = source.data.name, areas = source.data.xs.map((xs, i) => names[i].startsWith("activations") ?
          (Math.max(...xs) - Math.min(...xs)) * (source.data.ys[i].at(-1) - source.data.ys[i][0]) : 0);
        const i = areas.indexOf(Math.max(...areas)), xs = source.data.xs[i], ys = source.data.ys[i];
        const x = xs[0] + 0.02 * (Math.max(...xs) - xs[0]), y = (ys[0] + ys.at(-1)) / 2;
        const view = Bokeh.index.get_by_id(figure.id).frame;
        const rect = document.getElementById(arguments[0]).getBoundingClientRect();
        return [view.x_scale.compute(x), view.y_scale.compute(y), rect.width];""",
        CHART,
    )
    assert 0 < middle[1] < box[1]
    tip = hover(browser, CHART, middle[0] / middle[2], middle[1])
    assert tip.startswith("activations of ")
    assert all(each in tip for each in ("iB", "made in ", ".py:", "alive from event"))

    span = FIGURE + "return [figure.x_range.start, figure.x_range.end]"
    whole = browser.execute_script(span)
    drag(browser, CHART)
    wait_for(browser, FIGURE + "return figure.x_range.end - figure.x_range.start < 0.5 * arguments[0]", whole[1])
    browser.execute_script(FIGURE + "figure.reset.emit()")
    wait_for(browser, FIGURE + "return figure.x_range.end === arguments[0]", whole[1])
    open_page(browser, allocations_page, width=320)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 320, "a phone has room for it"


@pytest.mark.browser
def test_hostile_names_are_shown_and_never_run(browser: Any, page_folder: Path, tmp_path: Path) -> None:
    write_snapshot(snapshot_of(large_timeline(3000)), tmp_path / "snapshot.pickle")
    page = page_folder / "hostile-allocations.html"
    write_html(list(imported_records(tmp_path / "snapshot.pickle")), page)
    open_page(browser, page.as_uri())
    move(browser, 1)
    assert str(LINE) in hover(browser, CHART, 0.5, 330)
    assert "run" not in browser.title.split()
    assert complaints(browser) == []
