"""Write docs/mlflow.png: the view "Methods side by side" of a finished project, 1,400 pixels wide.

    python tools/mlflow_picture.py FOLDER [FILE]

FOLDER is a project such as `moecore quick` makes; its runs are imported into MLflow. Needs
chromium and playwright.
"""

import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from playwright.sync_api import sync_playwright

SIZE = {"width": 1400, "height": 560}
PORT = "5055"
# MLflow opens this panel at a first visit.
CLOSED = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
UI = [sys.executable, "-c", "from moecore.pipeline.cli import app; app()", "ui", "--port", PORT]


def write_picture(address: str, file: Path) -> None:
    """Write a picture of the view at ``address``, without the notice that it is shared."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport=SIZE)
        page.add_init_script(CLOSED)
        page.goto(address)
        page.get_by_text(re.compile(r"seed \d")).first.wait_for(timeout=120_000)
        page.wait_for_timeout(3000)  # until the columns have their widths
        page.screenshot(path=file)
        browser.close()


def is_answering(address: str) -> bool:
    try:
        return urlopen(address).status == 200
    except URLError:
        return False


def main(folder: str, file: str = "docs/mlflow.png") -> None:
    server = subprocess.Popen(UI, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(line for line in server.stdout if line.startswith("http")).strip()
        while not is_answering(address):
            time.sleep(0.5)
        write_picture(address, Path(file))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
