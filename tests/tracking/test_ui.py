"""`moecore ui`: MLflow's own server beside an import that sees running trainings."""

import signal
import socket
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest

from moecore.core.files import UserError
from moecore.report.tables.headline_metrics import name_for_mlflow
from moecore.run.run_record import record_run
from moecore.statistics.intervals import Interval
from moecore.tracking import ui
from moecore.tracking.sync import HEADLINE, Importer
from tests.browser import opened
from tests.tracking.conftest import calibrate

# MLflow asks whether users have to log in, and its charts are resized while they are drawn.
KNOWN = ("404 (Not Found)", "ResizeObserver loop")
SLUGS = ("acc", "worst", "ece", "move", "top1", "cv2", "ms")
WAIT = 120_000  # milliseconds
RIGHT = "getBoundingClientRect().right"
VISIBLE = f"""[...document.querySelectorAll('[data-testid^=sort-header][data-testid*="/"]')].filter(
  name => name.{RIGHT} <= name.closest('[col-id]').{RIGHT}).map(name => name.textContent)"""
SCROLL = "document.querySelector('.ag-body-horizontal-scroll-viewport').scrollBy(300, 0)"
OFTEN = """
from moecore.pipeline.cli import app
from moecore.tracking import ui
ui.SECONDS = 0.2
app()
"""


def wait_until(condition, seconds: float = 120.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((ui.HOST, port)) == 0


def unused_port() -> int:
    with socket.socket() as free:
        free.bind((ui.HOST, 0))
        return free.getsockname()[1]


def test_the_first_view_has_metrics_data_source_and_live_runs(study, request):
    Path("params.yaml").write_text("run: {methods: [dense, vmoe]}\n")
    study.write()
    calibrate()
    port = unused_port()
    process = study.start("-c", OFTEN, "ui", "--port", str(port))
    try:
        assert "importing new results of 2 runs into sqlite:" in process.stdout.readline()
        assert "2 runs added" in process.stdout.readline()
        assert process.stdout.readline().endswith("compareRunsMode=CHART\n")
        address = process.stdout.readline().strip()
        assert address.startswith(f"http://{ui.HOST}:{port}/#/experiments/")
        with record_run("pretrain", None, method="dense", seed=0) as run:
            run.log(1, {"loss": 1.0})
            wait_until(lambda: sum("dvc.current" in run.data.tags for run in study.parents()) == 2)
            assert study.parent("dense/0").info.status == "RUNNING"
        wait_until(lambda: study.parent("dense/0").info.status == "FINISHED")
        wait_until(lambda: answers(port))
        browser = request.getfixturevalue("browser")
        numbers = {}
        for phase, slug in product(("finetune", "pretrain"), SLUGS):
            numbers |= name_for_mlflow(slug, phase, Interval(0.123456, 0.1, 0.2))
        parent = study.parent().info.run_id
        for name, value in numbers.items():
            study.client.log_metric(parent, name, value)
        study.client.set_tag(parent, HEADLINE, " ".join(numbers))
        wait_until(lambda: "metrics.`ms/pretrain`" in study.view()["selectedColumns"])
        from playwright.sync_api import expect

        with opened(browser, address, 1400, "light", KNOWN) as page:
            body = page.locator("body")
            for words in ("vmoe seed 0", "dense seed 0", "acc/finetune", "0.1235"):
                expect(body).to_contain_text(words, timeout=WAIT)
            names = set()
            for _ in range(9):
                names |= set(page.evaluate(VISIBLE))
                page.evaluate(SCROLL)
                page.wait_for_timeout(300)
            assert names == {name for name in [*numbers][6:] if "." not in name} | {*[*numbers][:6]}
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error
    assert not answers(port)


def test_a_port_that_is_taken_is_one_clear_line(study):
    with socket.socket() as taken:
        taken.bind((ui.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port}: .*--port"):
            ui.serve_ui(port)


@pytest.fixture
def kept_handlers():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_ends_it_after_the_import_and_a_second_one_at_once(
    study, monkeypatch, kept_handlers, presses
):
    done = []

    class Importing(Importer):
        def import_all(self):
            assert len(done) < 2
            for _ in range(presses * len(done)):
                signal.raise_signal(signal.SIGINT)
            counts = super().import_all()
            done.append(counts)
            return counts

    def start(port):
        return subprocess.Popen(["sleep", "60"], start_new_session=True)

    monkeypatch.setattr(ui, "SECONDS", 0)
    monkeypatch.setattr(ui, "Importer", Importing)
    monkeypatch.setattr(ui, "start_server", start)
    assert ui.serve_ui(unused_port()) == 0
    assert len(done) == 3 - presses
