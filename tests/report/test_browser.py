"""The page in a browser: it opens without a network, shows the records, answers the pointer, runs nobody's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report import sample
from tests.report.browsing import (
    DEEP,
    complaints,
    hover,
    noise,
    open_page,
    requests,
    set_scheme,
    wait_for,
    wait_until_drawn,
)
from tests.report.page import HOSTILE, as_numbers, expected_ladder, hostile_records
from trainstep.report.charts.rows import ROW_HEIGHT
from trainstep.report.page import write_html
from trainstep.report.subjects.climbs import of_steps, recommended_flags
from trainstep.rows import ChangeRow
from trainstep.rows.records import of_kind


@pytest.fixture(scope="module")
def h200_page(page_folder: Path) -> str:
    path = page_folder / "h200.html"
    write_html(sample.h200_analysis(), path)
    return path.as_uri()


@pytest.mark.browser
def test_the_shown_ladder_equals_the_records(browser: Any, h200_page: str) -> None:
    open_page(browser, h200_page)
    records = sample.h200_analysis()

    rows = browser.execute_script(
        "return [...document.querySelectorAll('table[data-table=ladder] tr[data-row]')].map((row) => [row.dataset.row,"
        "[...row.querySelectorAll('[data-column][data-value]')].map((el) => "
        "[el.dataset.column, el.dataset.value, el.firstChild?.textContent ?? ''])])"
    )
    shown = {row: {column: value for column, value, _ in cells} for row, cells in rows}

    assert as_numbers(shown) == expected_ladder(records)
    texts = [(value, text) for _, cells in rows for column, value, text in cells if column.endswith(("_ms", "_gib"))]
    assert len(texts) > 20
    for value, text in texts:
        assert float(text.strip().replace(",", "")) == pytest.approx(float(value), rel=0.005)
    headline = browser.execute_script("return document.querySelector('.headline .figure').dataset.value")
    assert float(headline) == of_steps(records)[0].accepted[-1].values["speedup"]
    assert noise(browser) == []


@pytest.mark.browser
def test_every_chart_answers_the_pointer(browser: Any, h200_page: str) -> None:
    open_page(browser, h200_page)
    records = sample.h200_analysis()

    charts = browser.execute_script("return [...document.querySelectorAll('.chart')].map((el) => el.id)")
    assert len(charts) == 4
    for chart in charts:
        assert hover(browser, chart, 0.5, 17)

    names = [str(row.case["change"]) for row in of_kind(records, ChangeRow)]
    tip = hover(browser, "chart-ladder", 0.5, ROW_HEIGHT * (names.index("compiled blocks") + 0.5))
    speedup = of_steps(records)[0].accepted[-1].values["speedup"]
    assert tip.startswith("compiled blocks")
    assert f"speed-up {speedup:.2f}×" in tip
    wrong = hover(browser, "chart-ladder", 0.5, ROW_HEIGHT * (names.index("fp16 autocast") + 0.5))
    assert "wrong: off by 0.71 in the gradients" in wrong


@pytest.mark.browser
def test_names_are_shown_and_never_run(browser: Any, page_folder: Path) -> None:
    records = hostile_records()
    path = page_folder / "hostile.html"
    write_html(records, path)
    open_page(browser, path.as_uri())

    assert browser.execute_script("return document.querySelector('h1').textContent") == HOSTILE
    assert hover(browser, "chart-ladder", 0.6, ROW_HEIGHT * 1.5).startswith(HOSTILE)
    assert hover(browser, "chart-ladder", 0.6, ROW_HEIGHT * 3.5).startswith("$$\\frac{1}{2}$$ @name")
    assert hover(browser, "chart-losses", 0.5, 60)
    assert browser.title == f"{HOSTILE} · trainstep report"
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert complaints(browser) == []
    assert {url for url in requests(browser) if not url.startswith(("data:", "blob:"))} == {path.as_uri()}


@pytest.mark.browser
def test_a_phone_scrolls_in_one_direction(browser: Any, h200_page: str) -> None:
    width = 320
    open_page(browser, h200_page, width=width)

    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    wide = browser.execute_script(
        "return [...document.querySelectorAll('main *')].filter((el) => !el.closest('.table') &&"
        "el.getBoundingClientRect().right > innerWidth + 1).map((el) => el.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert hover(browser, "chart-ladder", 0.5, ROW_HEIGHT * 3.5).startswith("fp16 autocast")
    tooltip = browser.execute_script(
        "const {left, right} = document.querySelector('.bk-Tooltip').getBoundingClientRect(); return [left, right]"
    )
    assert 0 <= tooltip[0] < tooltip[1] <= width


@pytest.mark.browser
def test_dark_mode_reaches_page_and_charts_when_it_is_switched(browser: Any, h200_page: str) -> None:
    def look() -> tuple[str, dict[str, int]]:
        background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        pixels = browser.execute_script(
            DEEP
            + """
            const count = {"11,92,171": 0, "109,179,242": 0}; // the accent colour by day and by night
            for (const canvas of deep(document.getElementById("chart-ladder"), "canvas")) {
              if (!canvas.width || !canvas.height) continue;
              const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              for (let i = 0; i < data.length; i += 4) {
                const key = `${data[i]},${data[i + 1]},${data[i + 2]}`;
                if (key in count) count[key] += 1;
              }
            }
            return count;"""
        )
        return background, pixels

    open_page(browser, h200_page)
    background, light = look()
    set_scheme(browser, "dark")
    wait_until_drawn(browser, "dark")
    dark_background, dark = look()
    set_scheme(browser, "light")
    wait_until_drawn(browser, "light")

    assert background == "rgb(255, 255, 255)"
    assert dark_background == "rgb(18, 21, 24)"
    assert light["11,92,171"] > 2000
    assert light["109,179,242"] == 0
    assert dark["109,179,242"] > 2000
    assert dark["11,92,171"] == 0
    assert look() == (background, light)
    assert complaints(browser) == []


@pytest.mark.browser
def test_the_flags_can_be_copied(browser: Any, h200_page: str) -> None:
    open_page(browser, h200_page)

    browser.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    browser.find_element("css selector", "button[data-copy=flags]").click()

    assert wait_for(browser, "return window.copied") == recommended_flags(sample.h200_analysis())
    assert wait_for(browser, "return document.querySelector('button[data-copy=flags]').textContent === 'Copied'")

    browser.find_element("css selector", "button[data-copy=lines]").click()
    lines = wait_for(browser, "return window.copied.includes('\\n') && window.copied").split("\n")
    assert "with torch.autocast(device.type, torch.bfloat16):" in lines
    assert all(line.startswith("# ") for line in lines[::2]), "a comment above each line says what it brings"
