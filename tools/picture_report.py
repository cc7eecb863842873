"""Write docs/report.png, the first screen of a report, in headless Chromium.

python -m tools.picture_report .runs/ours.quick/reports/index.html [docs/report.png]
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def picture_report(page: str, target: str = "docs/report.png") -> None:
    """Write the page's first 1400 × 900 pixels to ``target``."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme="light")
        tab = context.new_page()
        tab.goto(Path(page).resolve(strict=True).as_uri())
        tab.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    picture_report(*sys.argv[1:])
