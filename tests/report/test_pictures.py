"""Every figure as a picture, where no script runs as in mail, and on paper: it shows something, and nothing is cut."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.report import sample
from tests.report.browsing import on_paper
from tests.report.charts.test_traces import records as traces
from tests.report.subjects.test_allocations import large_timeline
from tests.report.subjects.test_attention import row as attention
from tests.report.subjects.test_kernels import gpu_profile
from tests.report.subjects.test_kernels import records as kernels
from tests.report.test_training import run as training
from trainstep.bench.allocations import imported_records
from trainstep.measure.allocations.snapshot import snapshot_of, write_snapshot
from trainstep.report.subjects.climbs import of_steps
from trainstep.rows.records import Row

LEAST = 60  # Pixels that the marks of a figure colour
LOOK = """
return [...document.querySelectorAll(".plot, .stack")].map((drawn) => {
  const box = (each) => each.getBoundingClientRect(), figure = drawn.closest("figure"), whole = box(figure);
  const outside = (each) => box(each).left < whole.left - 1 || box(each).right > whole.right + 1;
  const isCut = whole.right > innerWidth + 1 || [drawn, ...drawn.querySelectorAll("text, .phase")].some(outside);
  const {left, top, width, height} = box(drawn.querySelector(".back") ?? drawn);
  return [figure.querySelector("h3").textContent, isCut, left + scrollX, top + scrollY, width, height];
});"""


def snapshot(folder: Path) -> list[Row]:
    write_snapshot(snapshot_of(large_timeline(300)), folder / "snapshot.pickle")
    return list(imported_records(folder / "snapshot.pickle"))


PAGES: dict[str, tuple[Callable[[Path], Sequence[Row]], int]] = {  # How to make the rows of each, and its figures
    "cpu": (lambda _: sample.cpu_analysis(), 6),
    "h200": (lambda _: sample.h200_analysis(), 6),
    "kernels": (lambda _: kernels(gpu_profile()), 3),
    "parallel": (lambda _: traces(), 1),
    "training": (lambda _: [training()], 5),
    "attention": (lambda _: [attention(impl, seq, seq / 256) for impl in ("sdpa", "eager") for seq in (256, 512)], 2),
    "allocations": (snapshot, 1),
}


def faults(browser: Any) -> list[str]:
    """Titles of figures that are cut, and of those whose marks colour nothing."""
    size = browser.execute_script("const root = document.documentElement; return [root.scrollWidth, root.scrollHeight]")
    clip = dict(zip(("x", "y", "width", "height", "scale"), (0, 0, *size, 1), strict=True))
    asked, pictures = {"format": "png", "captureBeyondViewport": True, "clip": clip}, []
    for visible in ("hidden", "visible"):
        marks = "for (const each of document.querySelectorAll('.marks, .parts')) each.style.visibility = arguments[0]"
        browser.execute_script(marks, visible)
        picture = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
        pictures.append(np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")))
    changed, found = (pictures[0] != pictures[1]).any(axis=2), []
    for title, is_cut, *box in browser.execute_script(LOOK):
        x, y, width, height = map(round, box)
        found += [f"cut: {title}"] * is_cut
        found += [f"blank: {title}"] * bool(changed[y : y + height, x : x + width].sum() < LEAST)
    return found


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_every_figure_shows_something_on_screen_in_mail_and_on_paper(
    browser: Any, show: Any, tmp_path: Path, name: str
) -> None:
    make, figures = PAGES[name]
    path = show(make(tmp_path))
    assert len(browser.execute_script(LOOK)) == figures
    assert faults(browser) == []
    path.write_text(re.sub("<script>.*?</script>", "", path.read_text(), flags=re.DOTALL))
    browser.get(path.as_uri())
    assert faults(browser) == [], "without a script"
    with on_paper(browser):
        assert faults(browser) == []


@pytest.mark.browser
def test_a_blank_or_cut_figure_is_noticed_and_bars_are_as_long_as_their_steps(browser: Any, show: Any) -> None:
    show(sample.h200_analysis())
    plain, *_, best = (rung.step_ms for rung in of_steps(sample.h200_analysis())[0].accepted)
    (*_, whole, _), (*_, faster, _), (title, *_), *_ = browser.execute_script(LOOK)
    assert faster / whole == pytest.approx(best / plain, rel=0.02)
    browser.execute_script("document.querySelector('.plot .marks').replaceChildren()")
    assert faults(browser) == [f"blank: {title}"]
    browser.execute_script("document.querySelector('.plot text').setAttribute('dx', '-200')")
    assert faults(browser) == [f"cut: {title}", f"blank: {title}"]
    browser.execute_script("document.querySelectorAll('.plot')[1].style.width = '1400px'")
    assert len(faults(browser)) == 3
