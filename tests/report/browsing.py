"""What tests do with a page in a browser: open it, point at it, read its logs."""

from __future__ import annotations

import json
import time
from typing import Any


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


def drag(browser: Any, chart: str) -> None:
    """Drag over the fifth of a chart right of two fifths of its width, at half of its height."""
    box = browser.execute_script(
        "const el = document.getElementById(arguments[0]); el.scrollIntoView({block: 'center'});"
        "const {left, top, width, height} = el.getBoundingClientRect(); return {left, top, width, height}",
        chart,
    )
    for kind, x in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        at = {"type": kind, "x": box["left"] + x * box["width"], "y": box["top"] + 0.5 * box["height"] + 2 * (x > 0.4)}
        pressed = {"button": "left", "clickCount": 1, "buttons": int(kind != "mouseReleased")}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", at | pressed)


BAR = """
const [chart, model, bar, tipped] = arguments;
const source = Bokeh.documents.map((doc) => doc.get_model_by_name(model)).find(Boolean);
const {left, right, y, name: names, tip} = source.data;
const at = [...names].findIndex((each, i) => each === bar && tip[i].startsWith(tipped));
const view = Bokeh.index.get_by_id(source.document.roots()[0].id).frame;
const {width} = document.getElementById(chart).getBoundingClientRect();
return [view.x_scale.compute((left[at] + right[at]) / 2) / width, view.y_scale.compute(y[at])];"""


def hover_bar(browser: Any, chart: str, model: str, bar: str, tipped: str = "") -> str:
    """Move the pointer to the first bar of this name whose tooltip begins so; the lines that show."""
    return hover(browser, chart, *browser.execute_script(BAR, chart, model, bar, tipped))


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
