"""What tests do with a page in a browser: open it, point at it, read its logs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any


def open_page(browser: Any, url: str, *, width: int = 1280, scheme: str = "light") -> None:
    """Open a page, wait for its charts, with the browser's logs emptied before."""
    for log in ("browser", "performance"):
        browser.get_log(log)
    set_scheme(browser, scheme)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    wait_for(browser, "return document.documentElement.dataset.drawn")


def set_scheme(browser: Any, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def wait_for(browser: Any, script: str, *arguments: object, seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := browser.execute_script(script, *arguments)):
        assert time.monotonic() < deadline, f"waited {seconds} s for: {script}"
        time.sleep(0.02)
    return found


def requests(browser: Any) -> list[str]:
    """Every address the page has asked for since it was opened, without those of the browser's own start page."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("chrome://", "chrome-untrusted://"))]


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def noise(browser: Any) -> list[str]:
    """Complaints, and requests that leave the page's own files."""
    asked = [url for url in requests(browser) if not url.startswith(("file://", "data:", "blob:"))]
    return [*complaints(browser), *asked]


@contextlib.contextmanager
def on_paper(browser: Any) -> Iterator[None]:
    """With the style and the width of an A4 sheet."""
    size = {"width": round((8.27 - 2 * 12 / 25.4) * 96), "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def drag(browser: Any, chart: str) -> None:
    """Drag over the fifth of a chart's frame right of two fifths of its width, at half of its height."""
    box = browser.execute_script(
        "const el = document.querySelector(`#${arguments[0]} .back`); el.scrollIntoView({block: 'center'});"
        "const {left, top, width, height} = el.getBoundingClientRect(); return {left, top, width, height}",
        chart,
    )
    for kind, x in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        at = {"type": kind, "x": box["left"] + x * box["width"], "y": box["top"] + 0.5 * box["height"] + 2 * (x > 0.4)}
        pressed = {"button": "left", "clickCount": 1, "buttons": int(kind != "mouseReleased")}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", at | pressed)


def hover_bar(browser: Any, chart: str, name: str, tipped: str = "") -> str:
    """Move the pointer to the first mark whose tooltip has this name and begins so below it; the lines that show."""
    return _hover(
        browser,
        "const [chart, start] = arguments;"
        "const el = [...chart.querySelectorAll('[data-tip]')].find((el) => el.dataset.tip.startsWith(start));"
        "const {left, top, width, height} = el.getBoundingClientRect(); return [left + width / 2, top + height / 2]",
        chart,
        f"{name}\n{tipped}",
    )


def hover(browser: Any, chart: str, x: float, y: float) -> str:
    """Move the pointer over a chart's frame, to fractions of its width and height; the text that shows."""
    return _hover(
        browser,
        "const [chart, x, y] = arguments, {left, top, width, height} = chart.querySelector('.back')"
        ".getBoundingClientRect(); return [left + x * width, top + y * height]",
        chart,
        x,
        y,
    )


def _hover(browser: Any, where: str, chart: str, *arguments: object) -> str:
    element = browser.find_element("id", chart)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    browser.execute_script("return new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(1), 20)))")
    x, y = browser.execute_script(where, element, *arguments)
    for wobble in (0, 1):
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y + wobble / 2})
    return wait_for(browser, "return document.querySelector('.tip:not([hidden])')?.innerText", seconds=3)
