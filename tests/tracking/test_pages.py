"""MLflow's pages in headless Chromium: the first one, a parent, two runs compared."""

import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from moecore.tracking.pages import charts
from tests.browser import opened
from tests.tracking.test_parents import calibrate, parent

# MLflow asks whether users have to log in, and its charts are resized while they are drawn.
KNOWN = ("404 (Not Found)", "ResizeObserver loop")
NOTICES = ("usage data", "telemetry", "Ask questions about your experiments", "Try it now")
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


def text_of(page) -> str:
    text = page.locator("body").inner_text()
    assert not [notice for notice in NOTICES if notice.lower() in text.lower()]
    return text


def test_first_page_parent_and_comparison(browser, study, served):
    server = served.split("/#")[0]
    with opened(browser, served, 1400, "light", KNOWN) as page:
        page.get_by_text("loss/pretrain total").first.wait_for(timeout=60_000)
        text = text_of(page)
        assert f"{len(METHODS)} matching runs" in text.replace("\n", " ")
        assert "test/pretrain ece_after" in text
    [experiment] = {run.info.experiment_id for run in study.every_run()}
    with opened(browser, f"{server}/", 1400, "light", KNOWN) as page:
        page.get_by_text("Recent Experiments").wait_for(timeout=60_000)
        text_of(page)
    with opened(browser, f"{server}/#/models", 1400, "light", KNOWN) as page:
        page.get_by_text("Registered Models").wait_for(timeout=60_000)
        text_of(page)
    with opened(browser, f"{server}/#/experiments/{experiment}/runs", 1400, "light", KNOWN) as page:
        page.get_by_text("dense seed 0").wait_for(timeout=60_000)
        # parents only: their children are folded
        assert page.get_by_text("seed 0", exact=False).count() == len(METHODS)
        text_of(page)
    runs = [parent(study, f"{method}/0").info.run_id for method in METHODS]
    address = f"{server}/#/experiments/{experiment}/runs/{runs[1]}"
    with opened(browser, address, 1400, "light", KNOWN) as page:
        page.get_by_text("test/pretrain ece_after").first.wait_for(timeout=60_000)
        assert "calibrate pretrain vmoe seed 0" in text_of(page)  # a child
    address = f'{server}/#/compare-runs?runs=["{runs[0]}","{runs[1]}"]&experiments=["{experiment}"]'
    with opened(browser, address, 1400, "light", KNOWN) as page:
        page.get_by_text("Comparing 2 Runs from 1 Experiment").wait_for(timeout=60_000)
        assert "loss/pretrain total" in text_of(page)


def test_the_address_compares_the_current_methods():
    address = charts("http://127.0.0.1:5000", "7")
    assert address.startswith("http://127.0.0.1:5000/#/experiments/7/runs?")
    assert "compareRunsMode=CHART" in address and "tags.level+%3D+%27method%27" in address
    assert charts("http://127.0.0.1:5000", None).endswith(
        "/#/experiments?workflowType=machine_learning"
    )
