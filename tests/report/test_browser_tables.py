"""Tables in a browser: sorted by a click or a key, never clipped; and the page on paper."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report import sample
from tests.report.browsing import complaints, on_paper
from tests.report.subjects.test_attention import row as attention
from trainstep.rows import ParallelRow
from trainstep.rows.records import Row, Times


@pytest.fixture
def page(show: Any) -> Path:
    return show([*sample.h200_analysis(), *wide_table()])


def values(browser: Any, name: str, table: str = "ladder") -> list[float | None]:
    """The raw values of a column, from above; None where a row has none."""
    found = browser.execute_script(
        "return [...document.querySelectorAll(`table[data-table=${arguments[1]}] tbody tr`)]"
        ".map((row) => row.querySelector(`[data-column=${arguments[0]}]`)?.dataset.value ?? null)",
        name,
        table,
    )
    return [None if each is None else float(each) for each in found]


def sorts(browser: Any) -> list[str | None]:
    """By what each column of the ladder is sorted."""
    titles = browser.find_elements("css selector", "table[data-table=ladder] thead th")
    return [title.get_attribute("aria-sort") for title in titles]


@pytest.mark.browser
def test_a_click_on_a_title_sorts_by_numbers_and_a_third_restores(browser: Any, page: Path) -> None:
    written = values(browser, "step_ms")
    known = sorted(each for each in written if each is not None)
    assert known[0] < 100 < known[-1], "as texts they have another order"
    buttons = browser.find_elements("css selector", "table[data-table=ladder] thead button")
    place = [button.text.startswith("step (ms)") for button in buttons].index(True)
    button = buttons[place]
    lacking = [None] * (len(written) - len(known))

    button.click()
    assert values(browser, "step_ms") == [*known, *lacking], "what has no value stays last"
    assert sorts(browser)[place] == "ascending"
    button.send_keys("\n")  # by the keyboard
    assert values(browser, "step_ms") == [*reversed(known), *lacking]
    assert sorts(browser)[place] == "descending"
    button.send_keys(" ")
    assert values(browser, "step_ms") == written
    assert set(sorts(browser)) == {None}
    assert complaints(browser) == []


@pytest.mark.browser
def test_small_numbers_sort_by_their_size(browser: Any, page: Path) -> None:
    """1e-06 is less than 0.0003, in raw values and in texts."""
    titles = browser.find_elements("css selector", "table[data-table=errors] thead button")
    next(title for title in titles if title.text == "Loss").click()
    shown = values(browser, "loss_error", "errors")
    assert any(0 < each < 1e-4 for each in shown), "written with an exponent"
    assert shown == sorted(shown)


@pytest.mark.browser
def test_a_long_table_folds_and_filters_and_is_whole_on_paper(browser: Any, show: Any) -> None:
    show([attention(impl, 64 * seq) for impl in ("sdpa", "flex") for seq in range(1, 20)])

    rows = browser.find_elements("css selector", "table[data-table=attention] tbody tr")
    find, show_all = browser.find_elements("css selector", ".fold *")

    def shown() -> int:
        return sum(row.is_displayed() for row in rows)

    assert shown() == 20
    find.send_keys("FLEX")
    assert shown() == 19
    with on_paper(browser):
        assert shown() == 38
    show_all.click()
    assert shown() == 38


def natural(name: str) -> list[tuple[float, str]]:
    """Words as words, numbers in them as numbers."""
    return [(float(part), "") if part.isdigit() else (-1.0, part.casefold()) for part in re.split(r"(\d+)", name)]


@pytest.mark.browser
def test_one_column_is_sorted_by_and_words_sort_as_words(browser: Any, page: Path) -> None:
    buttons = browser.find_elements("css selector", "table[data-table=ladder] thead button")
    buttons[1].click()
    buttons[0].click()
    rows = browser.find_elements("css selector", "table[data-table=ladder] tbody tr")
    names = [row.get_attribute("data-row") for row in rows]
    assert names == sorted(names, key=natural)
    assert names.index("FP8 matmuls") < names.index("fp16 autocast"), "numbers in words count too"
    assert sorts(browser)[:2] == ["ascending", None]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_no_table_is_clipped(browser: Any, show: Any, width: int) -> None:
    """What is wider than its box scrolls inside of it, and no cell hides a part of its text."""
    show([*sample.h200_analysis(), *wide_table()], width=width)
    found = browser.execute_script(
        """return [...document.querySelectorAll(".table")].map((box) => [box.scrollWidth > box.clientWidth, {
          outside: box.getBoundingClientRect().right > innerWidth + 1,
          stuck: box.scrollWidth > box.clientWidth && !["auto", "scroll"].includes(getComputedStyle(box).overflowX),
          beyond: box.firstElementChild.getBoundingClientRect().width > box.scrollWidth + 1,
          cut: [...box.querySelectorAll("th, td")].some((cell) => cell.scrollWidth > cell.clientWidth + 1
            && getComputedStyle(cell).overflow !== "visible"),
        }]);"""
    )
    assert len(found) > 5
    assert any(is_wide for is_wide, _ in found), "something to scroll"
    assert [each for _, each in found if any(each.values())] == []


def wide_table() -> list[Row]:
    """Schemes with more columns than a sheet has room for in one size."""
    names = ("start", "before_step", "after_step")
    held = {f"{name}_{what}": 12.7 for name in names for what in ("weights_gib", "gradients_gib", "gib")}
    held |= {f"predicted_{name}_gib": 12.7 for name in names} | {f"{name}_optimizer_state_gib": 1.5 for name in names}
    return [
        ParallelRow(workload="m", scheme=scheme, world_size=2, times={"step": Times(5.0 + size, 4.0, 9.0)},
                    exposed_share=0.5, tokens_per_s=26236.0, collectives=275, sent_gib=12.7, sent_floor_gib=12.7,
                    peak_gib=41.4, loss_error=1e-4, loss_allowed=0.1, update_error=0.1, update_allowed=size, **held)
        for size, scheme in enumerate(("ddp", "sharded-optimizer", "fsdp"), start=1)
    ]  # fmt: skip


@pytest.mark.browser
def test_on_paper_everything_is_open_and_nothing_is_cut(browser: Any, page: Path) -> None:
    printed = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True}
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", printed)["data"])
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 15
    assert browser.execute_script("return document.querySelector('details').open") is False, "closed again"

    with on_paper(browser):
        chrome, sentences, wider, scrolling = browser.execute_script(
            """const all = (selector) => [...document.querySelectorAll(selector)];
            const shown = (selector) => all(selector).filter((el) => el.checkVisibility()).length;
            return [shown("nav, button, input"), shown(".findings dd"),
              all("main table, main pre").filter((el) => el.getBoundingClientRect().right > innerWidth + 1).length,
              all(".table").filter((el) => getComputedStyle(el).overflowX !== "visible").length];"""
        )
    assert (chrome, wider, scrolling) == (0, 0, 0)
    assert sentences > 3, "folded on the screen, open on paper"
