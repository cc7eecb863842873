"""Write the pictures of the documents in headless Chromium, with playwright.

python -m tools.doc_pictures report .runs/ours.quick/reports/index.html [docs/report.png]
python -m tools.doc_pictures mlflow FOLDER [docs/mlflow.png]

The first is the first screen of a report. The second is the view "Methods side by side" of FOLDER,
a project such as `moecore quick` makes, whose runs are imported into MLflow.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import Page, sync_playwright

PORT = "5055"
# MLflow opens this panel at a first visit.
CLOSED = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
UI = [sys.executable, "-c", "from moecore.pipeline.cli import app; app()", "ui", "--port", PORT]


@contextmanager
def open_tab(height: int) -> Iterator[Page]:
    """Yield a tab of a new browser, 1400 pixels wide."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        size = {"width": 1400, "height": height}
        yield browser.new_context(viewport=size, color_scheme="light").new_page()
        browser.close()


def picture_report(page: str, target: str = "docs/report.png") -> None:
    """Write the page's first 1400 × 900 pixels to ``target``."""
    with open_tab(900) as tab:
        tab.goto(Path(page).resolve(strict=True).as_uri())
        tab.screenshot(path=target)


def picture_mlflow(folder: str, target: str = "docs/mlflow.png") -> None:
    """Write the view of a project's runs in MLflow, which is served meanwhile, to ``target``."""
    server = subprocess.Popen(UI, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(line for line in server.stdout if line.startswith("http")).strip()
        while not is_answering(address):
            time.sleep(0.5)
        with open_tab(560) as tab:
            tab.add_init_script(CLOSED)
            tab.goto(address)
            tab.get_by_text(re.compile(r"seed \d")).first.wait_for(timeout=120_000)
            tab.wait_for_timeout(3000)  # until the columns have their widths
            tab.screenshot(path=target)
    finally:
        server.terminate()
        server.wait()


def is_answering(address: str) -> bool:
    try:
        return urlopen(address).status == 200
    except URLError:
        return False


PICTURES = {"report": picture_report, "mlflow": picture_mlflow}

if __name__ == "__main__":
    PICTURES[sys.argv[1]](*sys.argv[2:])
