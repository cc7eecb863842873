"""MLflow's pages in headless Chromium: the first one, a parent, two runs compared."""

import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import expect

from moecore.tracking.pages import charts
from tests.browser import opened
from tests.tracking.test_parents import calibrate, parent

# MLflow asks whether users have to log in, and its charts are resized while they are drawn.
KNOWN = ("404 (Not Found)", "ResizeObserver loop")
NOTICES = ("usage data", "telemetry", "Ask questions about your experiments", "Try it now")
WAIT = 60_000  # milliseconds
METHODS = ("dense", "vmoe", "prc")


@pytest.fixture
def served(study):
    """A study of three methods, and the address that `moecore ui` prints."""
    Path("params.yaml").write_text("run: {methods: [dense, vmoe, prc]}\n")
    for method in METHODS:
        study.write(method=method)
    calibrate()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = study.moecore("ui", "--port", str(port))
    try:
        address = process.stdout.readline().strip()
        wait_for(f"http://127.0.0.1:{port}/health")
        while len(study.parents()) < len(METHODS) or parent(study).info.status != "FINISHED":
            time.sleep(0.2)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def wait_for(address: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"{address} does not answer")


def shows(page, *words: str) -> None:
    """Wait for all of these; none of MLflow's notices may be there then."""
    body = page.locator("body")
    for text in words:
        expect(body).to_contain_text(text, timeout=WAIT)
    text = body.inner_text().lower()
    assert not [notice for notice in NOTICES if notice.lower() in text]


def test_first_page_parent_and_comparison(browser, study, served):
    server = served.split("/#")[0]
    [experiment] = {run.info.experiment_id for run in study.every_run()}
    runs = [parent(study, f"{method}/0").info.run_id for method in METHODS]
    pages = f"{server}/#/experiments/{experiment}/runs"
    with opened(browser, served, 1400, "light", KNOWN) as page:
        shows(page, "loss/pretrain total", "test/pretrain ece_after", "3 matching runs")
    with opened(browser, f"{server}/", 1400, "light", KNOWN) as page:
        shows(page, "Recent Experiments")
    with opened(browser, f"{server}/#/models", 1400, "light", KNOWN) as page:
        shows(page, "Registered Models")
    with opened(browser, pages, 1400, "light", KNOWN) as page:
        # parents only: their children are folded
        expect(page.get_by_text("seed 0")).to_have_count(len(METHODS), timeout=WAIT)
        shows(page, *(f"{method} seed 0" for method in METHODS))
    with opened(browser, f"{pages}/{runs[1]}", 1400, "light", KNOWN) as page:
        shows(page, "test/pretrain ece_after", "calibrate pretrain vmoe seed 0")  # a child
    compared = f'compare-runs?runs=["{runs[0]}","{runs[1]}"]&experiments=["{experiment}"]'
    with opened(browser, f"{server}/#/{compared}", 1400, "light", KNOWN) as page:
        shows(page, "Comparing 2 Runs from 1 Experiment", "loss/pretrain total")


def test_the_address_compares_the_current_methods():
    address = charts("http://127.0.0.1:5000", "7")
    assert address.startswith("http://127.0.0.1:5000/#/experiments/7/runs?")
    assert "compareRunsMode=CHART" in address and "tags.level+%3D+%27method%27" in address
    assert charts("http://127.0.0.1:5000", None).endswith(
        "/#/experiments?workflowType=machine_learning"
    )
