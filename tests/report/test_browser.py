"""The page in a browser: it opens without a network, shows the records, answers the pointer, runs nobody's names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.report import sample
from tests.report.browsing import complaints, hover, hover_bar, noise, requests, set_scheme, wait_for
from tests.report.page import HOSTILE, hostile_records
from trainstep.report.subjects.climbs import of_steps, recommended_flags


@pytest.mark.browser
def test_the_shown_texts_are_those_of_the_values(browser: Any, show: Any) -> None:
    show(sample.h200_analysis())
    cells = browser.execute_script(
        "return [...document.querySelectorAll('table[data-table=ladder] tr[data-row] [data-column][data-value]')]"
        ".map((el) => [el.dataset.column, el.dataset.value, el.firstChild?.textContent ?? ''])"
    )
    texts = [(value, text) for column, value, text in cells if column.endswith(("_ms", "_gib"))]
    assert len(texts) > 20
    for value, text in texts:
        assert float(text.strip().replace(",", "")) == pytest.approx(float(value), rel=0.005)
    headline = browser.execute_script("return document.querySelector('.headline .figure').dataset.value")
    assert float(headline) == of_steps(sample.h200_analysis())[0].accepted[-1].values["speedup"]
    assert noise(browser) == []


@pytest.mark.browser
def test_every_chart_answers_the_pointer(browser: Any, show: Any) -> None:
    show(sample.h200_analysis())

    charts = browser.execute_script("return [...document.querySelectorAll('.chart')].map((el) => el.id)")
    assert len(charts) == 4
    for chart in charts:
        assert hover(browser, chart, 0.5, 0.1)

    tip = hover_bar(browser, "chart-ladder", "compiled blocks")
    speedup = of_steps(sample.h200_analysis())[0].accepted[-1].values["speedup"]
    assert tip.startswith("compiled blocks")
    assert f"speed-up {speedup:.2f}×" in tip
    wrong = hover_bar(browser, "chart-ladder", "fp16 autocast")
    assert "wrong: off by 0.71 in the gradients" in wrong


@pytest.mark.browser
def test_names_are_shown_and_never_run(browser: Any, show: Any) -> None:
    path = show(hostile_records())

    title = f"{HOSTILE} · A CPU with 2 cores"
    assert browser.execute_script("return document.querySelector('h1').textContent") == title
    for name in (HOSTILE, "$$\\frac{1}{2}$$ @name"):
        assert hover_bar(browser, "chart-ladder", name).startswith(name)
    assert HOSTILE in hover(browser, "chart-losses", 0.5, 0.3)
    assert browser.title == f"{title} · trainstep report"
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert complaints(browser) == []
    assert {url for url in requests(browser) if not url.startswith(("data:", "blob:"))} == {path.as_uri()}


@pytest.mark.browser
def test_a_phone_scrolls_in_one_direction(browser: Any, show: Any) -> None:
    width = 320
    show(sample.h200_analysis(), width=width)

    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    wide = browser.execute_script(
        "return [...document.querySelectorAll('main *')].filter((el) => !el.closest('.table') &&"
        "el.getBoundingClientRect().right > innerWidth + 1).map((el) => el.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert hover_bar(browser, "chart-ladder", "fp16 autocast").startswith("fp16 autocast")
    tooltip = browser.find_element("css selector", ".tip").rect
    assert 0 <= tooltip["x"] < tooltip["x"] + tooltip["width"] <= width


@pytest.mark.browser
def test_dark_mode_reaches_page_and_charts_when_it_is_switched(browser: Any, show: Any) -> None:
    def look() -> list[str]:
        colours = {"body": "background-color", "#chart-ladder rect.accent": "fill"}
        found = {where: browser.find_element("css selector", where) for where in colours}
        return [found[where].value_of_css_property(name) for where, name in colours.items()]

    show(sample.h200_analysis())
    day = look()
    set_scheme(browser, "dark")
    night = look()
    set_scheme(browser, "light")

    assert day == ["rgba(255, 255, 255, 1)", "rgb(11, 92, 171)"] == look()
    assert night == ["rgba(18, 21, 24, 1)", "rgb(109, 179, 242)"]
    assert complaints(browser) == []


@pytest.mark.browser
def test_the_flags_can_be_copied(browser: Any, show: Any) -> None:
    show(sample.h200_analysis())

    browser.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    browser.find_element("css selector", "button[data-copy=flags]").click()

    assert wait_for(browser, "return window.copied") == recommended_flags(sample.h200_analysis())
    assert wait_for(browser, "return document.querySelector('button[data-copy=flags]').textContent === 'Copied'")

    browser.find_element("css selector", "button[data-copy=lines]").click()
    lines = wait_for(browser, "return window.copied.includes('\\n') && window.copied").split("\n")
    assert "with torch.autocast(device.type, torch.bfloat16):" in lines
    assert all(line.startswith("# ") for line in lines[::2]), "a comment above each line says what it brings"
