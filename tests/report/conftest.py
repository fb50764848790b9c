"""A headless Chromium for the tests marked `browser`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.report.browsing import open_page
from trainstep.report.page import write_html
from trainstep.rows.records import Row


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A selenium driver that logs the console and the network; skips where Debian's chromium is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="browser tests need selenium")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("browser tests need Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-component-update",
        "--force-prefers-reduced-motion",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def show(browser: object, tmp_path: Path) -> Callable[..., Path]:
    """Opens the page of rows in the browser: `show(rows, width=320)`; returns its file."""

    def shown(records: Sequence[Row], **options: Any) -> Path:
        path = tmp_path / "report.html"
        write_html(records, path)
        open_page(browser, path.as_uri(), **options)
        return path

    return shown
