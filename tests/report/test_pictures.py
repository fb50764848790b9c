"""Every figure as a picture, where no script runs as in mail, and on paper: it shows something, and nothing is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.report import sample
from tests.report.browsing import noise, on_paper, open_page
from tests.report.charts.test_traces import records as traces
from tests.report.subjects.test_allocations import snapshot
from tests.report.subjects.test_attention import row as attention
from tests.report.subjects.test_kernels import gpu_profile
from tests.report.subjects.test_kernels import records as kernels
from tests.report.subjects.test_run import RANKS
from tests.report.test_training import run as training
from trainstep.report.subjects.climbs import of_steps
from trainstep.rows.records import Row

CUT = """
const [drawn] = arguments, box = (each) => each.getBoundingClientRect(), whole = box(drawn.closest("figure"));
const outside = (each) => box(each).left < whole.left - 1 || box(each).right > whole.right + 1;
const shown = [...drawn.querySelectorAll("text, .phase")].filter((each) => box(each).width);
return whole.right > innerWidth + 1 || [drawn, ...shown].some(outside);"""
TITLE = "return arguments[0].closest('figure').querySelector('h3').textContent"
BOX = "const {x, y, width, height} = arguments[0].getBoundingClientRect(); return {x, y: y + scrollY, width, height}"
SHOW = "for (const each of arguments[0].querySelectorAll('.marks, .parts')) each.style.visibility = arguments[1]"


PAGES: dict[str, tuple[Callable[[Path], Sequence[Row]], int]] = {  # How to make the rows of each, and its figures
    "h200": (lambda _: sample.h200_analysis(), 6),
    "kernels": (lambda _: kernels(gpu_profile()), 3),
    "parallel": (lambda _: traces(), 1),
    "training": (lambda _: [training()], 5),
    "attention": (lambda _: [attention(impl, seq, seq / 256) for impl in ("sdpa", "eager") for seq in (256, 512)], 2),
    "allocations": (lambda folder: snapshot(folder, 300), 1),
    "run": (lambda _: RANKS, 3),
}


def figures_of(browser: Any) -> list[Any]:
    return list(browser.find_elements("css selector", ".plot, .stack"))


def faults(browser: Any) -> list[str]:
    """Titles of figures that are cut, and of those whose picture is the same without their marks."""
    found = []
    for drawn in figures_of(browser):
        title, pictures = browser.execute_script(TITLE, drawn), set[str]()
        asked = {"captureBeyondViewport": True, "clip": {**browser.execute_script(BOX, drawn), "scale": 1}}
        for visibility in ("hidden", "visible"):
            browser.execute_script(SHOW, drawn, visibility)
            pictures.add(browser.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
        found += [f"cut: {title}"] * browser.execute_script(CUT, drawn) + [f"blank: {title}"] * (len(pictures) == 1)
    return found


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_every_figure_shows_something_on_screens_in_mail_and_on_paper(
    browser: Any, show: Any, tmp_path: Path, name: str
) -> None:
    make, figures = PAGES[name]
    path = show(make(tmp_path))
    assert len(figures_of(browser)) == figures
    assert faults(browser) == []
    open_page(browser, path.as_uri(), width=390, scheme="dark")
    assert [*faults(browser), *noise(browser)] == [], "on a phone by night"
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    path.write_text(re.sub("<script>.*?</script>", "", path.read_text(), flags=re.DOTALL))
    browser.get(path.as_uri())
    assert faults(browser) == [], "without a script"
    with on_paper(browser):
        assert faults(browser) == []


@pytest.mark.browser
def test_a_blank_or_cut_figure_is_noticed_and_bars_are_as_long_as_their_steps(browser: Any, show: Any) -> None:
    show(sample.h200_analysis())
    plain, *_, best = (rung.step_ms for rung in of_steps(sample.h200_analysis())[0].accepted)
    whole, faster, chart, *_ = figures_of(browser)
    assert faster.size["width"] / whole.size["width"] == pytest.approx(best / plain, rel=0.02)
    title = browser.execute_script(TITLE, chart)
    browser.execute_script("document.querySelector('.plot .marks').replaceChildren()")
    assert faults(browser) == [f"blank: {title}"]
    browser.execute_script("document.querySelector('.plot text').setAttribute('dx', '-200')")
    assert faults(browser) == [f"cut: {title}", f"blank: {title}"]
    browser.execute_script("document.querySelectorAll('.plot')[1].style.width = '1400px'")
    assert len(faults(browser)) == 3
