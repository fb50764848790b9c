"""The page: complete without a network, its numbers those of the records, and nobody's names run as code."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report import sample
from trainstep.errors import UsageError
from trainstep.report.cells import fact, gib, number
from trainstep.report.findings import kept_rungs, recommended_flags
from trainstep.report.html import render, write_html
from trainstep.report.plots import ROW_HEIGHT
from trainstep.report.records import Record, of_kind

HOSTILE = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
LADDER_COLUMNS = {
    "step_ms",
    "step_low_ms",
    "step_high_ms",
    "speedup",
    "speedup_low",
    "speedup_high",
    "gain",
    "gain_low",
    "gain_high",
    "peak_gib",
    "gradient_error",
    "error_budget",
    "verdict",
}


class Page(HTMLParser):
    """Elements and the raw values in the cells of tables, by table, row and column."""

    VOID = frozenset({"meta", "link", "br", "img", "i"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.values: dict[str, dict[str, dict[str, str]]] = {}
        self.anchors: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.table = self.row = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        if tag not in self.VOID:
            self.open.append(tag)
        self.table, self.row = found.get("data-table", self.table), found.get("data-row", self.row)
        if "id" in found:
            self.ids.append(found["id"])
        self.addresses += [
            found[name] for name in ("src", "srcset", "href", "action", "data", "poster") if name in found
        ]
        if tag == "a":
            self.anchors.append(found["href"])
        if "table" in self.open and "data-column" in found and "data-value" in found:
            self.values.setdefault(self.table, {}).setdefault(self.row, {})[found["data-column"]] = found["data-value"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"


def expected_ladder(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """What the ladder's table must hold: every known value, and nothing where there is none.

    The baseline's ratio to itself has no interval there.
    """
    expected = {}
    for row in of_kind(records, "rung"):
        dull = ("_low", "_high") if row.values["verdict"] == "baseline" else ()
        expected[str(row.case["rung"])] = {
            name: value
            for name, value in row.values.items()
            if name in LADDER_COLUMNS and value is not None and not (dull and name.endswith(dull))
        }
    return expected


def as_numbers(cells: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    return {
        row: {name: value if name == "verdict" else float(value) for name, value in columns.items()}
        for row, columns in cells.items()
    }


@pytest.mark.parametrize("records", [sample.cpu_analysis(), sample.h200_analysis()], ids=["cpu", "h200"])
def test_tables_hold_the_records_numbers_exactly(records: list[Record]) -> None:
    page = Page(render(records))

    assert page.open == []
    assert as_numbers(page.values["ladder"]) == expected_ladder(records)
    step = max(of_kind(records, "step"), key=lambda row: row.case["warmup"])
    for phase in ("forward", "loss", "backward", "optimizer", "step"):
        for name in (f"{phase}_ms", f"{phase}_low_ms", f"{phase}_high_ms", f"{phase}_outliers"):
            assert float(page.values["phases"][phase][name]) == step.values[name]


def test_every_section_has_its_link_and_ids_are_unique() -> None:
    page = Page(render(sample.h200_analysis()))

    assert [link.removeprefix("#") for link in page.anchors] == [
        "summary",
        "phases",
        "warm-up",
        "ladder",
        "correctness",
        "memory",
        "workload",
        "environment",
    ]
    assert len(set(page.ids)) == len(page.ids)


def test_sections_without_records_are_left_out() -> None:
    records = sample.cpu_analysis()

    def sections(kinds: set[str]) -> list[str]:
        return Page(render([row for row in records if row.kind in kinds])).anchors

    assert sections({"rung"}) == ["#summary", "#ladder", "#correctness", "#memory", "#environment"]
    assert sections({"step"}) == ["#summary", "#phases", "#warm-up", "#memory", "#environment"]
    assert sections({"workload"}) == ["#workload", "#environment"]
    assert sections(set()) == []


def test_a_grid_shows_its_failed_cases_with_their_reason() -> None:
    row = of_kind(sample.cpu_analysis(), "step")[-1]
    failed = Record("step", {**row.case, "precision": "fp16"}, status="unsupported", reason="no fp16 on this CPU")

    html = render([row, failed])

    assert "#grid" in Page(html).anchors
    assert "no fp16 on this CPU" in html
    assert "#grid" not in Page(render([row])).anchors


def test_a_ladder_on_which_nothing_ran() -> None:
    rung = of_kind(sample.h200_analysis(), "rung")[0]
    failed = Record("rung", rung.case, {"verdict": "out of memory", "kept": False}, {}, "out of memory", "no room")

    html = render([failed])

    assert "No rung could run here." in html
    assert "faster" not in html.partition("<main>")[2].partition("<footer>")[0].replace("no faster", "")


def test_a_ladder_without_gain_claims_none() -> None:
    baseline = of_kind(sample.cpu_analysis(), "rung")[0]

    html = render([baseline])

    assert "the baseline is the fastest found" in html
    assert "maths is still right</p>" not in html


def test_a_user_s_workload_without_settings_or_flops() -> None:
    def bare(row: Record) -> Record:
        case = {
            name: None if name in ("batch", "context", "attention", "loss") else row.case[name] for name in row.case
        }
        absent = ("tokens", "tflop", "utilisation")
        values = {name: None if any(part in name for part in absent) else value for name, value in row.values.items()}
        return dataclasses.replace(row, case=case, values=values)

    html = render([bare(row) if row.kind != "ceiling" else row for row in sample.cpu_analysis()])

    assert ">None<" not in html
    assert "batch None" not in html
    assert "nan" not in html.lower().partition("<main>")[2].partition("<script")[0]


def test_nothing_on_the_page_is_fetched() -> None:
    html = render(sample.h200_analysis())
    addresses = Page(html).addresses

    assert len(addresses) == 9
    assert [address for address in addresses if not address.startswith(("#", "data:"))] == []
    assert re.findall(r"url\(|@import|https?://", html) == []


def test_the_page_is_small() -> None:
    assert len(render(sample.h200_analysis()).encode()) < 700_000


def test_names_are_escaped_everywhere() -> None:
    html = render(hostile_records())

    assert HOSTILE not in html
    assert "&lt;script&gt;document.title" in html
    assert html.count("<script") == 3


def hostile_records() -> list[Record]:
    """Names as a user's model could bear them: HTML, TeX and braces."""
    records = []
    for row in sample.cpu_analysis(workload=HOSTILE):
        case, values = dict(row.case), dict(row.values)
        if row.kind == "rung":
            case["rung"] = {"fused attention": HOSTILE, "bf16 autocast": "$$\\frac{1}{2}$$ @name"}.get(
                str(case["rung"]), case["rung"]
            )
            values["worst_parameter"] = f"blocks.0.{HOSTILE}"
        records.append(dataclasses.replace(row, case=case, values=values))
    return records


def test_an_unwritable_path_is_a_user_s_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*--out"):
        write_html(sample.cpu_analysis(), tmp_path / "file" / "report.html")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (145.66, "146"),
        (999.7, "1,000"),
        (5409.4, "5,409"),
        (0.0040013, "0.00400"),
        (9.8051e-08, "9.81×10⁻⁸"),
        (-0.00012345, "−0.000123"),
        (-0.000012345, "−1.23×10⁻⁵"),
        (3609728, "3,609,728"),
        (None, "–"),
        (True, "yes"),
        ("bf16", "bf16"),
    ],
)
def test_numbers_have_three_significant_digits(value: float | str | None, text: str) -> None:
    assert number(value) == text


def test_sizes_and_names_carry_units() -> None:
    assert gib(0.2229630290) == "228 MiB"
    assert gib(27.9) == "27.9 GiB"
    assert fact("max_sm_clock_mhz", 1980)[0] == "Highest SM clock"
    assert fact("max_sm_clock_mhz", 1980)[1].text == "1,980 MHz"
    assert fact("first_step_ms", 229.8)[0] == "First step"


# In a browser


@pytest.fixture(scope="module")
def h200_page(page_folder: Path) -> str:
    path = page_folder / "h200.html"
    write_html(sample.h200_analysis(), path)
    return path.as_uri()


def open_page(browser: Any, url: str, *, width: int = 1280, scheme: str = "light") -> None:
    """Open a page, wait for its charts, with the browser's logs emptied before."""
    for log in ("browser", "performance"):
        browser.get_log(log)
    set_scheme(browser, scheme)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    wait_until_drawn(browser, scheme)


def set_scheme(browser: Any, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def wait_until_drawn(browser: Any, scheme: str) -> None:
    wait_for(browser, f"return document.documentElement.dataset.drawn === '{scheme}'")


def wait_for(browser: Any, script: str, *arguments: object, seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := browser.execute_script(script, *arguments)):
        assert time.monotonic() < deadline, f"waited {seconds} s for: {script}"
        time.sleep(0.02)
    return found


def requests(browser: Any) -> list[str]:
    """Every address the page has asked for since it was opened."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


DEEP = """
const deep = (root, selector) => [
  ...root.querySelectorAll(selector),
  ...[...root.querySelectorAll("*")].flatMap((el) => (el.shadowRoot ? deep(el.shadowRoot, selector) : [])),
];
"""


def hover(browser: Any, chart: str, x: float, y: float) -> str:
    """Move the pointer over a chart, to fractions of its width and pixels from its top; the text that shows."""
    box = browser.execute_script(
        "const el = document.getElementById(arguments[0]); el.scrollIntoView({block: 'center'});"
        "const {left, top, width} = el.getBoundingClientRect(); return {left, top, width}",
        chart,
    )
    for wobble in (0, 1):
        at = {"type": "mouseMoved", "x": box["left"] + x * box["width"] + wobble, "y": box["top"] + y}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", at)
    return wait_for(
        browser,
        DEEP + "return deep(document, '.bk-tooltip-content').filter((el) => el.checkVisibility())"
        ".map((el) => el.innerText).join('')",
        seconds=3,
    )


@pytest.mark.browser
def test_the_page_opens_without_complaint_or_request(browser: Any, h200_page: str) -> None:
    open_page(browser, h200_page)

    assert complaints(browser) == []
    asked = requests(browser)
    assert h200_page in asked, "the log of requests does not even show the page"
    assert [url for url in asked if not url.startswith(("file://", "data:", "blob:"))] == []
    assert [url for url in asked if url.startswith("file://") and url != h200_page] == []


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
    assert float(headline) == kept_rungs(records)[-1].values["speedup"]


@pytest.mark.browser
def test_every_chart_answers_the_pointer(browser: Any, h200_page: str) -> None:
    open_page(browser, h200_page)
    records = sample.h200_analysis()

    charts = browser.execute_script("return [...document.querySelectorAll('.chart')].map((el) => el.id)")
    assert len(charts) == 10
    for chart in charts:
        assert hover(browser, chart, 0.5, 17)

    names = [str(row.case["rung"]) for row in of_kind(records, "rung")]
    tip = hover(browser, "chart-ladder", 0.5, ROW_HEIGHT * (names.index("compiled blocks") + 0.5))
    speedup = kept_rungs(records)[-1].values["speedup"]
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
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_in_one_direction(browser: Any, h200_page: str, width: int) -> None:
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
    browser.find_element("css selector", "button[data-copy]").click()

    assert wait_for(browser, "return window.copied") == recommended_flags(sample.h200_analysis())
    assert wait_for(browser, "return document.querySelector('button[data-copy]').textContent === 'Copied'")
