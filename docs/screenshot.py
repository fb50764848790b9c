"""A picture of a report, its charts drawn: `python docs/screenshot.py REPORT.html PICTURE.png [WIDTH HEIGHT]`.

Needs Chromium and its driver on the PATH; used for the README's screenshot.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service


def main() -> None:
    """Open the page, scroll through it so that every chart is drawn, and save what the first screen shows."""
    page, picture, *size = sys.argv[1:]
    width, height = map(int, size or (1280, 1500))
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-sync",
                 "--disable-background-networking", f"--window-size={width},{height}"):  # fmt: skip
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.get(Path(page).resolve().as_uri())
        for share in range(11):
            browser.execute_script(f"window.scrollTo(0, document.body.scrollHeight * {share / 10})")
            time.sleep(0.4)
        browser.execute_script("window.scrollTo({top: 0, behavior: 'instant'})")
        time.sleep(0.5)
        browser.save_screenshot(picture)
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
